//! Many (query, head) pairs: prefill. Lanes are pairs, so keys and values are read as scalars in their natural layout,
//! softmax needs no reduction across lanes, and any head dimension works.
//!
//! Matrices are transposed: queries [dim, pairs], scores [keys, pairs], output [dim, pairs], with pairs padded to whole
//! vectors (padded lanes hold zero queries and are never stored).

use std::ops::Range;

use super::call::Call;
use super::plan::Item;
use super::products::{Coming, Key, NO_KEY, Work, scores, weigh};
use super::segment::{self, Seen, chunks, segments};
use crate::element::Element;
use crate::scratch::{CHUNK, Scratch};
use crate::simd::{GROUP, Simd};

/// Attention of one item.
///
/// # Safety
/// `E` is the call's dtype, the machine has `S`'s instructions, the item is of the plan.
#[inline(always)]
pub unsafe fn run<S: Simd, E: Element>(
    call: &Call<'_>,
    item: &Item,
    next: Option<&Item>,
    scratch: &mut Scratch,
) {
    let (dim, pairs) = (call.args.head_dim, item.num_pairs());
    let stride = pairs.next_multiple_of(S::LANES);
    let work = Work {
        query: scratch.query.take(dim * stride),
        out: scratch.out.take(dim * stride),
        score: scratch.score.take(CHUNK * stride),
        state: scratch.state.take(6 * stride),
        total: scratch.total.take(dim * stride),
        stride,
        dim,
    };
    let copies = if E::IS_F32 { 0 } else { CHUNK * dim };
    let copy = (scratch.key.take(copies), scratch.value.take(copies));
    let line = scratch.line.take(dim * S::LANES);
    let is_part = call.is_part(item);
    let mut stored = [std::ptr::null::<E>(); CHUNK];
    let (mut keys, mut values) = ([NO_KEY; CHUNK], [std::ptr::null::<f32>(); CHUNK]);
    // SAFETY: buffers are as large as their indices; the call's addresses are checked by the plan.
    unsafe {
        load_queries::<S>(call, item, &work);
        for positions in segments(item.low, item.high) {
            let start = positions.start;
            reset::<S>(&work);
            for chunk in chunks(positions) {
                let skipped = chunk.start % CHUNK;
                let (low, count) = (chunk.start - skipped, chunk.len() + skipped);
                let end = chunk.end;
                load_chunk::<S, E>(
                    call,
                    item,
                    chunk,
                    &mut keys[..count],
                    &mut values[..count],
                    copy,
                );
                let coming = Coming {
                    keys: coming_keys(call, item, next, end, &mut stored),
                    value_offset: call.value_offset::<E>(),
                };
                scores::<S, E>(&work, &mut keys, count, &coming);
                let hidden = Hidden::find(call, item, low, count, skipped);
                softmax::<S>(&work, call, count, &hidden);
                weigh::<S>(&work, &values[..count]);
            }
            if is_part {
                give::<S>(call, item, &work, Some(start), line);
            } else {
                absorb::<S>(&work, start == item.low);
            }
        }
        if !is_part {
            give::<S>(call, item, &work, None, line);
        }
    }
}

/// Keys that are read behind position `end`: of the next chunk, or of the next item's first.
///
/// # Safety
/// As `run`.
#[inline(always)]
unsafe fn coming_keys<'a, E: Element>(
    call: &Call<'_>,
    item: &Item,
    next: Option<&Item>,
    end: usize,
    keys: &'a mut [*const E; CHUNK],
) -> &'a [*const E] {
    let (item, low) = match next {
        Some(next) if end == item.high => (next, next.low),
        _ => (item, end),
    };
    let keys = &mut keys[..CHUNK.min(item.high - low)];
    // SAFETY: the positions are the item's.
    unsafe { call.keys(item, low, keys) };
    keys
}

/// Hand over the results of the segment that begins at `segment`, or of all.
///
/// # Safety
/// As `run`; `line` has room for LANES rows of `dim` floats.
#[inline(always)]
unsafe fn give<S: Simd>(
    call: &Call<'_>,
    item: &Item,
    work: &Work,
    segment: Option<usize>,
    line: *mut f32,
) {
    let (dim, pairs) = (work.dim, item.num_pairs());
    let whole = dim - dim % S::LANES;
    let out = if segment.is_some() {
        work.out
    } else {
        work.total
    };
    // SAFETY: i < pairs <= stride, which LANES divides; d < dim.
    unsafe {
        for first in (0..pairs).step_by(S::LANES) {
            for d in (0..whole).step_by(S::LANES) {
                let mut square = [S::splat(0.0); GROUP];
                for i in 0..S::LANES {
                    square[i] = S::load(out.add((d + i) * work.stride + first));
                }
                let square = S::transpose(square);
                for i in 0..S::LANES {
                    S::store(line.add(i * dim + d), square[i]);
                }
            }
            for i in first..pairs.min(first + S::LANES) {
                let row = line.add((i - first) * dim);
                for d in whole..dim {
                    row.add(d).write(*out.add(d * work.stride + i));
                }
                let pair = item.first + i;
                if let Some(position) = segment {
                    let seen = (*work.greatest(i), *work.sum(i));
                    call.keep(item, pair, position, row, seen);
                } else {
                    call.store::<S>(item, pair, row, 1.0 / *work.total_sum(i));
                }
            }
        }
    }
}

/// Transpose and scale the queries, by squares where whole vectors of dimensions are left.
///
/// # Safety
/// As `run`.
#[inline(always)]
unsafe fn load_queries<S: Simd>(call: &Call<'_>, item: &Item, work: &Work) {
    let (pairs, whole) = (item.num_pairs(), work.dim - work.dim % S::LANES);
    let oldest = call.query(item.first).position as i64;
    // SAFETY: i < stride, which LANES divides; d < dim.
    unsafe {
        for first in (0..work.stride).step_by(S::LANES) {
            let target = |d: usize| work.query.add(d * work.stride + first);
            for d in (0..whole).step_by(S::LANES) {
                let mut square = [S::splat(0.0); GROUP];
                for i in first..pairs.min(first + S::LANES) {
                    let q = call.query_vector::<S>(item, item.first + i, d);
                    square[i - first] = S::mul(q, S::splat(call.q_scale));
                }
                let square = S::transpose(square);
                for i in 0..S::LANES {
                    S::store(target(d + i), square[i]);
                }
            }
            for i in first..first + S::LANES {
                let pair = (item.first + i).min(item.last - 1);
                for d in whole..work.dim {
                    let q = if i < pairs {
                        call.query_number(item, pair, d) * call.q_scale
                    } else {
                        0.0
                    };
                    target(d).add(i - first).write(q);
                }
                work.place(i)
                    .write((call.query(pair).position as i64 - oldest) as f32);
            }
        }
    }
}

/// Begin a segment.
///
/// # Safety
/// As `run`.
#[inline(always)]
unsafe fn reset<S: Simd>(work: &Work) {
    // SAFETY: LANES divides stride.
    unsafe {
        for i in (0..work.dim * work.stride).step_by(S::LANES) {
            S::store(work.out.add(i), S::splat(0.0));
        }
        let nothing = Seen::<S>::nothing();
        for i in (0..work.stride).step_by(S::LANES) {
            S::store(work.greatest(i), nothing.greatest);
            S::store(work.sum(i), nothing.sum);
        }
    }
}

/// End a segment: its results become those of all so far, or are added to them.
///
/// # Safety
/// As `run`.
#[inline(always)]
unsafe fn absorb<S: Simd>(work: &Work, is_first: bool) {
    // SAFETY: LANES divides stride.
    unsafe {
        for i in (0..work.stride).step_by(S::LANES) {
            let next = Seen::<S> {
                greatest: S::load(work.greatest(i)),
                sum: S::load(work.sum(i)),
            };
            let mut total = next;
            let at = |d: usize| d * work.stride + i;
            if is_first {
                for d in 0..work.dim {
                    S::store(work.total.add(at(d)), S::load(work.out.add(at(d))));
                }
            } else {
                total.greatest = S::load(work.total_greatest(i));
                total.sum = S::load(work.total_sum(i));
                let factors = total.absorb(next);
                for d in 0..work.dim {
                    let (total, out) = (work.total.add(at(d)), S::load(work.out.add(at(d))));
                    S::store(total, segment::add::<S>(S::load(total), out, factors));
                }
            }
            S::store(work.total_greatest(i), total.greatest);
            S::store(work.total_sum(i), total.sum);
        }
    }
}

/// Addresses of a chunk's keys and values as f32: in place if they are, else widened into `copy`. They begin at the
/// chunk's multiple of `CHUNK`; where the item has no key, its first stands in. Scales of keys are left to `scores`.
///
/// # Safety
/// As `run`; `copy` has room for the chunk.
#[inline(always)]
unsafe fn load_chunk<S: Simd, E: Element>(
    call: &Call<'_>,
    item: &Item,
    chunk: Range<usize>,
    keys: &mut [Key],
    values: &mut [*const f32],
    copy: (*mut f32, *mut f32),
) {
    let (dim, offset) = (call.args.head_dim, call.value_offset::<E>());
    let skipped = keys.len() - chunk.len();
    let mut stored = [std::ptr::null::<E>(); CHUNK];
    // SAFETY: positions are the item's; widened rows are dim apart.
    unsafe {
        call.keys(item, chunk.start, &mut stored[skipped..keys.len()]);
        for j in skipped..keys.len() {
            let (key, value) = (stored[j], stored[j].add(offset));
            keys[j].scale = E::scale(key, dim);
            if E::IS_F32 {
                keys[j].numbers = key.cast();
                values[j] = value.cast();
            } else {
                keys[j].numbers = widen::<S, E>(key, copy.0.add(j * dim), dim, 1.0);
                let scale = E::scale(value, dim);
                values[j] = widen::<S, E>(value, copy.1.add(j * dim), dim, scale);
            }
        }
        for j in 0..skipped {
            (keys[j], values[j]) = (keys[skipped], values[skipped]);
        }
    }
}

/// A row as f32, scaled.
///
/// # Safety
/// `source` is a row of `count` numbers, for which `target` has room.
#[inline(always)]
unsafe fn widen<S: Simd, E: Element>(
    source: *const E,
    target: *mut f32,
    count: usize,
    scale: f32,
) -> *const f32 {
    let mut d = 0;
    // SAFETY: d stays below count.
    unsafe {
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

/// Which scores of a chunk some query may not see.
struct Hidden {
    any: bool,
    /// Position of the chunk's first place, relative to the item's first query.
    first: f32,
    /// `window`, or infinity.
    window: f32,
}

impl Hidden {
    #[inline(always)]
    fn find(call: &Call<'_>, item: &Item, low: usize, count: usize, skipped: usize) -> Hidden {
        // Pairs of several rows see all keys of their item.
        let (oldest, newest) = (
            call.query(item.first).position,
            call.query(item.last - 1).position,
        );
        let window = call.args.window;
        Hidden {
            any: skipped > 0 || low + count - 1 > oldest || (window > 0 && newest >= low + window),
            first: (low as i64 - oldest as i64) as f32,
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
            let total = weights::<S>(work.score.add(i), stride, count, top);
            let rescale = S::exp2(S::sub(old, top));
            S::store(work.greatest(i), top);
            S::store(work.rescale(i), rescale);
            S::store(work.sum(i), S::fma(S::load(work.sum(i)), rescale, total));
        }
    }
}

/// Turn `count` scores, `stride` apart, into weights; their sum, in the order in which narrow.rs has it: as many sums as
/// a vector has lanes, whose halves are added until one is left.
///
/// # Safety
/// As `softmax`.
#[inline(always)]
unsafe fn weights<S: Simd>(score: *mut f32, stride: usize, count: usize, top: S::V) -> S::V {
    // SAFETY: the caller's.
    unsafe {
        let mut sums = [S::splat(0.0); GROUP];
        for j in 0..count {
            let at = score.add(j * stride);
            let p = S::exp2(S::sub(S::load(at), top));
            S::store(at, p);
            sums[j % S::LANES] = S::add(sums[j % S::LANES], p);
        }
        let mut half = S::LANES / 2;
        while half > 0 {
            for i in 0..half {
                sums[i] = S::add(sums[i], sums[i + half]);
            }
            half /= 2;
        }
        sums[0]
    }
}
