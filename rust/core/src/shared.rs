//! Which blocks the rows of a decode step begin with together: a device that reads those once for all rows saves time.
//!
//! One group of rows is looked for, around the block that most rows begin with. Blocks of one prefix are one block, as
//! prefix hits and forks make them so, or the rows do not share it.

use crate::ids::{BlockId, SlotId};

/// Fewer rows read a prefix together no faster than each for itself.
pub const MIN_ROWS: usize = 16;
/// The least that must be saved: tokens of the prefix, times the rows that need not read it.
pub const MIN_SAVED_TOKENS: u32 = 16_384;

/// A decode row as the search sees it.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a> {
    pub slot: SlotId,
    pub blocks: &'a [BlockId],
    /// Position of its token: blocks that end before are read only.
    pub position: u32,
}

/// The first `num_blocks` blocks of a slot's table are those of other rows too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SharedBlocks {
    pub slot: u32,
    pub num_blocks: u32,
}

/// What is worth reading together; nothing (0 blocks) if it would not save enough.
pub fn shared_blocks<'a>(
    readers: impl ExactSizeIterator<Item = Reader<'a>> + Clone,
    block_size: u32,
) -> SharedBlocks {
    if readers.len() < MIN_ROWS {
        return SharedBlocks::default();
    }
    let Some(leader) = majority(readers.clone()) else {
        return SharedBlocks::default();
    };
    let mut depths = Vec::with_capacity(readers.len());
    for reader in readers {
        let pairs = reader.blocks.iter().zip(leader.blocks);
        let common = pairs.take_while(|(own, theirs)| own == theirs).count();
        let depth = (common as u32)
            .min(reader.position / block_size)
            .min(leader.position / block_size);
        if depth > 0 {
            depths.push(depth);
        }
    }
    depths.sort_unstable_by(|a, b| b.cmp(a));
    // With the depth of the i-th deepest row, i other rows are spared.
    let saved = |(others, depth): (usize, &u32)| (others as u32 * depth, *depth);
    let (saved_blocks, num_blocks) = depths.iter().enumerate().map(saved).max().unwrap_or((0, 0));
    if saved_blocks * block_size < MIN_SAVED_TOKENS {
        return SharedBlocks::default();
    }
    SharedBlocks {
        slot: leader.slot.0,
        num_blocks,
    }
}

/// A row that begins with the block that more than half of all begin with, if there is one (Boyer and Moore 1981).
fn majority<'a>(readers: impl Iterator<Item = Reader<'a>>) -> Option<Reader<'a>> {
    let mut candidate: Option<Reader<'a>> = None;
    let mut lead = 0_u32;
    for reader in readers {
        if lead == 0 {
            candidate = Some(reader);
        }
        let agrees = candidate.is_some_and(|c| c.blocks.first() == reader.blocks.first());
        lead = if agrees { lead + 1 } else { lead - 1 };
    }
    candidate.filter(|_| lead > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK_SIZE: u32 = 64;

    /// Rows of `(blocks, position)`.
    fn find(rows: &[(Vec<u32>, u32)]) -> SharedBlocks {
        let blocks: Vec<Vec<BlockId>> = rows
            .iter()
            .map(|(ids, _)| ids.iter().copied().map(BlockId).collect())
            .collect();
        let readers: Vec<Reader> = (0..rows.len())
            .map(|i| Reader {
                slot: SlotId(100 + i as u32),
                blocks: &blocks[i],
                position: rows[i].1,
            })
            .collect();
        shared_blocks(readers.iter().copied(), BLOCK_SIZE)
    }

    /// `depth` shared blocks, then one of its own, in whose middle it stands.
    fn row(depth: u32, own: u32) -> (Vec<u32>, u32) {
        let ids = (1..=depth).chain([1000 + own]).collect();
        (ids, depth * BLOCK_SIZE + 5)
    }

    #[test]
    fn rows_of_one_prefix_share_it() {
        let rows: Vec<_> = (0..20).map(|i| row(32, i)).collect();
        assert_eq!(find(&rows).num_blocks, 32);
        assert_eq!(find(&rows).slot, 100);
    }

    #[test]
    fn few_rows_and_short_prefixes_are_not_worth_it() {
        let few: Vec<_> = (0..15).map(|i| row(200, i)).collect();
        assert_eq!(find(&few), SharedBlocks::default());
        // 65 rows of 4 blocks save 64 * 256 tokens, 64 rows a little less.
        let short: Vec<_> = (0..65).map(|i| row(4, i)).collect();
        assert_eq!(find(&short).num_blocks, 4);
        assert_eq!(find(&short[..64]), SharedBlocks::default());
        let strangers: Vec<_> = (0..100).map(|i| (vec![2000 + i, 1], 100)).collect();
        assert_eq!(find(&strangers), SharedBlocks::default());
        assert_eq!(find(&[]), SharedBlocks::default());
    }

    #[test]
    fn the_depth_that_saves_most_is_taken() {
        // 30 rows of 40 blocks among 30 that leave them after 2, and 9 strangers.
        let mut rows: Vec<_> = (0..9).map(|i| (vec![5000 + i, 6000], 70)).collect();
        rows.extend((0..30).map(|i| row(40, i)));
        rows.extend((30..60).map(|i| row(2, i)));
        let found = find(&rows);
        assert_eq!(found.num_blocks, 40);
        assert!((109..139).contains(&found.slot), "{found:?}");
    }

    #[test]
    fn a_block_that_is_written_is_not_shared() {
        let mut rows: Vec<_> = (0..40).map(|i| row(20, i)).collect();
        for (ids, position) in &mut rows {
            ids.pop();
            *position = 20 * BLOCK_SIZE - 1;
        }
        assert_eq!(find(&rows).num_blocks, 19);
    }
}
