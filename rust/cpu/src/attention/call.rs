//! A checked call: where an item's queries, keys and values lie, where results go, and how those of parts are merged.

use std::f32::consts::LOG2_E;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::args::AttentionArgs;
use super::plan::{Item, Parts, Plan, Query, Row, first_visible};
use super::segment::{self, SEGMENT, Seen};
use crate::element::{Bf16, Dtype, Element, F16, Rounded};
use crate::scratch::Floats;
use crate::simd::{GROUP, Simd};

/// A checked call, as all threads see it.
pub struct Call<'a> {
    pub args: AttentionArgs,
    pub plan: &'a Plan,
    pub group: usize,
    /// Folded into q.
    pub q_scale: f32,
    /// Soft cap in units of base-2 scores; 0 = off.
    pub cap: f32,
    partials: *mut f32,
    /// Of each row with parts and KV head, items that are not done.
    remaining: &'a [AtomicUsize],
}

// SAFETY: threads read the arguments' arrays and the plan, write distinct parts of `out` and of `partials` (items are
// disjoint), and read another's partials only after the acquiring countdown of `remaining`.
unsafe impl Sync for Call<'_> {}

impl<'a> Call<'a> {
    pub fn new(
        args: AttentionArgs,
        plan: &'a Plan,
        partials: *mut f32,
        remaining: &'a [AtomicUsize],
    ) -> Self {
        let capped = args.soft_cap > 0.0;
        let divisor = if capped { args.soft_cap } else { 1.0 / LOG2_E };
        Call {
            plan,
            group: args.num_heads / args.num_kv_heads,
            q_scale: args.scale / divisor,
            cap: if capped { args.soft_cap * LOG2_E } else { 0.0 },
            partials,
            remaining,
            args,
        }
    }

    pub fn row(&self, item: &Item) -> &Row {
        &self.plan.rows[item.row]
    }

    pub fn query(&self, pair: usize) -> &Query {
        &self.plan.queries[pair / self.group]
    }

    /// Whether the item's results are of segments alone (`keep`), or of all keys that its pairs see (`finish`).
    pub fn is_part(&self, item: &Item) -> bool {
        self.row(item).parts.is_some()
    }

    /// Elements `d..` of a pair's query.
    ///
    /// # Safety
    /// `pair` is one of the item's, `d + S::LANES <= head_dim`.
    #[inline(always)]
    pub unsafe fn query_vector<S: Simd>(&self, item: &Item, pair: usize, d: usize) -> S::V {
        // SAFETY: the caller's.
        unsafe {
            match self.args.io_dtype {
                Dtype::F32 => f32::load::<S>(self.vector::<f32>(item, pair).add(d)),
                Dtype::Bf16 => Bf16::load::<S>(self.vector::<Bf16>(item, pair).add(d)),
                Dtype::F16 => F16::load::<S>(self.vector::<F16>(item, pair).add(d)),
            }
        }
    }

    /// Element `d` of a pair's query.
    ///
    /// # Safety
    /// `pair` is one of the item's, `d < head_dim`.
    #[inline(always)]
    pub unsafe fn query_number(&self, item: &Item, pair: usize, d: usize) -> f32 {
        // SAFETY: the caller's.
        unsafe {
            match self.args.io_dtype {
                Dtype::F32 => *self.vector::<f32>(item, pair).add(d),
                Dtype::Bf16 => (*self.vector::<Bf16>(item, pair).add(d)).to_f32(),
                Dtype::F16 => (*self.vector::<F16>(item, pair).add(d)).to_f32(),
            }
        }
    }

    /// Query vector of a pair.
    ///
    /// # Safety
    /// `Q` is the dtype of q and `pair` is one of the item's.
    unsafe fn vector<Q: Element>(&self, item: &Item, pair: usize) -> *const Q {
        let args = &self.args;
        let (token, head) = self.place(item, pair);
        // SAFETY: token < num_tokens and head < num_heads, by the plan.
        unsafe {
            args.q
                .cast::<Q>()
                .add(token * args.q_stride + head * args.head_dim)
        }
    }

    /// Tokens of no row get zeros.
    pub fn clear_unused(&self) {
        let args = &self.args;
        let token_bytes = args.num_heads * args.head_dim * args.io_dtype.bytes();
        let unused = args.num_tokens - self.plan.num_used_tokens;
        if unused > 0 {
            // SAFETY: num_used_tokens + unused = num_tokens; all-zero bits are zero in every dtype.
            unsafe {
                let start = args.out.add(self.plan.num_used_tokens * token_bytes);
                start.write_bytes(0, unused * token_bytes);
            }
        }
    }

    fn place(&self, item: &Item, pair: usize) -> (usize, usize) {
        (
            self.query(pair).token,
            item.kv_head * self.group + pair % self.group,
        )
    }

    /// Addresses of the keys at positions low .. low + `keys.len()`; the values lie `value_offset` elements behind.
    ///
    /// # Safety
    /// `E` is the cache's dtype and the positions are within the item's.
    pub unsafe fn keys<E: Element>(&self, item: &Item, low: usize, keys: &mut [*const E]) {
        let (args, row) = (&self.args, self.row(item));
        let (size, length) = (args.block_size, E::row_len(args.head_dim));
        let mut done = 0;
        while done < keys.len() {
            let position = low + done;
            let block = self.plan.blocks[row.block_start + position / size - row.first_block];
            let offset = position % size;
            let count = (size - offset).min(keys.len() - done);
            let start = ((block * 2 * args.num_kv_heads + item.kv_head) * size + offset) * length;
            for (i, key) in keys[done..done + count].iter_mut().enumerate() {
                // SAFETY: block < num_blocks, kv_head < num_kv_heads, offset + i < block_size.
                *key = unsafe { args.kv_cache.cast::<E>().add(start + i * length) };
            }
            done += count;
        }
    }

    /// Elements between a position's key and its value.
    pub fn value_offset<E: Element>(&self) -> usize {
        self.args.num_kv_heads * self.args.block_size * E::row_len(self.args.head_dim)
    }

    /// Keep the result of a pair for the segment of `position`: `out` (`head_dim` numbers) is the sum of values weighted by
    /// 2^(score - greatest), `sum` that of the weights.
    ///
    /// # Safety
    /// The item is a part, `pair` is one of its, and given once for the segment; `out` is readable.
    pub unsafe fn keep(
        &self,
        item: &Item,
        pair: usize,
        position: usize,
        out: *const f32,
        (greatest, sum): (f32, f32),
    ) {
        let dim = self.args.head_dim;
        let row = &self.plan.rows[self.query(pair).row];
        let Some(parts) = &row.parts else { return };
        let pair = pair - row.first_query * self.group;
        let place = parts.place(&self.args, row, (item.kv_head, pair), position / SEGMENT);
        // SAFETY: the place is this pair's and segment's alone, and within the buffer.
        unsafe {
            let partial = self.partials.add(place);
            partial.copy_from_nonoverlapping(out, dim);
            partial.add(Parts::greatest(dim)).write(greatest);
            partial.add(Parts::greatest(dim) + 1).write(sum);
        }
    }

    /// Write the output of a pair: `out` (`head_dim` numbers) * factor.
    ///
    /// # Safety
    /// `pair` is one of the item's and given once, `out` readable; the machine has `S`'s instructions.
    #[inline(always)]
    pub unsafe fn store<S: Simd>(&self, item: &Item, pair: usize, out: *const f32, factor: f32) {
        // SAFETY: the caller's.
        unsafe {
            match self.args.io_dtype {
                Dtype::F32 => self.store_as::<S, f32>(item, pair, out, factor),
                Dtype::Bf16 => self.store_as::<S, Bf16>(item, pair, out, factor),
                Dtype::F16 => self.store_as::<S, F16>(item, pair, out, factor),
            }
        }
    }

    /// # Safety
    /// As `store`; `E` is the dtype of out.
    #[inline(always)]
    unsafe fn store_as<S: Simd, E: Rounded>(
        &self,
        item: &Item,
        pair: usize,
        out: *const f32,
        factor: f32,
    ) {
        let dim = self.args.head_dim;
        let (token, head) = self.place(item, pair);
        let mut d = 0;
        // SAFETY: token < num_tokens and head < num_heads, by the plan; d stays below head_dim.
        unsafe {
            let target = self
                .args
                .out
                .cast::<E>()
                .add((token * self.args.num_heads + head) * dim);
            while d + S::LANES <= dim {
                E::store::<S>(target.add(d), S::mul(S::load(out.add(d)), S::splat(factor)));
                d += S::LANES;
            }
            while d < dim {
                target.add(d).write(E::from_f32(*out.add(d) * factor));
                d += 1;
            }
        }
    }

    /// Combine the parts of the item's rows, in the order of their segments, where this was the last item of them.
    ///
    /// # Safety
    /// The item has called `keep` for all of its pairs and segments, if it is a part; the machine has `S`'s instructions.
    #[inline(always)]
    pub unsafe fn merge<S: Simd>(&self, item: &Item, line: &mut Floats) {
        if !self.is_part(item) {
            return;
        }
        for row in self.plan.rows_of(item, self.group) {
            let row = &self.plan.rows[row];
            let Some(parts) = &row.parts else { continue };
            let remaining = &self.remaining[parts.counter + item.kv_head];
            if remaining.fetch_sub(1, Ordering::AcqRel) == 1 {
                // SAFETY: the countdown reached zero: all parts are written.
                unsafe { self.merge_row::<S>(item, row, parts, line) };
            }
        }
    }

    /// The parts of one row and the item's KV head.
    ///
    /// # Safety
    /// They are written; the machine has `S`'s instructions.
    #[inline(always)]
    unsafe fn merge_row<S: Simd>(&self, item: &Item, row: &Row, parts: &Parts, line: &mut Floats) {
        let (args, dim) = (&self.args, self.args.head_dim);
        // Whole vectors: what lies behind a pair's output is not used.
        let line = line.take(dim + S::LANES);
        for pair in 0..row.num_queries * self.group {
            let position = row.position + pair / self.group;
            let first = first_visible(position, args.window) / SEGMENT;
            // SAFETY: the pair has a part of each of its segments, whose output is whole vectors.
            unsafe {
                let mut total = Seen::<S>::nothing();
                for d in (0..dim).step_by(S::LANES) {
                    S::store(line.add(d), S::splat(0.0));
                }
                for segment in first..=position / SEGMENT {
                    let place = parts.place(args, row, (item.kv_head, pair), segment);
                    let part = self.partials.add(place).cast_const();
                    let factors = total.absorb(Seen {
                        greatest: S::splat(*part.add(Parts::greatest(dim))),
                        sum: S::splat(*part.add(Parts::greatest(dim) + 1)),
                    });
                    for d in (0..dim).step_by(S::LANES) {
                        let next = S::load(part.add(d));
                        let sum = segment::add::<S>(S::load(line.add(d)), next, factors);
                        S::store(line.add(d), sum);
                    }
                }
                let pair = row.first_query * self.group + pair;
                self.store::<S>(item, pair, line, 1.0 / first_lane::<S>(total.sum));
            }
        }
    }
}

/// # Safety
/// The machine has `S`'s instructions.
#[inline(always)]
pub unsafe fn first_lane<S: Simd>(a: S::V) -> f32 {
    let mut lanes = [0.0; GROUP];
    // SAFETY: the caller's; a vector has at most `GROUP` lanes.
    unsafe { S::store(lanes.as_mut_ptr(), a) };
    lanes[0]
}
