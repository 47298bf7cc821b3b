//! Writes a token's K and V to the cache, and attends.

use super::batch::Token;
use super::cache::CacheShape;
use crate::element::{Bf16, Dtype, Element, F16};
use crate::shared::Shared;

/// Store one token's K and V `[num_kv_heads, head_dim]`.
///
/// # Safety
/// `cache` has the shape, `place` is within it, and no other thread touches it.
pub unsafe fn write_kv(
    shape: &CacheShape,
    cache: Shared<'_, u64>,
    place: usize,
    k: &[f32],
    v: &[f32],
) {
    // SAFETY: the caller's.
    unsafe {
        match shape.dtype {
            Dtype::F32 => write::<f32>(shape, cache, place, k, v),
            Dtype::Bf16 => write::<Bf16>(shape, cache, place, k, v),
            Dtype::F16 => write::<F16>(shape, cache, place, k, v),
        }
    }
}

/// # Safety
/// As `write_kv`; `E` is the cache's dtype.
unsafe fn write<E: Element>(
    shape: &CacheShape,
    cache: Shared<'_, u64>,
    place: usize,
    k: &[f32],
    v: &[f32],
) {
    let dim = shape.head_dim;
    let (block, offset) = (place / shape.block_size, place % shape.block_size);
    for (which, values) in [k, v].into_iter().enumerate() {
        for head in 0..shape.num_kv_heads {
            let start = (((block * 2 + which) * shape.num_kv_heads + head) * shape.block_size
                + offset)
                * dim;
            for (i, &x) in values[head * dim..][..dim].iter().enumerate() {
                // SAFETY: within the block, which is within the cache.
                unsafe {
                    cache
                        .address(0)
                        .cast::<E>()
                        .add(start + i)
                        .write(E::from_f32(x));
                }
            }
        }
    }
}

pub struct Query<'a> {
    pub token: &'a Token,
    pub kv_head: usize,
    pub window: usize,
    pub scale: f32,
    pub cap: f32,
    /// The row's blocks.
    pub table: &'a [i32],
}

/// Attention of one head of one token, `q` to `out` `[head_dim]`.
///
/// # Safety
/// `cache` has the shape, the table's blocks are within it, and nobody writes to it.
pub unsafe fn attend(
    shape: &CacheShape,
    cache: Shared<'_, u64>,
    query: &Query<'_>,
    q: &[f32],
    out: &mut [f32],
) {
    // SAFETY: the caller's.
    unsafe {
        match shape.dtype {
            Dtype::F32 => attend_as::<f32>(shape, cache, query, q, out),
            Dtype::Bf16 => attend_as::<Bf16>(shape, cache, query, q, out),
            Dtype::F16 => attend_as::<F16>(shape, cache, query, q, out),
        }
    }
}

/// # Safety
/// As `attend`; `E` is the cache's dtype.
unsafe fn attend_as<E: Element>(
    shape: &CacheShape,
    cache: Shared<'_, u64>,
    query: &Query<'_>,
    q: &[f32],
    out: &mut [f32],
) {
    let dim = shape.head_dim;
    let end = query.token.position + 1;
    let low = if query.window == 0 {
        0
    } else {
        end.saturating_sub(query.window)
    };
    let at = |position: usize, which: usize| {
        let block = query.table[position / shape.block_size] as usize;
        let offset = position % shape.block_size;
        let start = (((block * 2 + which) * shape.num_kv_heads + query.kv_head) * shape.block_size
            + offset)
            * dim;
        // SAFETY: the caller's.
        unsafe { std::slice::from_raw_parts(cache.address(0).cast::<E>().add(start), dim) }
    };
    let mut scores: Vec<f32> = (low..end)
        .map(|position| {
            let dot: f32 = at(position, 0)
                .iter()
                .zip(q)
                .map(|(k, q)| k.to_f32() * q)
                .sum();
            let score = dot * query.scale;
            if query.cap > 0.0 {
                query.cap * (score / query.cap).tanh()
            } else {
                score
            }
        })
        .collect();
    let top = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for score in &mut scores {
        *score = (*score - top).exp();
        sum += *score;
    }
    out.fill(0.0);
    for (position, score) in (low..end).zip(scores) {
        for (out, v) in out.iter_mut().zip(at(position, 1)) {
            *out += score / sum * v.to_f32();
        }
    }
}
