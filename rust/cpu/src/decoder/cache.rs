//! The paged keys and values of all layers: a layer is `[num_blocks, 2 (K, V), num_kv_heads, block_size]` rows.
//! Layers of different cache groups share one such lane; a block of it is of the group that holds it. Memory that no
//! token has used is not resident.

use super::batch::below;
use super::error::DecoderError;
use crate::element::CacheDtype;
use crate::shared::Shared;

#[derive(Clone, Copy, Debug)]
pub struct CacheShape {
    pub dtype: CacheDtype,
    pub num_blocks: usize,
    pub block_size: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
}

impl CacheShape {
    /// Of a block in one layer.
    pub fn block_bytes(&self) -> Option<usize> {
        let rows = 2usize
            .checked_mul(self.num_kv_heads)?
            .checked_mul(self.block_size)?;
        rows.checked_mul(self.row_bytes())
    }

    /// Of a token's key or value in one head.
    pub fn row_bytes(&self) -> usize {
        self.dtype.row_bytes(self.head_dim)
    }
}

pub struct Cache {
    pub shape: CacheShape,
    /// In one layer.
    block_bytes: usize,
    /// In words of 8 bytes, so that every dtype is aligned.
    lanes: Vec<Vec<u64>>,
    /// Which of them each layer has.
    lane_of: Vec<usize>,
}

impl Cache {
    /// `lane_of`: of each layer.
    pub fn new(shape: CacheShape, lane_of: Vec<usize>) -> Result<Self, DecoderError> {
        let too_large = || DecoderError::Description("the cache is too large".to_owned());
        let block_bytes = shape.block_bytes().ok_or_else(too_large)?;
        let bytes = block_bytes
            .checked_mul(shape.num_blocks)
            .ok_or_else(too_large)?;
        let words = bytes.div_ceil(8);
        let num_lanes = lane_of.iter().max().map_or(0, |lane| lane + 1);
        Ok(Self {
            shape,
            block_bytes,
            lane_of,
            lanes: (0..num_lanes).map(|_| vec![0; words]).collect(),
        })
    }

    /// Copy (source, destination) blocks in every lane.
    pub fn copy(&mut self, copies: &[i32]) -> Result<(), DecoderError> {
        for copy in copies.chunks_exact(2) {
            let source = below(copy[0], self.shape.num_blocks, "source of a block copy")?;
            let target = below(copy[1], self.shape.num_blocks, "target of a block copy")?;
            let bytes = self.block_bytes;
            for lane in &mut self.lanes {
                bytes_of(lane).copy_within(source * bytes..(source + 1) * bytes, target * bytes);
            }
        }
        Ok(())
    }

    /// Of the first lane.
    pub fn address(&self) -> *const u64 {
        self.lanes[0].as_ptr()
    }

    /// Each layer's memory, for the threads of a region.
    pub fn share(&mut self) -> Vec<Shared<'_, u64>> {
        let lanes = self.lanes.iter_mut().map(|lane| Shared::new(lane));
        let lanes: Vec<_> = lanes.collect();
        self.lane_of.iter().map(|lane| lanes[*lane]).collect()
    }
}

fn bytes_of(words: &mut [u64]) -> &mut [u8] {
    // SAFETY: any bytes are u64s and the other way round; the same memory, borrowed mutably.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), words.len() * 8) }
}
