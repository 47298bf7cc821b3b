//! One cache group: the block pool and the prefix index, kept in step. Full attention is the only group today; a
//! sliding-window or recurrent-state group would be another one beside it, with the same operations.

use crate::block_pool::{BlockPool, End};
use crate::ids::{BlockId, TokenId};
use crate::media;
use crate::prefix::{BlockHash, PrefixHasher, PrefixIndex, PromptKeys};

#[derive(Debug)]
pub struct CacheGroup {
    block_size: u32,
    pool: BlockPool,
    /// `None` = prefix caching is off.
    index: Option<PrefixIndex>,
    hasher: PrefixHasher,
}

impl CacheGroup {
    pub fn new(
        block_size: u32,
        num_blocks: u32,
        enable_prefix_caching: bool,
        hash_seed: u64,
    ) -> Self {
        Self {
            block_size,
            pool: BlockPool::new(num_blocks),
            index: enable_prefix_caching.then(|| PrefixIndex::new(num_blocks)),
            hasher: PrefixHasher::new(hash_seed),
        }
    }

    /// Blocks that hold nothing or only cached content that nobody uses.
    pub fn num_free(&self) -> u32 {
        self.pool.num_free()
    }

    pub fn root(&self, extra_keys: &[u8]) -> BlockHash {
        self.hasher.root(extra_keys)
    }

    /// Continues a chain of block hashes over all full blocks of `num_tokens` tokens; nothing when caching is off.
    pub fn extend_hashes(
        &self,
        keys: PromptKeys<'_>,
        hashes: &mut Vec<BlockHash>,
        num_tokens: u32,
        token: impl Fn(u32) -> TokenId,
    ) {
        if self.index.is_none() {
            return;
        }
        let full = num_tokens / self.block_size;
        for block in hashes.len() as u32..full {
            let positions = block * self.block_size..(block + 1) * self.block_size;
            let mut parent = hashes.last().copied().unwrap_or(keys.root);
            for span in media::within(keys.media, positions.start, positions.end) {
                parent = self.hasher.media(parent, span);
            }
            hashes.push(self.hasher.block(parent, positions.map(&token)));
        }
    }

    /// Blocks of the longest cached prefix; not referenced yet, so they may be free.
    pub fn find_prefix(&self, hashes: &[BlockHash]) -> Vec<BlockId> {
        let index = self.index.as_ref();
        index.map_or_else(Vec::new, |index| index.lookup(hashes))
    }

    /// How many of these blocks nobody uses.
    pub fn num_unused(&self, blocks: &[BlockId]) -> u32 {
        let unused = |block: &&BlockId| self.pool.ref_count(**block) == 0;
        blocks.iter().filter(unused).count() as u32
    }

    /// How many sequences hold a block.
    pub fn num_references(&self, block: BlockId) -> u32 {
        self.pool.ref_count(block)
    }

    pub fn share(&mut self, blocks: &[BlockId]) {
        for block in blocks {
            self.pool.share(*block);
        }
    }

    /// A block to write to; evicts the least recently used cached content when nothing else is free.
    pub fn take(&mut self) -> Option<BlockId> {
        let block = self.pool.take()?;
        if let Some(index) = &mut self.index {
            index.forget(block);
        }
        Some(block)
    }

    /// Gives a sequence's references back. Its later blocks are evicted before its earlier ones, since a cached
    /// block is of use only together with all before it.
    pub fn release(&mut self, blocks: Vec<BlockId>) {
        for block in blocks.into_iter().rev() {
            let cached = self
                .index
                .as_ref()
                .is_some_and(|index| index.is_published(block));
            self.pool
                .release(block, if cached { End::Last } else { End::First });
        }
    }

    /// A block's content has been computed and will not change.
    pub fn publish(&mut self, hash: BlockHash, block: BlockId) {
        if let Some(index) = &mut self.index {
            index.publish(hash, block);
        }
    }

    /// Forgets cached content that nobody uses; false when some stays because it is in use.
    pub fn reset(&mut self) -> bool {
        let Some(index) = &mut self.index else {
            return true;
        };
        let (unused, used): (Vec<_>, Vec<_>) = index
            .blocks()
            .partition(|block| self.pool.ref_count(*block) == 0);
        for block in unused {
            index.forget(block);
        }
        used.is_empty()
    }

    /// `expected`: how many references are held on each block.
    pub fn check(&self, expected: &[u32]) -> Result<(), String> {
        self.pool.check(expected)?;
        self.index.as_ref().map_or(Ok(()), PrefixIndex::check)
    }
}
