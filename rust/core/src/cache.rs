//! The block pool and the index of contents, kept in step, for all cache groups of a model and for its encoder's outputs.
//!
//! A block belongs to the group that took it until it is taken again; its hash names content and group. A cached prefix
//! is as long as the group that has least of it says. What an encoder made of an image lies in blocks that no sequence
//! holds: found by content, and evicted like prefixes, whichever was used least recently.

use crate::block_pool::{BlockPool, End};
use crate::config::CoreConfig;
use crate::groups::Keep;
use crate::holding::BlockTable;
use crate::ids::{BlockHash, BlockId, TokenId};
use crate::media::{self, MediaSpan};
use crate::prefix::{PrefixHasher, PrefixIndex, PromptKeys};

#[derive(Debug)]
pub struct Cache {
    block_size: u32,
    groups: Vec<Keep>,
    pool: BlockPool,
    index: PrefixIndex,
    /// Prefixes are found again; an encoder's outputs are in any case.
    has_prefixes: bool,
    hasher: PrefixHasher,
}

impl Cache {
    pub fn new(config: &CoreConfig) -> Self {
        let num_blocks = config.num_blocks;
        Self {
            block_size: config.block_size,
            groups: config.groups.clone(),
            pool: BlockPool::new(num_blocks),
            index: PrefixIndex::new(num_blocks),
            has_prefixes: config.enable_prefix_caching,
            hasher: PrefixHasher::new(config.hash_seed),
        }
    }

    pub fn groups(&self) -> &[Keep] {
        &self.groups
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
        if !self.has_prefixes {
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

    /// The longest prefix that all groups have, one table a group: what the next token reads of it. The blocks are not
    /// referenced yet, so they may be free.
    pub fn find_prefix(&self, hashes: &[BlockHash]) -> Vec<BlockTable> {
        let mut len = if self.has_prefixes { hashes.len() } else { 0 };
        // Each group cuts the prefix to one that it has; done when none cuts any more.
        loop {
            let before = len;
            for group in 0..self.groups.len() {
                len = self.longest(group, &hashes[..len]);
            }
            if len == before || self.groups.len() == 1 {
                break;
            }
        }
        let table = |group: usize| self.table(group, &hashes[..len]);
        (0..self.groups.len()).map(table).collect()
    }

    /// The first block that is read after a prefix of `len` blocks.
    fn first_read(&self, group: usize, len: usize) -> usize {
        let position = self.groups[group].first_read(len as u32 * self.block_size);
        (position / self.block_size) as usize
    }

    /// How many of the blocks are a prefix of which this group has all that is read.
    fn longest(&self, group: usize, hashes: &[BlockHash]) -> usize {
        if self.groups[group] == Keep::All {
            let known = |hash: &&BlockHash| self.find(**hash, group).is_some();
            return hashes.iter().take_while(known).count();
        }
        let mut len = hashes.len();
        let mut at = len;
        while at > self.first_read(group, len) {
            at -= 1;
            if self.find(hashes[at], group).is_none() {
                len = at;
            }
        }
        len
    }

    fn find(&self, hash: BlockHash, group: usize) -> Option<BlockId> {
        self.index.find(hash.of_group(group))
    }

    /// A group's blocks of a prefix that it has.
    fn table(&self, group: usize, hashes: &[BlockHash]) -> BlockTable {
        let first = self.first_read(group, hashes.len());
        let mut blocks = vec![BlockId(0); first];
        let read = hashes[first..].iter();
        blocks.extend(read.map_while(|hash| self.find(*hash, group)));
        BlockTable { blocks, first }
    }

    /// How many of these blocks nobody uses.
    pub fn num_unused(&self, tables: &[BlockTable]) -> u32 {
        let blocks = tables.iter().flat_map(BlockTable::held);
        let unused = blocks.filter(|block| self.pool.ref_count(**block) == 0);
        unused.count() as u32
    }

    /// How many sequences hold a block.
    pub fn num_references(&self, block: BlockId) -> u32 {
        self.pool.ref_count(block)
    }

    pub fn share(&mut self, tables: &[BlockTable]) {
        for block in tables.iter().flat_map(BlockTable::held) {
            self.pool.share(*block);
        }
    }

    /// A block to write to; evicts the least recently used cached content when nothing else is free.
    pub fn take(&mut self) -> Option<BlockId> {
        let block = self.pool.take()?;
        self.index.forget(block);
        Some(block)
    }

    /// Blocks for what an encoder makes of an image, now with a reference, and whether they have it; `None`: too few are
    /// free. From now on they are found, so that the step for which they are taken must fill them if they have it not.
    pub fn hold_outputs(&mut self, span: &MediaSpan, count: usize) -> Option<(Vec<BlockId>, bool)> {
        let hashes: Vec<_> = (0..count)
            .map(|nth| self.hasher.output(span, nth))
            .collect();
        let found: Vec<_> = hashes.iter().map(|hash| self.index.find(*hash)).collect();
        let known: Vec<_> = found.iter().flatten().copied().collect();
        for block in &known {
            self.pool.share(*block);
        }
        if count - known.len() > self.pool.num_free() as usize {
            self.release(&known);
            return None;
        }
        let mut blocks = Vec::with_capacity(count);
        for (hash, block) in hashes.into_iter().zip(found) {
            blocks.push(block.unwrap_or_else(|| {
                let block = self.take().expect("a free block");
                self.index.publish(hash, block);
                block
            }));
        }
        Some((blocks, known.len() == count))
    }

    /// Gives a sequence's references back. Its later blocks are evicted before its earlier ones, since a cached
    /// block is of use only together with all before it.
    pub fn release(&mut self, blocks: &[BlockId]) {
        for block in blocks.iter().rev().copied() {
            let end = if self.index.is_published(block) {
                End::Last
            } else {
                End::First
            };
            self.pool.release(block, end);
        }
    }

    /// The content of a sequence's blocks `from .. to` has been computed and will not change; `hashes` are of all its
    /// blocks.
    pub fn publish(
        &mut self,
        hashes: &[BlockHash],
        tables: &[BlockTable],
        (from, to): (usize, usize),
    ) {
        if !self.has_prefixes {
            return;
        }
        for (group, table) in tables.iter().enumerate() {
            let named = hashes.iter().zip(&table.blocks).take(to);
            for (hash, block) in named.skip(from.max(table.first)) {
                self.index.publish(hash.of_group(group), *block);
            }
        }
    }

    /// Forgets cached content that nobody uses; false when some stays because it is in use.
    pub fn reset(&mut self) -> bool {
        let (unused, used): (Vec<_>, Vec<_>) = self
            .index
            .blocks()
            .partition(|block| self.pool.ref_count(*block) == 0);
        for block in unused {
            self.index.forget(block);
        }
        used.is_empty()
    }

    /// `expected`: how many references are held on each block.
    pub fn check(&self, expected: &[u32]) -> Result<(), String> {
        self.pool.check(expected)?;
        self.index.check()
    }
}
