//! Cache groups: layers that keep the same positions of a sequence, and what that means in blocks.
//!
//! Groups share one pool of blocks of equal bytes. Each has a block table of its own, and prefixes of its own: a prefix
//! is there when every group has what the next token reads. Not here: where a layer's numbers lie (Python's
//! `octavo.worker.cache_groups`), who gets blocks (`holding`, `scheduler`).

use crate::errors::ConfigError;

/// Most groups of a model.
pub const MAX_GROUPS: usize = 64;

/// Which positions the layers of a group read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// All before.
    All,
    /// The token's own and those before it, so many together.
    Window(u32),
    /// From the last multiple of so many on.
    Chunk(u32),
    /// The one before: what a block has is no record of its positions but a state, that after the last position of the
    /// block which has been computed. So the state at every border of blocks stays, and others are overwritten.
    State,
}

impl Keep {
    /// By the names of `CoreConfig` in `_core.pyi`.
    pub fn from_name(name: &str, size: u32) -> Result<Self, ConfigError> {
        match (name, size) {
            ("all", _) => Ok(Self::All),
            ("window", 1..) => Ok(Self::Window(size)),
            ("chunk", 1..) => Ok(Self::Chunk(size)),
            ("state", _) => Ok(Self::State),
            _ => Err(ConfigError(format!(
                "groups: ({name:?}, {size}) is neither \"all\" or \"state\" nor a \"window\" or \"chunk\" of 1 or more"
            ))),
        }
    }

    /// The first position that a token at `position` reads, or any token after it.
    pub fn first_read(self, position: u32) -> u32 {
        match self {
            Self::All => 0,
            Self::Window(size) => (position + 1).saturating_sub(size),
            Self::Chunk(size) => position - position % size,
            Self::State => position.saturating_sub(1),
        }
    }

    /// Blocks are written again at later positions: a copy of one is the state of the newest position only.
    pub fn is_overwritten(self) -> bool {
        self == Self::State
    }

    /// Blocks that suffice for a sequence to go on for ever, at least a token a step, with `depth` steps in flight;
    /// `None` = it needs one for every `block_size` tokens.
    pub fn max_blocks(self, block_size: u32, depth: u32) -> Option<u32> {
        let reach = match self {
            Self::All => return None,
            Self::Window(size) | Self::Chunk(size) => size,
            Self::State => 2,
        };
        // What the oldest step in flight reads, those after it, and the block that is written next.
        Some((reach - 1 + depth - 1).div_ceil(block_size) + 1)
    }
}

/// Blocks that one sequence alone needs for `num_blocks` blocks of tokens, all groups together.
pub fn blocks_for(groups: &[Keep], num_blocks: u32, block_size: u32, depth: u32) -> u64 {
    let most = |keep: &Keep| keep.max_blocks(block_size, depth).unwrap_or(u32::MAX);
    groups
        .iter()
        .map(|keep| u64::from(num_blocks.min(most(keep))))
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_token_reads() {
        let first = |keep: Keep| [0, 3, 4, 7, 8, 9].map(|position| keep.first_read(position));
        assert_eq!(first(Keep::All), [0; 6]);
        assert_eq!(first(Keep::Window(4)), [0, 0, 1, 4, 5, 6]);
        assert_eq!(first(Keep::Window(1)), [0, 3, 4, 7, 8, 9]);
        assert_eq!(first(Keep::Chunk(4)), [0, 0, 4, 4, 8, 8]);
        assert_eq!(first(Keep::State), [0, 2, 3, 6, 7, 8]);
    }

    #[test]
    fn a_window_takes_its_blocks_and_one_more() {
        assert_eq!(Keep::Window(1024).max_blocks(16, 1), Some(65));
        assert_eq!(Keep::Window(1024).max_blocks(16, 2), Some(65));
        assert_eq!(Keep::Chunk(8192).max_blocks(64, 2), Some(129));
        assert_eq!(Keep::Window(1).max_blocks(16, 1), Some(1));
        assert_eq!(Keep::State.max_blocks(256, 2), Some(2));
        let gemma = [Keep::All, Keep::Window(1024), Keep::Window(1024)];
        assert_eq!(blocks_for(&gemma, 2048, 16, 2), 2048 + 2 * 65);
        assert_eq!(blocks_for(&gemma, 10, 16, 2), 30);
    }

    #[test]
    fn names_are_checked() {
        assert_eq!(Keep::from_name("window", 8), Ok(Keep::Window(8)));
        assert!(Keep::from_name("window", 0).is_err());
        assert_eq!(Keep::from_name("state", 0), Ok(Keep::State));
        assert!(Keep::from_name("some", 1).is_err());
    }
}
