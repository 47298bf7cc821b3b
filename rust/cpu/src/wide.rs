//! Many (query, head) pairs: prefill. Lanes are pairs, so keys and values are read as scalars in their natural layout,
//! softmax needs no reduction across lanes, and any head dimension works.
//!
//! Matrices are transposed: queries [dim, pairs], scores [keys, pairs], output [dim, pairs], with pairs padded to whole
//! vectors (padded lanes hold zero queries and are never stored).

use crate::attention::Call;
use crate::element::Element;
use crate::plan::Item;
use crate::scratch::{CHUNK, Scratch};
use crate::simd::Simd;

/// Keys (or dimensions) that the product kernels handle at once.
const STEP: usize = 4;

/// One item's working set.
struct Work {
    /// `[dim, stride]`, scaled.
    query: *mut f32,
    /// `[dim, stride]`.
    out: *mut f32,
    /// `[CHUNK, stride]`, scores and then weights.
    score: *mut f32,
    /// `[4, stride]`: greatest score, sum of weights, what older output is multiplied by, position relative to the row's.
    state: *mut f32,
    /// Pairs, padded.
    stride: usize,
    dim: usize,
}

impl Work {
    unsafe fn greatest(&self, i: usize) -> *mut f32 {
        // SAFETY: i < stride.
        unsafe { self.state.add(i) }
    }

    unsafe fn sum(&self, i: usize) -> *mut f32 {
        // SAFETY: i < stride.
        unsafe { self.state.add(self.stride + i) }
    }

    unsafe fn rescale(&self, i: usize) -> *mut f32 {
        // SAFETY: i < stride.
        unsafe { self.state.add(2 * self.stride + i) }
    }

    unsafe fn place(&self, i: usize) -> *mut f32 {
        // SAFETY: i < stride.
        unsafe { self.state.add(3 * self.stride + i) }
    }
}

/// Attention of one item.
///
/// # Safety
/// `E` is the call's dtype, the machine has `S`'s instructions, the item is of the plan.
#[inline(always)]
pub unsafe fn run<S: Simd, E: Element>(call: &Call<'_>, item: &Item, scratch: &mut Scratch) {
    let (dim, pairs) = (call.args.head_dim, item.num_pairs());
    let stride = pairs.next_multiple_of(S::LANES);
    let work = Work {
        query: scratch.query.take(dim * stride),
        out: scratch.out.take(dim * stride),
        score: scratch.score.take(CHUNK * stride),
        state: scratch.state.take(4 * stride),
        stride,
        dim,
    };
    let copies = if E::IS_F32 { 0 } else { CHUNK * dim };
    let copy = (scratch.key.take(copies), scratch.value.take(copies));
    let line = scratch.line.take(dim);
    let (mut keys, mut values) = (
        [std::ptr::null::<f32>(); CHUNK],
        [std::ptr::null::<f32>(); CHUNK],
    );
    // SAFETY: buffers are as large as their indices; the call's addresses are checked by the plan.
    unsafe {
        load_queries(call, item, &work);
        for low in (item.low..item.high).step_by(CHUNK) {
            let count = CHUNK.min(item.high - low);
            chunk::<S, E>(
                call,
                item,
                low,
                &mut keys[..count],
                &mut values[..count],
                copy,
            );
            scores::<S>(&work, &mut keys, count);
            let hidden = Hidden::find(call, item, low, count);
            softmax::<S>(&work, call, count, &hidden);
            weigh::<S>(&work, &values[..count]);
        }
        for i in 0..pairs {
            for d in 0..dim {
                line.add(d).write(*work.out.add(d * stride + i));
            }
            call.finish::<S>(item, item.first + i, line, *work.greatest(i), *work.sum(i));
        }
    }
}

/// Transpose and scale the queries; reset the state.
///
/// # Safety
/// As `run`.
#[inline(always)]
unsafe fn load_queries(call: &Call<'_>, item: &Item, work: &Work) {
    // SAFETY: i < stride, d < dim.
    unsafe {
        for i in 0..work.stride {
            let pair = (item.first + i).min(item.last - 1);
            for d in 0..work.dim {
                let q = if i < item.num_pairs() {
                    call.query_number(item, pair, d) * call.q_scale
                } else {
                    0.0
                };
                work.query.add(d * work.stride + i).write(q);
                work.out.add(d * work.stride + i).write(0.0);
            }
            work.greatest(i).write(f32::MIN);
            work.sum(i).write(0.0);
            work.place(i).write((pair / call.group) as f32);
        }
    }
}

/// Addresses of a chunk's keys and values as f32: in place if they are, else widened into `copy`.
///
/// # Safety
/// As `run`; `copy` has room for the chunk.
#[inline(always)]
unsafe fn chunk<S: Simd, E: Element>(
    call: &Call<'_>,
    item: &Item,
    low: usize,
    keys: &mut [*const f32],
    values: &mut [*const f32],
    copy: (*mut f32, *mut f32),
) {
    let (dim, offset) = (call.args.head_dim, call.value_offset::<E>());
    let mut stored = [std::ptr::null::<E>(); CHUNK];
    // SAFETY: positions are the item's; widened rows are dim apart.
    unsafe {
        call.keys(item, low, &mut stored[..keys.len()]);
        for (j, &key) in stored[..keys.len()].iter().enumerate() {
            if E::IS_F32 {
                keys[j] = key.cast();
                values[j] = key.add(offset).cast();
            } else {
                keys[j] = widen::<S, E>(key, copy.0.add(j * dim), dim);
                values[j] = widen::<S, E>(key.add(offset), copy.1.add(j * dim), dim);
            }
        }
    }
}

/// A row as f32.
///
/// # Safety
/// `source` is a row of `count` numbers, for which `target` has room.
#[inline(always)]
unsafe fn widen<S: Simd, E: Element>(
    source: *const E,
    target: *mut f32,
    count: usize,
) -> *const f32 {
    let mut d = 0;
    // SAFETY: d stays below count.
    unsafe {
        let scale = E::scale(source, count);
        while d + S::LANES <= count {
            let mut wide = E::load::<S>(source.add(d));
            if E::IS_SCALED {
                wide = S::mul(wide, S::splat(scale));
            }
            S::store(target.add(d), wide);
            d += S::LANES;
        }
        while d < count {
            target.add(d).write((*source.add(d)).to_f32() * scale);
            d += 1;
        }
    }
    target
}

/// score[j, i] = key j . query i.
///
/// # Safety
/// As `run`; the first `count` keys are set (this sets the rest of the last step to repeats).
#[inline(always)]
unsafe fn scores<S: Simd>(work: &Work, keys: &mut [*const f32; CHUNK], count: usize) {
    let padded = count.next_multiple_of(STEP);
    for j in count..padded {
        keys[j] = keys[count - 1];
    }
    // SAFETY: padded <= CHUNK because STEP divides it.
    unsafe {
        for j in (0..padded).step_by(STEP) {
            let rows: [*const f32; STEP] = std::array::from_fn(|n| keys[j + n]);
            let target = work.score.add(j * work.stride);
            let mut i = 0;
            while i < work.stride {
                i += match (work.stride - i) / S::LANES {
                    left if left >= S::TILE && S::TILE == 4 => dots::<S, 4>(work, &rows, target, i),
                    3 if S::TILE == 4 => dots::<S, 3>(work, &rows, target, i),
                    left if left >= 2 && S::TILE >= 2 => dots::<S, 2>(work, &rows, target, i),
                    _ => dots::<S, 1>(work, &rows, target, i),
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
unsafe fn dots<S: Simd, const W: usize>(
    work: &Work,
    keys: &[*const f32; STEP],
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
                let k = S::splat(*keys[n].add(d));
                for w in 0..W {
                    acc[n][w] = S::fma(k, q[w], acc[n][w]);
                }
            }
        }
        for n in 0..STEP {
            for w in 0..W {
                S::store(target.add(n * work.stride + i + w * S::LANES), acc[n][w]);
            }
        }
    }
    W * S::LANES
}

/// Which scores of a chunk some query may not see.
struct Hidden {
    any: bool,
    /// Position of the chunk's first key, relative to the row's first query.
    first: f32,
    /// `window`, or infinity.
    window: f32,
}

impl Hidden {
    #[inline(always)]
    fn find(call: &Call<'_>, item: &Item, low: usize, count: usize) -> Hidden {
        let row = call.row(item);
        let (oldest, newest) = (
            row.position + item.first / call.group,
            row.position + (item.last - 1) / call.group,
        );
        let window = call.args.window;
        Hidden {
            any: low + count - 1 > oldest || (window > 0 && newest >= low + window),
            first: (low as i64 - row.position as i64) as f32,
            window: if window > 0 {
                window as f32
            } else {
                f32::INFINITY
            },
        }
    }
}

/// Turn scores into weights and update the state.
///
/// # Safety
/// As `run`; `count` rows of scores are set.
#[inline(always)]
unsafe fn softmax<S: Simd>(work: &Work, call: &Call<'_>, count: usize, hidden: &Hidden) {
    let stride = work.stride;
    // SAFETY: i + LANES <= stride and j < CHUNK.
    unsafe {
        for i in (0..stride).step_by(S::LANES) {
            let (old, place) = (S::load(work.greatest(i)), S::load(work.place(i)));
            // A key at k is seen from p if k <= p and p - window < k, that is p + 1 <= k + window.
            let after = S::add(place, S::splat(1.0));
            let mut top = old;
            for j in 0..count {
                let at = work.score.add(j * stride + i);
                let mut x = S::load(at);
                if call.cap > 0.0 {
                    x = S::soft_cap(x, call.cap);
                }
                if hidden.any {
                    let (key, none) = (hidden.first + j as f32, S::splat(f32::NEG_INFINITY));
                    x = S::select_le(S::splat(key), place, x, none);
                    x = S::select_le(after, S::splat(key + hidden.window), x, none);
                }
                if call.cap > 0.0 || hidden.any {
                    S::store(at, x);
                }
                top = S::max(top, x);
            }
            let mut total = S::splat(0.0);
            for j in 0..count {
                let at = work.score.add(j * stride + i);
                let p = S::exp2(S::sub(S::load(at), top));
                S::store(at, p);
                total = S::add(total, p);
            }
            let rescale = S::exp2(S::sub(old, top));
            S::store(work.greatest(i), top);
            S::store(work.rescale(i), rescale);
            S::store(work.sum(i), S::fma(S::load(work.sum(i)), rescale, total));
        }
    }
}

/// out[d, i] = out[d, i] * rescale[i] + sum over j of value j [d] * weight[j, i].
///
/// # Safety
/// As `run`.
#[inline(always)]
unsafe fn weigh<S: Simd>(work: &Work, values: &[*const f32]) {
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
