//! Which block holds which content: chained hashes of token blocks, and the index from hash to block.
//!
//! A block's hash covers everything before it and the request's extra keys (cache salt …), so equal hashes mean equal
//! KV. SipHash-128 (Aumasson and Bernstein, 2012) is keyed per process: nobody outside can craft a collision. The index
//! does not own blocks; `cache` keeps it in step with the pool.

use std::collections::HashMap;
use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher13};

use crate::ids::{BlockHash, BlockId, TokenId};
use crate::media::MediaSpan;
use crate::request::Request;

/// What the hashes of a prompt's blocks cover beside its tokens.
#[derive(Clone, Copy, Debug)]
pub struct PromptKeys<'a> {
    /// Parent of the first block's hash.
    pub root: BlockHash,
    pub media: &'a [MediaSpan],
}

impl<'a> PromptKeys<'a> {
    pub fn of(request: &'a Request) -> Self {
        Self {
            root: request.root,
            media: &request.media,
        }
    }
}

/// Makes the hashes.
#[derive(Clone, Copy, Debug)]
pub struct PrefixHasher {
    keyed: SipHasher13,
}

impl PrefixHasher {
    pub fn new(seed: u64) -> Self {
        Self {
            keyed: SipHasher13::new_with_keys(seed, seed.rotate_left(32) ^ 0x9e37_79b9_7f4a_7c15),
        }
    }

    /// The parent of first blocks: what keeps requests apart even when their tokens are equal.
    pub fn root(&self, extra_keys: &[u8]) -> BlockHash {
        let mut hasher = self.keyed;
        hasher.write(extra_keys);
        BlockHash(hasher.finish128().into())
    }

    /// The parent of a block in which some token stands for an image: the token ids of all images are alike.
    pub fn media(&self, parent: BlockHash, span: &MediaSpan) -> BlockHash {
        let mut hasher = self.keyed;
        hasher.write(b"media");
        hasher.write_u128(parent.0);
        hasher.write_u32(span.start);
        hasher.write_u128(span.digest);
        BlockHash(hasher.finish128().into())
    }

    /// The hash of the nth block of what an encoder makes of an image, wherever it is shown.
    pub fn output(&self, span: &MediaSpan, nth: usize) -> BlockHash {
        let mut hasher = self.keyed;
        hasher.write(b"output");
        hasher.write_u128(span.digest);
        hasher.write_u64(nth as u64);
        BlockHash(hasher.finish128().into())
    }

    /// The hash of a full block.
    pub fn block(&self, parent: BlockHash, token_ids: impl Iterator<Item = TokenId>) -> BlockHash {
        let mut hasher = self.keyed;
        hasher.write_u128(parent.0);
        for token_id in token_ids {
            hasher.write_u32(token_id);
        }
        BlockHash(hasher.finish128().into())
    }
}

/// Hash to block and back, for blocks whose content has been computed.
#[derive(Debug)]
pub struct PrefixIndex {
    block_of: HashMap<BlockHash, BlockId>,
    hash_of: Vec<Option<BlockHash>>,
}

impl PrefixIndex {
    pub fn new(num_blocks: u32) -> Self {
        Self {
            block_of: HashMap::new(),
            hash_of: vec![None; num_blocks as usize],
        }
    }

    /// The block that has this content.
    pub fn find(&self, hash: BlockHash) -> Option<BlockId> {
        self.block_of.get(&hash).copied()
    }

    /// Makes a computed block findable, unless an equal one already is.
    pub fn publish(&mut self, hash: BlockHash, block: BlockId) {
        if let std::collections::hash_map::Entry::Vacant(entry) = self.block_of.entry(hash) {
            entry.insert(block);
            let previous = self.hash_of[block.0 as usize].replace(hash);
            assert!(previous.is_none(), "block {} published twice", block.0);
        }
    }

    /// The block's content is about to be overwritten.
    pub fn forget(&mut self, block: BlockId) {
        if let Some(hash) = self.hash_of[block.0 as usize].take() {
            self.block_of.remove(&hash);
        }
    }

    pub fn is_published(&self, block: BlockId) -> bool {
        self.hash_of[block.0 as usize].is_some()
    }

    pub fn blocks(&self) -> impl Iterator<Item = BlockId> {
        self.block_of.values().copied()
    }

    /// Whether both directions agree.
    pub fn check(&self) -> Result<(), String> {
        for (hash, block) in &self.block_of {
            if self.hash_of[block.0 as usize] != Some(*hash) {
                return Err(format!(
                    "block {} is indexed under a hash that it does not have",
                    block.0
                ));
            }
        }
        let hashed = self.hash_of.iter().flatten().count();
        if hashed != self.block_of.len() {
            return Err(format!(
                "{hashed} blocks have hashes, {} are indexed",
                self.block_of.len()
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(hasher: &PrefixHasher, salt: &[u8], blocks: &[[TokenId; 2]]) -> Vec<BlockHash> {
        let mut parent = hasher.root(salt);
        blocks
            .iter()
            .map(|block| {
                parent = hasher.block(parent, block.iter().copied());
                parent
            })
            .collect()
    }

    #[test]
    fn hashes_depend_on_everything_before() {
        let hasher = PrefixHasher::new(1);
        let base = chain(&hasher, b"", &[[1, 2], [3, 4]]);
        assert_eq!(base, chain(&hasher, b"", &[[1, 2], [3, 4]]));
        assert_ne!(base[1], chain(&hasher, b"", &[[1, 3], [3, 4]])[1]);
        assert_ne!(base[0], chain(&hasher, b"salt", &[[1, 2]])[0]);
        assert_ne!(base, chain(&PrefixHasher::new(2), b"", &[[1, 2], [3, 4]]));
    }

    #[test]
    fn only_published_content_is_found() {
        let hasher = PrefixHasher::new(1);
        let content = chain(&hasher, b"", &[[1, 2], [3, 4], [5, 6]]);
        let mut index = PrefixIndex::new(8);
        index.publish(content[0], BlockId(5));
        index.publish(content[2], BlockId(6));
        let found = |index: &PrefixIndex| [0, 1, 2].map(|at| index.find(content[at]).map(|b| b.0));
        assert_eq!(found(&index), [Some(5), None, Some(6)]);
        index.publish(content[1], BlockId(2));
        assert_eq!(found(&index), [Some(5), Some(2), Some(6)]);
        index.publish(content[1], BlockId(3));
        assert!(!index.is_published(BlockId(3)));
        index.forget(BlockId(5));
        assert_eq!(found(&index), [None, Some(2), Some(6)]);
        assert_eq!(index.find(content[1].of_group(1)), None);
        index.publish(content[1].of_group(1), BlockId(4));
        assert_eq!(index.find(content[1].of_group(1)), Some(BlockId(4)));
        index.check().unwrap();
    }
}
