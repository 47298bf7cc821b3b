//! Block ids, their reference counts, and the order in which free ones are taken again.
//!
//! No policy and no content: who may share what, and what a free block still caches, is `cache`'s business. Taking,
//! sharing and releasing are O(1); the free list is intrusive, least recently used first.

use crate::ids::BlockId;

/// Where a block enters the free list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Taken next: it holds nothing of worth.
    First,
    /// Taken after all others.
    Last,
}

/// Block 0, the null block, is never handed out: as the list's sentinel, `next[0]` is the first free block and
/// `prev[0]` the last.
#[derive(Debug)]
pub struct BlockPool {
    ref_count: Vec<u32>,
    prev: Vec<u32>,
    next: Vec<u32>,
    num_free: u32,
}

impl BlockPool {
    /// `num_blocks` counts the null block.
    pub fn new(num_blocks: u32) -> Self {
        Self {
            ref_count: vec![0; num_blocks as usize],
            prev: (0..num_blocks)
                .map(|b| b.checked_sub(1).unwrap_or(num_blocks - 1))
                .collect(),
            next: (0..num_blocks).map(|b| (b + 1) % num_blocks).collect(),
            num_free: num_blocks - 1,
        }
    }

    pub fn num_blocks(&self) -> u32 {
        self.ref_count.len() as u32
    }

    pub fn num_free(&self) -> u32 {
        self.num_free
    }

    pub fn ref_count(&self, block: BlockId) -> u32 {
        self.ref_count[block.0 as usize]
    }

    /// The first free block, now with one reference.
    pub fn take(&mut self) -> Option<BlockId> {
        let block = self.next[0];
        if block == 0 {
            return None;
        }
        self.unlink(block);
        self.ref_count[block as usize] = 1;
        Some(BlockId(block))
    }

    /// One more reference; the block may be free.
    pub fn share(&mut self, block: BlockId) {
        assert_ne!(block.0, 0, "the null block is nobody's");
        if self.ref_count[block.0 as usize] == 0 {
            self.unlink(block.0);
        }
        self.ref_count[block.0 as usize] += 1;
    }

    /// One reference less; the last one frees the block.
    pub fn release(&mut self, block: BlockId, end: End) {
        let count = &mut self.ref_count[block.0 as usize];
        assert!(*count > 0, "block {} released twice", block.0);
        *count -= 1;
        if *count == 0 {
            self.link(block.0, end);
        }
    }

    fn unlink(&mut self, block: u32) {
        let (prev, next) = (self.prev[block as usize], self.next[block as usize]);
        self.next[prev as usize] = next;
        self.prev[next as usize] = prev;
        self.num_free -= 1;
    }

    fn link(&mut self, block: u32, end: End) {
        let (prev, next) = match end {
            End::First => (0, self.next[0]),
            End::Last => (self.prev[0], 0),
        };
        self.prev[block as usize] = prev;
        self.next[block as usize] = next;
        self.next[prev as usize] = block;
        self.prev[next as usize] = block;
        self.num_free += 1;
    }

    /// Whether the free list holds exactly the blocks without references, and those references are `expected`.
    pub fn check(&self, expected: &[u32]) -> Result<(), String> {
        let mut listed = vec![false; self.ref_count.len()];
        let (mut block, mut count) = (self.next[0], 0);
        while block != 0 {
            if std::mem::replace(&mut listed[block as usize], true) {
                return Err(format!("block {block} is twice in the free list"));
            }
            if self.prev[self.next[block as usize] as usize] != block {
                return Err(format!("the free list is torn at block {block}"));
            }
            count += 1;
            block = self.next[block as usize];
        }
        if count != self.num_free {
            return Err(format!(
                "{count} blocks in the free list, {} counted",
                self.num_free
            ));
        }
        for (block, (have, want)) in self.ref_count.iter().zip(expected).enumerate() {
            if have != want {
                return Err(format!(
                    "block {block} has {have} references, {want} are held"
                ));
            }
            if block != 0 && (*have == 0) != listed[block] {
                return Err(format!(
                    "block {block} with {have} references is wrongly (un)listed as free"
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_taken_in_lru_order() {
        let mut pool = BlockPool::new(4);
        let blocks: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!(blocks, [BlockId(1), BlockId(2), BlockId(3)]);
        pool.release(BlockId(2), End::Last);
        pool.release(BlockId(1), End::Last);
        pool.release(BlockId(3), End::First);
        assert_eq!(pool.take(), Some(BlockId(3)));
        pool.share(BlockId(1));
        assert_eq!(pool.num_free(), 1);
        assert_eq!(pool.take(), Some(BlockId(2)));
        assert_eq!(pool.take(), None);
        pool.check(&[0, 1, 1, 1]).unwrap();
        assert!(pool.check(&[0, 1, 1, 2]).is_err());
    }

    #[test]
    #[should_panic(expected = "released twice")]
    fn a_double_release_is_noticed() {
        let mut pool = BlockPool::new(3);
        let block = pool.take().unwrap();
        pool.release(block, End::Last);
        pool.release(block, End::Last);
    }

    #[test]
    fn a_shared_block_is_freed_by_its_last_owner() {
        let mut pool = BlockPool::new(2);
        let block = pool.take().unwrap();
        pool.share(block);
        pool.release(block, End::Last);
        assert_eq!((pool.num_free(), pool.ref_count(block)), (0, 1));
        pool.release(block, End::Last);
        assert_eq!(pool.num_free(), 1);
    }
}
