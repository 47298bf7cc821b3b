//! The two matrix products of wide.rs, of a chunk of keys: scores, and outputs from weights. Not here: what lies between.

use crate::element::Element;
use crate::scratch::CHUNK;
use crate::simd::{Simd, prefetch_far};

/// Keys (or dimensions) that the product kernels handle at once.
const STEP: usize = 4;

/// One item's working set.
pub struct Work {
    /// `[dim, stride]`, scaled.
    pub query: *mut f32,
    /// `[dim, stride]`.
    pub out: *mut f32,
    /// `[CHUNK, stride]`, scores and then weights.
    pub score: *mut f32,
    /// `[6, stride]`: greatest score and sum of weights of the segment, what older output is multiplied by, position
    /// relative to the first pair's; greatest score and sum of the segments before.
    pub state: *mut f32,
    /// `[dim, stride]`, of the segments before.
    pub total: *mut f32,
    /// Pairs, padded.
    pub stride: usize,
    pub dim: usize,
}

impl Work {
    pub unsafe fn greatest(&self, i: usize) -> *mut f32 {
        // SAFETY: i < stride.
        unsafe { self.state.add(i) }
    }

    pub unsafe fn sum(&self, i: usize) -> *mut f32 {
        // SAFETY: i < stride.
        unsafe { self.state.add(self.stride + i) }
    }

    pub unsafe fn rescale(&self, i: usize) -> *mut f32 {
        // SAFETY: i < stride.
        unsafe { self.state.add(2 * self.stride + i) }
    }

    pub unsafe fn place(&self, i: usize) -> *mut f32 {
        // SAFETY: i < stride.
        unsafe { self.state.add(3 * self.stride + i) }
    }

    pub unsafe fn total_greatest(&self, i: usize) -> *mut f32 {
        // SAFETY: i < stride.
        unsafe { self.state.add(4 * self.stride + i) }
    }

    pub unsafe fn total_sum(&self, i: usize) -> *mut f32 {
        // SAFETY: i < stride.
        unsafe { self.state.add(5 * self.stride + i) }
    }
}

/// A key as f32, and what its scores are multiplied by.
#[derive(Clone, Copy)]
pub struct Key {
    pub numbers: *const f32,
    pub scale: f32,
}

pub const NO_KEY: Key = Key {
    numbers: std::ptr::null(),
    scale: 1.0,
};

/// Keys of the next chunk, to be asked for, and how far behind them their values lie.
pub struct Coming<'a, E> {
    pub keys: &'a [*const E],
    pub value_offset: usize,
}

/// score[j, i] = key j . query i.
///
/// # Safety
/// As `run`; the first `count` keys are set (this sets the rest of the last step to repeats).
#[inline(always)]
pub unsafe fn scores<S: Simd, E: Element>(
    work: &Work,
    keys: &mut [Key; CHUNK],
    count: usize,
    coming: &Coming<'_, E>,
) {
    let padded = count.next_multiple_of(STEP);
    for j in count..padded {
        keys[j] = keys[count - 1];
    }
    // SAFETY: padded <= CHUNK because STEP divides it.
    unsafe {
        for j in (0..padded).step_by(STEP) {
            let rows: [Key; STEP] = std::array::from_fn(|n| keys[j + n]);
            let target = work.score.add(j * work.stride);
            for &next in coming.keys.iter().skip(j).take(STEP) {
                prefetch_far(next, E::row_len(work.dim));
                prefetch_far(next.wrapping_add(coming.value_offset), E::row_len(work.dim));
            }
            let mut i = 0;
            while i < work.stride {
                i += match (work.stride - i) / S::LANES {
                    left if left >= S::TILE && S::TILE == 4 => {
                        dots::<S, E, 4>(work, &rows, target, i)
                    }
                    3 if S::TILE == 4 => dots::<S, E, 3>(work, &rows, target, i),
                    left if left >= 2 && S::TILE >= 2 => dots::<S, E, 2>(work, &rows, target, i),
                    _ => dots::<S, E, 1>(work, &rows, target, i),
                };
            }
        }
    }
}

/// STEP keys against W vectors of queries from lane i; the lanes done.
///
/// # Safety
/// As `scores`.
#[inline(always)]
unsafe fn dots<S: Simd, E: Element, const W: usize>(
    work: &Work,
    keys: &[Key; STEP],
    target: *mut f32,
    i: usize,
) -> usize {
    // SAFETY: i + W * LANES <= stride, keys are valid for dim floats.
    unsafe {
        let mut acc = [[S::splat(0.0); W]; STEP];
        for d in 0..work.dim {
            let line = work.query.add(d * work.stride + i);
            let mut q = [S::splat(0.0); W];
            for (w, q) in q.iter_mut().enumerate() {
                *q = S::load(line.add(w * S::LANES));
            }
            for n in 0..STEP {
                let k = S::splat(*keys[n].numbers.add(d));
                for w in 0..W {
                    acc[n][w] = S::fma(k, q[w], acc[n][w]);
                }
            }
        }
        for n in 0..STEP {
            for w in 0..W {
                if E::IS_SCALED {
                    acc[n][w] = S::mul(acc[n][w], S::splat(keys[n].scale));
                }
                S::store(target.add(n * work.stride + i + w * S::LANES), acc[n][w]);
            }
        }
    }
    W * S::LANES
}

/// out[d, i] = out[d, i] * rescale[i] + sum over j of value j [d] * weight[j, i].
///
/// # Safety
/// As `run`.
#[inline(always)]
pub unsafe fn weigh<S: Simd>(work: &Work, values: &[*const f32]) {
    let mut d = 0;
    // SAFETY: d + N <= dim.
    unsafe {
        while d + STEP <= work.dim {
            weigh_at::<S, STEP>(work, values, d);
            d += STEP;
        }
        while d < work.dim {
            weigh_at::<S, 1>(work, values, d);
            d += 1;
        }
    }
}

/// # Safety
/// As `weigh`; d + N <= dim.
#[inline(always)]
unsafe fn weigh_at<S: Simd, const N: usize>(work: &Work, values: &[*const f32], d: usize) {
    let mut i = 0;
    // SAFETY: the caller's.
    unsafe {
        while i < work.stride {
            i += match (work.stride - i) / S::LANES {
                left if left >= S::TILE && S::TILE == 4 => sums::<S, N, 4>(work, values, d, i),
                3 if S::TILE == 4 => sums::<S, N, 3>(work, values, d, i),
                left if left >= 2 && S::TILE >= 2 => sums::<S, N, 2>(work, values, d, i),
                _ => sums::<S, N, 1>(work, values, d, i),
            };
        }
    }
}

/// N dimensions from d of W vectors of pairs from lane i; the lanes done.
///
/// # Safety
/// As `weigh`.
#[inline(always)]
unsafe fn sums<S: Simd, const N: usize, const W: usize>(
    work: &Work,
    values: &[*const f32],
    d: usize,
    i: usize,
) -> usize {
    // SAFETY: i + W * LANES <= stride, d + N <= dim, values are valid for dim floats.
    unsafe {
        let mut acc = [[S::splat(0.0); W]; N];
        for n in 0..N {
            for w in 0..W {
                let old = S::load(work.out.add((d + n) * work.stride + i + w * S::LANES));
                acc[n][w] = S::mul(old, S::load(work.rescale(i + w * S::LANES)));
            }
        }
        for (j, &value) in values.iter().enumerate() {
            let line = work.score.add(j * work.stride + i);
            let mut p = [S::splat(0.0); W];
            for (w, p) in p.iter_mut().enumerate() {
                *p = S::load(line.add(w * S::LANES));
            }
            for n in 0..N {
                let v = S::splat(*value.add(d + n));
                for w in 0..W {
                    acc[n][w] = S::fma(v, p[w], acc[n][w]);
                }
            }
        }
        for n in 0..N {
            for w in 0..W {
                S::store(
                    work.out.add((d + n) * work.stride + i + w * S::LANES),
                    acc[n][w],
                );
            }
        }
    }
    W * S::LANES
}
