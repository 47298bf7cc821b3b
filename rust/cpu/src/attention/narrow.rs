//! Few (query, head) pairs against many keys: decoding. Each key is read once for all pairs. Scores have keys in their
//! lanes (squares of keys are transposed in registers), so that dimensions are added up one after the other, as in wide.rs;
//! outputs have dimensions.

use std::ops::Range;

use super::call::{Call, first_lane};
use super::plan::Item;
use super::segment::{self, Seen, chunks, segments};
use crate::element::Element;
use crate::scratch::{CHUNK, Scratch};
use crate::simd::{GROUP, Simd, prefetch};

/// Pairs that fit in registers; with more, lanes of queries (wide.rs) do better.
pub const MAX_PAIRS: usize = 8;
/// Keys (or values) that are asked for ahead: what memory gives meanwhile, and little enough to stay in the first-level cache.
const AHEAD: usize = 32;
/// Bytes of a cache line.
const LINE: usize = 64;

/// One item's working set. Pairs are counted from the item's first.
struct Work<'a, E> {
    /// `[pairs, dim]`, scaled.
    query: *mut f32,
    /// `[pairs, dim]`, weighted sums of values.
    out: *mut f32,
    /// `[pairs, CHUNK]`, scores and then weights.
    score: *mut f32,
    /// Keys of the chunk's positions from its multiple of `CHUNK` on; the first `skipped` are not the item's.
    keys: &'a [*const E],
    skipped: usize,
    /// Those of the next chunk, or of the next item's first: pages lie anywhere in memory, where no hardware prefetcher finds them.
    next: &'a [*const E],
    value_offset: usize,
    dim: usize,
}

impl<E> Work<'_, E> {
    /// The key that is read `AHEAD` behind place `j`.
    #[inline(always)]
    fn ahead(&self, j: usize) -> Option<*const E> {
        let (place, count) = (j + AHEAD, self.keys.len());
        let key = if place < count {
            self.keys.get(place)
        } else {
            self.next.get(place - count)
        };
        key.copied()
    }
}

/// Attention of one item of at most `MAX_PAIRS` pairs.
///
/// # Safety
/// `E` is the call's dtype, the machine has `S`'s instructions, `S::LANES` divides `head_dim`, the item is of the plan.
#[inline(always)]
pub unsafe fn run<S: Simd, E: Element>(
    call: &Call<'_>,
    item: &Item,
    next: Option<&Item>,
    scratch: &mut Scratch,
) {
    // SAFETY: the caller's.
    unsafe {
        match item.num_pairs() {
            1 => run_pairs::<S, E, 1>(call, item, next, scratch),
            2 => run_pairs::<S, E, 2>(call, item, next, scratch),
            3 => run_pairs::<S, E, 3>(call, item, next, scratch),
            4 => run_pairs::<S, E, 4>(call, item, next, scratch),
            5 => run_pairs::<S, E, 5>(call, item, next, scratch),
            6 => run_pairs::<S, E, 6>(call, item, next, scratch),
            7 => run_pairs::<S, E, 7>(call, item, next, scratch),
            _ => run_pairs::<S, E, 8>(call, item, next, scratch),
        }
    }
}

/// # Safety
/// As `run`, with exactly M pairs.
#[inline(always)]
unsafe fn run_pairs<S: Simd, E: Element, const M: usize>(
    call: &Call<'_>,
    item: &Item,
    next: Option<&Item>,
    scratch: &mut Scratch,
) {
    let dim = call.args.head_dim;
    let (query, out) = (scratch.query.take(M * dim), scratch.out.take(M * dim));
    let total = scratch.total.take(M * dim);
    let score = scratch.score.take(M * CHUNK);
    let mut totals = [const { None::<Seen<S>> }; M];
    let is_part = call.is_part(item);
    // SAFETY: buffers are as large as their indices; the call's addresses are checked by the plan.
    unsafe {
        load_queries::<S, M>(call, item, query);
        for positions in segments(item.low, item.high) {
            let is_last = positions.end == item.high;
            let start = positions.start;
            let seen = segment::<S, E, M>(call, item, next, positions, (query, out, score));
            for m in 0..M {
                let (out, total) = (out.add(m * dim), total.add(m * dim));
                if is_part {
                    call.keep(item, item.first + m, start, out, numbers(seen[m]));
                    continue;
                }
                let Some(before) = &mut totals[m] else {
                    totals[m] = Some(seen[m]);
                    if is_last {
                        call.store::<S>(item, item.first + m, out, 1.0 / numbers(seen[m]).1);
                    } else {
                        total.copy_from_nonoverlapping(out, dim);
                    }
                    continue;
                };
                let factors = before.absorb(seen[m]);
                for d in (0..dim).step_by(S::LANES) {
                    let sum =
                        segment::add::<S>(S::load(total.add(d)), S::load(out.add(d)), factors);
                    S::store(total.add(d), sum);
                }
                if is_last {
                    call.store::<S>(item, item.first + m, total, 1.0 / numbers(*before).1);
                }
            }
        }
    }
}

/// # Safety
/// The machine has `S`'s instructions.
#[inline(always)]
unsafe fn numbers<S: Simd>(seen: Seen<S>) -> (f32, f32) {
    // SAFETY: the caller's.
    unsafe { (first_lane::<S>(seen.greatest), first_lane::<S>(seen.sum)) }
}

/// # Safety
/// As `run_pairs`; `query` has M * `head_dim` floats.
#[inline(always)]
unsafe fn load_queries<S: Simd, const M: usize>(call: &Call<'_>, item: &Item, query: *mut f32) {
    let dim = call.args.head_dim;
    // SAFETY: LANES divides dim.
    unsafe {
        for m in 0..M {
            for d in (0..dim).step_by(S::LANES) {
                let q = call.query_vector::<S>(item, item.first + m, d);
                S::store(query.add(m * dim + d), S::mul(q, S::splat(call.q_scale)));
            }
        }
    }
}

/// Softmax and outputs of a segment's keys; all lanes of what is seen are equal.
///
/// # Safety
/// As `run_pairs`; positions are the item's, buffers those of `Work`.
#[inline(always)]
unsafe fn segment<S: Simd, E: Element, const M: usize>(
    call: &Call<'_>,
    item: &Item,
    next_item: Option<&Item>,
    positions: Range<usize>,
    (query, out, score): (*mut f32, *mut f32, *mut f32),
) -> [Seen<S>; M] {
    let dim = call.args.head_dim;
    let mut next = [std::ptr::null::<E>(); CHUNK];
    // SAFETY: the caller's; a chunk has at most CHUNK keys.
    unsafe {
        let mut seen = [Seen::<S>::nothing(); M];
        for d in (0..M * dim).step_by(S::LANES) {
            S::store(out.add(d), S::splat(0.0));
        }
        let mut next_skipped = positions.start % CHUNK;
        let mut next_end = positions.end.min(positions.start - next_skipped + CHUNK);
        let mut next_count = next_end - positions.start + next_skipped;
        call.keys(item, positions.start, &mut next[next_skipped..next_count]);
        for chunk in chunks(positions.clone()) {
            let (keys, skipped, count) = (next, next_skipped, next_count);
            next_end = item.high.min(chunk.end + CHUNK); // past the segment only asked for
            (next_skipped, next_count) = (0, next_end - chunk.end);
            call.keys(item, chunk.end, &mut next[..next_count]);
            if let Some(other) = next_item.filter(|_| chunk.end == item.high) {
                next_count = CHUNK.min(other.high - other.low);
                call.keys(other, other.low, &mut next[..next_count]);
            }
            let work = Work {
                query,
                out,
                score,
                keys: &keys[..count],
                skipped,
                next: &next[..next_count],
                value_offset: call.value_offset::<E>(),
                dim,
            };
            scores::<S, E, M>(&work);
            mask::<M>(call, item, chunk.start - skipped, count, score);
            let rescale = softmax::<S, M>(score, call.cap, &mut seen);
            values::<S, E, M>(&work, rescale);
        }
        seen
    }
}

/// Fill `score` with q . k, of whole vectors of keys.
///
/// # Safety
/// As `run_pairs`.
#[inline(always)]
unsafe fn scores<S: Simd, E: Element, const M: usize>(work: &Work<'_, E>) {
    let (first, last) = (work.skipped, work.keys.len() - 1);
    // SAFETY: keys are valid for dim elements, LANES divides dim and CHUNK.
    unsafe {
        for j in (0..=last).step_by(S::LANES) {
            let mut keys = [std::ptr::null::<E>(); GROUP];
            let mut next = keys;
            for lane in 0..S::LANES {
                keys[lane] = work.keys[(j + lane).clamp(first, last)];
                next[lane] = work.ahead(j + lane).unwrap_or(keys[lane]);
            }
            let mut acc = [S::splat(0.0); M];
            for d in (0..work.dim).step_by(S::LANES) {
                let mut square = [S::splat(0.0); GROUP];
                // A few at a time, so that memory is busy all the while.
                let is_line = (d * size_of::<E>()).is_multiple_of(LINE);
                for lane in 0..S::LANES {
                    square[lane] = E::load::<S>(keys[lane].add(d));
                    if is_line {
                        prefetch(next[lane].wrapping_add(d), 1);
                    }
                }
                let square = S::transpose(square);
                for i in 0..S::LANES {
                    for (m, acc) in acc.iter_mut().enumerate() {
                        let q = S::splat(*work.query.add(m * work.dim + d + i));
                        *acc = S::fma(q, square[i], *acc);
                    }
                }
            }
            let mut scales = [1.0; GROUP];
            if E::IS_SCALED {
                for lane in 0..S::LANES {
                    scales[lane] = E::scale(keys[lane], work.dim);
                }
            }
            for (m, mut acc) in acc.into_iter().enumerate() {
                if E::IS_SCALED {
                    acc = S::mul(acc, S::load(scales.as_ptr()));
                }
                S::store(work.score.add(m * CHUNK + j), acc);
            }
        }
    }
}

/// Set scores that a query may not see, and those past the chunk's keys, to -inf. `low` is the position of the first.
///
/// # Safety
/// `score` has M * CHUNK floats.
#[inline(always)]
unsafe fn mask<const M: usize>(
    call: &Call<'_>,
    item: &Item,
    low: usize,
    count: usize,
    score: *mut f32,
) {
    for m in 0..M {
        let position = call.query(item.first + m).position;
        let begin = match call.args.window {
            0 => 0,
            window => (position + 1)
                .saturating_sub(window)
                .saturating_sub(low)
                .min(CHUNK),
        };
        let end = (position + 1).saturating_sub(low).min(count);
        // SAFETY: begin and end are at most CHUNK.
        unsafe {
            for j in (0..begin).chain(end..CHUNK) {
                score.add(m * CHUNK + j).write(f32::NEG_INFINITY);
            }
        }
    }
}

/// Turn scores into weights 2^(score - greatest); what earlier outputs must be multiplied by.
///
/// # Safety
/// `score` has M * CHUNK floats, all written.
#[inline(always)]
unsafe fn softmax<S: Simd, const M: usize>(
    score: *mut f32,
    cap: f32,
    seen: &mut [Seen<S>; M],
) -> [S::V; M] {
    // SAFETY: LANES divides CHUNK.
    unsafe {
        let mut rescale = [S::splat(1.0); M];
        for m in 0..M {
            let line = score.add(m * CHUNK);
            let mut top = seen[m].greatest;
            for j in (0..CHUNK).step_by(S::LANES) {
                let mut x = S::load(line.add(j));
                if cap > 0.0 {
                    // Hidden scores stay hidden: the cap would lift them to -cap.
                    let hidden = S::splat(f32::MIN);
                    x = S::select_le(x, hidden, x, S::soft_cap(x, cap));
                    S::store(line.add(j), x);
                }
                top = S::max(top, x);
            }
            let top = S::splat(S::greatest(top));
            rescale[m] = S::exp2(S::sub(seen[m].greatest, top));
            seen[m].greatest = top;
            let mut total = S::splat(0.0);
            for j in (0..CHUNK).step_by(S::LANES) {
                let p = S::exp2(S::sub(S::load(line.add(j)), top));
                S::store(line.add(j), p);
                total = S::add(total, p);
            }
            let total = S::splat(S::sum(total));
            seen[m].sum = S::fma(seen[m].sum, rescale[m], total);
        }
        rescale
    }
}

/// out = out * rescale + weights . values.
///
/// # Safety
/// As `run_pairs`.
#[inline(always)]
unsafe fn values<S: Simd, E: Element, const M: usize>(work: &Work<'_, E>, rescale: [S::V; M]) {
    // SAFETY: as in `scores`; values lie value_offset behind their keys.
    unsafe {
        let mut d = 0;
        while const { M <= S::TILE } && d + 4 * S::LANES <= work.dim {
            values_at::<S, E, M, 4>(work, d, &rescale);
            d += 4 * S::LANES;
        }
        while d + 2 * S::LANES <= work.dim {
            values_at::<S, E, M, 2>(work, d, &rescale);
            d += 2 * S::LANES;
        }
        if d < work.dim {
            values_at::<S, E, M, 1>(work, d, &rescale);
        }
    }
}

/// `values` for N vectors of dimensions at `d`.
///
/// # Safety
/// As `run_pairs`; d + N * LANES <= dim.
#[inline(always)]
unsafe fn values_at<S: Simd, E: Element, const M: usize, const N: usize>(
    work: &Work<'_, E>,
    d: usize,
    rescale: &[S::V; M],
) {
    // SAFETY: the caller's.
    unsafe {
        let mut acc = [[S::splat(0.0); N]; M];
        for m in 0..M {
            for n in 0..N {
                let old = S::load(work.out.add(m * work.dim + d + n * S::LANES));
                acc[m][n] = S::mul(old, rescale[m]);
            }
        }
        for (j, &key) in work.keys.iter().enumerate().skip(work.skipped) {
            let value = key.add(work.value_offset);
            let next = work.ahead(j).unwrap_or(key);
            prefetch(next.wrapping_add(work.value_offset + d), N * S::LANES);
            let mut v = [S::splat(0.0); N];
            for n in 0..N {
                v[n] = E::load::<S>(value.add(d + n * S::LANES));
                if E::IS_SCALED {
                    v[n] = S::mul(v[n], S::splat(E::scale(value, work.dim)));
                }
            }
            for m in 0..M {
                let p = S::splat(*work.score.add(m * CHUNK + j));
                for n in 0..N {
                    acc[m][n] = S::fma(p, v[n], acc[m][n]);
                }
            }
        }
        for m in 0..M {
            for n in 0..N {
                S::store(work.out.add(m * work.dim + d + n * S::LANES), acc[m][n]);
            }
        }
    }
}
