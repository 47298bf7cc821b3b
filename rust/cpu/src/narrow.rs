//! Few (query, head) pairs against many keys: decoding. Lanes are head dimensions; each key is read once for all pairs.

use crate::attention::Call;
use crate::element::Element;
use crate::plan::Item;
use crate::scratch::{CHUNK, Scratch};
use crate::simd::{Simd, prefetch};

/// Pairs that fit in registers; with more, lanes of queries (wide.rs) do better.
pub const MAX_PAIRS: usize = 8;

/// One item's working set. Pairs are counted from the item's first.
struct Work<'a, E> {
    /// `[pairs, dim]`, scaled.
    query: *mut f32,
    /// `[pairs, dim]`, weighted sums of values.
    out: *mut f32,
    /// `[pairs, CHUNK]`, scores and then weights.
    score: *mut f32,
    keys: &'a [*const E],
    /// Those of the next chunk: pages lie anywhere in memory, where no hardware prefetcher finds them.
    next: &'a [*const E],
    value_offset: usize,
    dim: usize,
}

/// Attention of one item of at most `MAX_PAIRS` pairs.
///
/// # Safety
/// `E` is the call's dtype, the machine has `S`'s instructions, `S::LANES` divides `head_dim`, the item is of the plan.
#[inline(always)]
pub unsafe fn run<S: Simd, E: Element>(call: &Call<'_>, item: &Item, scratch: &mut Scratch) {
    // SAFETY: the caller's.
    unsafe {
        match item.num_pairs() {
            1 => run_pairs::<S, E, 1>(call, item, scratch),
            2 => run_pairs::<S, E, 2>(call, item, scratch),
            3 => run_pairs::<S, E, 3>(call, item, scratch),
            4 => run_pairs::<S, E, 4>(call, item, scratch),
            5 => run_pairs::<S, E, 5>(call, item, scratch),
            6 => run_pairs::<S, E, 6>(call, item, scratch),
            7 => run_pairs::<S, E, 7>(call, item, scratch),
            _ => run_pairs::<S, E, 8>(call, item, scratch),
        }
    }
}

/// # Safety
/// As `run`, with exactly M pairs.
#[inline(always)]
unsafe fn run_pairs<S: Simd, E: Element, const M: usize>(
    call: &Call<'_>,
    item: &Item,
    scratch: &mut Scratch,
) {
    let dim = call.args.head_dim;
    let mut next = [std::ptr::null::<E>(); CHUNK];
    let (mut greatest, mut sum) = ([f32::MIN; M], [0.0; M]);
    let (query, out) = (scratch.query.take(M * dim), scratch.out.take(M * dim));
    let score = scratch.score.take(M * CHUNK);
    // SAFETY: buffers are as large as their indices; the call's addresses are checked by the plan.
    unsafe {
        for m in 0..M {
            for d in (0..dim).step_by(S::LANES) {
                let q = call.query_vector::<S>(item, item.first + m, d);
                let q = S::mul(q, S::splat(call.q_scale));
                S::store(query.add(m * dim + d), q);
                S::store(out.add(m * dim + d), S::splat(0.0));
            }
        }
        call.keys(item, item.low, &mut next[..CHUNK.min(item.high - item.low)]);
        for low in (item.low..item.high).step_by(CHUNK) {
            let count = CHUNK.min(item.high - low);
            let next_count = CHUNK.min(item.high - low - count);
            let keys = next;
            call.keys(item, low + count, &mut next[..next_count]);
            let work = Work {
                query,
                out,
                score,
                keys: &keys[..count],
                next: &next[..next_count],
                value_offset: call.value_offset::<E>(),
                dim,
            };
            scores::<S, E, M>(&work);
            mask::<M>(call, item, low, count, score);
            let rescale = softmax::<S, M>(score, call.cap, &mut greatest, &mut sum);
            values::<S, E, M>(&work, rescale);
        }
        for m in 0..M {
            call.finish::<S>(item, item.first + m, out.add(m * dim), greatest[m], sum[m]);
        }
    }
}

/// Fill `score` with q . k.
///
/// # Safety
/// As `run_pairs`.
#[inline(always)]
unsafe fn scores<S: Simd, E: Element, const M: usize>(work: &Work<'_, E>) {
    // SAFETY: keys are valid for dim elements, LANES divides dim.
    unsafe {
        for (j, &key) in work.keys.iter().enumerate() {
            if let Some(&next) = work.next.get(j) {
                prefetch(next, E::row_len(work.dim));
                prefetch(next.wrapping_add(work.value_offset), E::row_len(work.dim));
            }
            let mut acc = [S::splat(0.0); M];
            let mut d = 0;
            while d < work.dim {
                let k = E::load::<S>(key.add(d));
                for (m, acc) in acc.iter_mut().enumerate() {
                    *acc = S::fma(S::load(work.query.add(m * work.dim + d)), k, *acc);
                }
                d += S::LANES;
            }
            let scale = E::scale(key, work.dim);
            for (m, acc) in acc.into_iter().enumerate() {
                work.score.add(m * CHUNK + j).write(S::sum(acc) * scale);
            }
        }
    }
}

/// Set scores that a query may not see, and those past the chunk's keys, to -inf.
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
        let position = call.row(item).position + (item.first + m) / call.group;
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
    greatest: &mut [f32; M],
    sum: &mut [f32; M],
) -> [f32; M] {
    let mut rescale = [1.0; M];
    // SAFETY: LANES divides CHUNK.
    unsafe {
        for m in 0..M {
            let line = score.add(m * CHUNK);
            let mut top = S::splat(greatest[m]);
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
            let new = S::greatest(top);
            rescale[m] = (greatest[m] - new).exp2();
            greatest[m] = new;
            let mut total = S::splat(0.0);
            for j in (0..CHUNK).step_by(S::LANES) {
                let p = S::exp2(S::sub(S::load(line.add(j)), S::splat(new)));
                S::store(line.add(j), p);
                total = S::add(total, p);
            }
            sum[m] = sum[m] * rescale[m] + S::sum(total);
        }
    }
    rescale
}

/// out = out * rescale + weights . values.
///
/// # Safety
/// As `run_pairs`.
#[inline(always)]
unsafe fn values<S: Simd, E: Element, const M: usize>(work: &Work<'_, E>, rescale: [f32; M]) {
    // SAFETY: as in `scores`; values lie value_offset behind their keys.
    unsafe {
        let mut d = 0;
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
    rescale: &[f32; M],
) {
    // SAFETY: the caller's.
    unsafe {
        let mut acc = [[S::splat(0.0); N]; M];
        for m in 0..M {
            for n in 0..N {
                let old = S::load(work.out.add(m * work.dim + d + n * S::LANES));
                acc[m][n] = S::mul(old, S::splat(rescale[m]));
            }
        }
        for (j, &key) in work.keys.iter().enumerate() {
            let value = key.add(work.value_offset);
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
