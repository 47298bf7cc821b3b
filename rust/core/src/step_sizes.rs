//! The sizes that steps with prompts are padded to, and pieces of prompts that fill them.
//!
//! A step that runs as a CUDA graph takes as long as the graph's size, however few tokens it has. So prompts that must
//! be cut are cut into as few and as equal pieces as the wanted step time allows, each of which fills a size beside the
//! decode rows. How long steps take is another matter (`step_cost`).

use crate::step_cost::MIN_CHUNK;

/// Tokens of a step, ascending; none: steps are as long as their tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepSizes(Vec<u32>);

impl StepSizes {
    pub fn new(mut sizes: Vec<u32>) -> Self {
        sizes.sort_unstable();
        Self(sizes)
    }

    /// The size that a step of so many tokens has: its own, when it is larger than all.
    pub fn padded(&self, num_tokens: u32) -> u32 {
        let place = self.0.partition_point(|size| *size < num_tokens);
        self.0.get(place).copied().unwrap_or(num_tokens)
    }

    /// Prompt tokens of a step beside `num_decodes`, at most `most` (but `MIN_CHUNK`), while `num_pending` wait or run.
    pub fn piece(&self, num_decodes: u32, most: u32, num_pending: u64) -> u32 {
        if self.0.is_empty() || num_pending <= u64::from(most) {
            return most;
        }
        let num_pieces = num_pending.div_ceil(u64::from(most.max(1)));
        let piece = num_pending.div_ceil(num_pieces) as u32;
        let equal = self.padded(piece + num_decodes);
        if equal <= most + num_decodes {
            return equal - num_decodes;
        }
        let beyond = self.0.partition_point(|size| *size <= most + num_decodes);
        let filled = |size: &u32| size.checked_sub(num_decodes);
        let fitting = self.0[..beyond].last().and_then(filled);
        match fitting {
            Some(tokens) if tokens >= MIN_CHUNK => tokens,
            _ => most,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sizes() -> StepSizes {
        StepSizes::new(vec![64, 128, 256, 512, 640, 1024])
    }

    #[test]
    fn a_step_has_the_next_size_or_its_own() {
        for (num_tokens, size) in [(1, 64), (64, 64), (65, 128), (1024, 1024), (1025, 1025)] {
            assert_eq!(sizes().padded(num_tokens), size);
            assert_eq!(StepSizes::default().padded(num_tokens), num_tokens);
        }
    }

    #[test]
    fn pieces_are_few_and_equal_and_fill_a_size() {
        // Two pieces of 512 and 8 decodes need the 640; when that is too much, three fill the 512.
        assert_eq!(sizes().piece(8, 700, 1024), 632);
        assert_eq!(sizes().piece(8, 600, 1024), 504);
        // A third each would need 256 + 8: too many tokens for the next size.
        assert_eq!(sizes().piece(8, 510, 768), 504);
        // What fits is not cut.
        assert_eq!(sizes().piece(8, 700, 650), 700);
        assert_eq!(sizes().piece(8, u32::MAX, 1 << 30), u32::MAX);
    }

    #[test]
    fn where_no_size_is_small_enough_the_limit_counts() {
        assert_eq!(sizes().piece(60, 32, 1000), 32);
        assert_eq!(sizes().piece(2000, 300, 1000), 250);
        assert_eq!(StepSizes::default().piece(8, 300, 1000), 300);
    }

    proptest! {
        #[test]
        fn a_piece_keeps_the_limit_and_goes_on(
            num_decodes in 0u32..300,
            most in 32u32..4000,
            num_pending in 1u64..100_000,
        ) {
            let piece = sizes().piece(num_decodes, most, num_pending);
            prop_assert!(piece >= MIN_CHUNK.min(num_pending as u32));
            prop_assert!(piece <= most);
        }
    }
}
