//! Paged attention of packed rows: checks, shares the work among threads, merges split rows.
//!
//! The function is that of `octavo.kernels.reference.paged_attention`: softmax(scale * q k^T) v with an optional soft
//! cap and sliding window, causal within the row. Softmax runs online over chunks of keys (Milakov & Gimelshein 2018;
//! split rows as in Flash-Decoding, Dao et al. 2023), in base 2: scale * log2(e) is folded into q.

use std::f32::consts::LOG2_E;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::element::{Bf16, CacheDtype, Dtype, Element, F16, I8, Rounded};
use crate::error::KernelError;
use crate::isa::Isa;
use crate::plan::{Item, Plan, Row};
use crate::pool::ThreadPool;
use crate::scratch::{Floats, MAX_ROWS, Scratch, with_scratch};
use crate::segment::{self, Seen};
use crate::simd::{GROUP, Simd, by_isa};
use crate::{narrow, wide};

/// Floats behind the partial results, so that whole vectors may be read of them.
const PADDING: usize = GROUP;

/// One call. Lengths in elements; arrays are dense and row-major unless said otherwise.
#[derive(Clone, Copy, Debug)]
pub struct AttentionArgs {
    /// `[num_tokens, num_heads, head_dim]`, tokens `q_stride` elements apart.
    pub q: *const u8,
    pub q_stride: usize,
    /// `[num_blocks, 2 (K, V), num_kv_heads, block_size]` rows.
    pub kv_cache: *const u8,
    /// `[num_tokens, num_heads, head_dim]`, written in full; tokens of no row get zeros.
    pub out: *mut u8,
    /// Of the cache.
    pub dtype: CacheDtype,
    /// Of q and out.
    pub io_dtype: Dtype,
    /// `[num_rows]` slot of each row.
    pub row_slot: *const i32,
    /// `[num_rows + 1]` first token of each row.
    pub query_start: *const i32,
    /// `[num_rows]` tokens of each row, this step's included.
    pub kv_len: *const i32,
    /// `[num_slots, max_blocks_per_slot]` block ids.
    pub block_table: *const i32,
    pub num_rows: usize,
    pub num_tokens: usize,
    pub num_slots: usize,
    pub max_blocks_per_slot: usize,
    pub num_blocks: usize,
    pub block_size: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub scale: f32,
    /// A query sees itself and the `window - 1` tokens before; 0 = all.
    pub window: usize,
    /// Scores become cap * tanh(score / cap); 0 = off.
    pub soft_cap: f32,
    /// The caller's thread is one of them.
    pub num_threads: usize,
}

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
    /// Per split, parts that are not done.
    remaining: &'a [AtomicUsize],
}

// SAFETY: threads read the arguments' arrays and the plan, write distinct parts of `out` and of `partials` (items are
// disjoint), and read another's partials only after the acquiring countdown of `remaining`.
unsafe impl Sync for Call<'_> {}

impl<'a> Call<'a> {
    fn new(
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

    /// Take items until there are none; `next` counts those that all threads took.
    ///
    /// # Safety
    /// The plan was filled for the call's arguments, whose pointers are valid; `run` fits the cache's dtype and the
    /// machine; all threads of the call have the same `next`, 0 at first.
    unsafe fn run_items(&self, run: Run, next: &AtomicUsize) {
        with_scratch(|scratch| {
            while let Some(item) = self.plan.items.get(next.fetch_add(1, Ordering::Relaxed)) {
                debug_assert!(item.num_pairs() <= MAX_ROWS);
                // SAFETY: the caller's.
                unsafe { run(self, item, scratch) };
            }
        });
    }

    pub fn row(&self, item: &Item) -> &Row {
        &self.plan.rows[item.row]
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
                Dtype::F32 => f32::load::<S>(self.query::<f32>(item, pair).add(d)),
                Dtype::Bf16 => Bf16::load::<S>(self.query::<Bf16>(item, pair).add(d)),
                Dtype::F16 => F16::load::<S>(self.query::<F16>(item, pair).add(d)),
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
                Dtype::F32 => *self.query::<f32>(item, pair).add(d),
                Dtype::Bf16 => (*self.query::<Bf16>(item, pair).add(d)).to_f32(),
                Dtype::F16 => (*self.query::<F16>(item, pair).add(d)).to_f32(),
            }
        }
    }

    /// Query vector of a pair.
    ///
    /// # Safety
    /// `Q` is the dtype of q and `pair` is one of the item's.
    unsafe fn query<Q: Element>(&self, item: &Item, pair: usize) -> *const Q {
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
    fn clear_unused(&self) {
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
            self.row(item).token + pair / self.group,
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

    /// Take the result of a pair: `out` (`head_dim` numbers) is the sum of values weighted by 2^(score - greatest),
    /// `sum` that of the weights.
    ///
    /// # Safety
    /// `pair` is one of the item's and given once, `out` readable; the machine has `S`'s instructions.
    #[inline(always)]
    pub unsafe fn finish<S: Simd>(
        &self,
        item: &Item,
        pair: usize,
        out: *const f32,
        greatest: f32,
        sum: f32,
    ) {
        let (dim, count) = (self.args.head_dim, item.num_pairs());
        let index = pair - item.first;
        // SAFETY: the partial's place and the output's place are this item's alone, and within their buffers.
        unsafe {
            if item.split.is_some() {
                let partial = self.partials.add(item.partial);
                partial.add(index * dim).copy_from_nonoverlapping(out, dim);
                partial.add(count * dim + index).write(greatest);
                partial.add(count * (dim + 1) + index).write(sum);
            } else {
                self.store::<S>(item, pair, out, 1.0 / sum);
            }
        }
    }

    /// # Safety
    /// As `finish`.
    #[inline(always)]
    unsafe fn store<S: Simd>(&self, item: &Item, pair: usize, out: *const f32, factor: f32) {
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
    /// As `finish`; `E` is the dtype of out.
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

    /// Combine the parts of the item's split, in the order of their segments, once the last of them is done.
    ///
    /// # Safety
    /// The item has called `finish` for all of its pairs; the machine has `S`'s instructions.
    #[inline(always)]
    unsafe fn merge<S: Simd>(&self, item: &Item, line: &mut Floats) {
        let Some(index) = item.split else { return };
        if self.remaining[index].fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        let split = self.plan.splits[index];
        let (dim, count, len) = (
            self.args.head_dim,
            item.num_pairs(),
            item.partial_len(self.args.head_dim),
        );
        // Whole vectors: what lies behind a pair's output is not used.
        let line = line.take(dim + S::LANES);
        for i in 0..count {
            // SAFETY: part < num_parts, and all parts are written (the countdown reached zero); a vector more is readable
            // behind the last (`PADDING`).
            unsafe {
                let mut total = Seen::<S>::nothing();
                for d in (0..dim).step_by(S::LANES) {
                    S::store(line.add(d), S::splat(0.0));
                }
                for p in 0..split.num_parts {
                    let part = self.partials.add(split.partial + p * len).cast_const();
                    let factors = total.absorb(Seen {
                        greatest: S::splat(*part.add(count * dim + i)),
                        sum: S::splat(*part.add(count * (dim + 1) + i)),
                    });
                    for d in (0..dim).step_by(S::LANES) {
                        let next = S::load(part.add(i * dim + d));
                        S::store(
                            line.add(d),
                            segment::add::<S>(S::load(line.add(d)), next, factors),
                        );
                    }
                }
                self.store::<S>(item, item.first + i, line, 1.0 / first_lane::<S>(total.sum));
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

/// Compute one item on this thread.
type Run = unsafe fn(&Call<'_>, &Item, &mut Scratch);

/// # Safety
/// `E` is the cache's dtype and the machine has `S`'s instructions.
#[inline(always)]
unsafe fn run<S: Simd, E: Element>(call: &Call<'_>, item: &Item, scratch: &mut Scratch) {
    // SAFETY: the caller's.
    unsafe {
        if item.num_pairs() <= narrow::MAX_PAIRS && call.args.head_dim.is_multiple_of(S::LANES) {
            narrow::run::<S, E>(call, item, scratch);
        } else {
            wide::run::<S, E>(call, item, scratch);
        }
        call.merge::<S>(item, &mut scratch.line);
    }
}

by_isa! {
    fn select[E: Element](call: &Call<'_>, item: &Item, scratch: &mut Scratch) -> () = floats (run)
}

/// Of a cache's dtype.
fn kernel(dtype: CacheDtype, isa: Isa) -> Run {
    match dtype {
        CacheDtype::Plain(Dtype::F32) => select::<f32>(isa),
        CacheDtype::Plain(Dtype::Bf16) => select::<Bf16>(isa),
        CacheDtype::Plain(Dtype::F16) => select::<F16>(isa),
        CacheDtype::Int8 => select::<I8>(isa),
    }
}

/// Threads and buffers of the process; calls take turns.
#[derive(Default)]
struct Engine {
    /// Made when a call first asks for as many threads.
    pool: Option<ThreadPool>,
    plan: Plan,
    partials: Floats,
    remaining: Vec<AtomicUsize>,
}

static ENGINE: Mutex<Option<Engine>> = Mutex::new(None);

/// Attention of every row over its paged keys and values, with the best instructions of this machine.
///
/// # Errors
/// A size is impossible, or an index read from the arrays is out of range. `out` is then unchanged.
///
/// # Safety
/// Pointers are valid for the sizes given (reads; writes for `out`), nothing else writes to them during the call, and
/// `out` overlaps nothing.
pub unsafe fn paged_attention(args: &AttentionArgs) -> Result<(), KernelError> {
    // SAFETY: the caller's.
    unsafe { paged_attention_with(args, Isa::best()) }
}

/// The same with chosen instructions, which the machine must have (`Isa::available`; others fall back to the best).
///
/// # Errors
/// As `paged_attention`.
///
/// # Safety
/// As `paged_attention`.
pub unsafe fn paged_attention_with(args: &AttentionArgs, isa: Isa) -> Result<(), KernelError> {
    let isa = isa.or_best();
    let run = kernel(args.dtype, isa);
    // A panic under the lock leaves buffers that the next call fills anew.
    let mut guard = ENGINE.lock().unwrap_or_else(PoisonError::into_inner);
    let engine = guard.get_or_insert_default();
    // SAFETY: the caller's.
    unsafe { engine.plan.fill(args)? };
    engine.execute(args, run);
    Ok(())
}

impl Engine {
    /// Run the items of the plan, which has been filled for `args`.
    fn execute(&mut self, args: &AttentionArgs, run: Run) {
        let plan = &self.plan;
        let parts = plan.splits.iter().map(|s| AtomicUsize::new(s.num_parts));
        self.remaining.clear();
        self.remaining.extend(parts);
        let partials = self.partials.take(plan.partials + PADDING);
        let call = Call::new(*args, plan, partials, &self.remaining);
        call.clear_unused();
        let next = AtomicUsize::new(0);
        let num_threads = args.num_threads.min(plan.items.len());
        let pool = match self.pool.take() {
            Some(pool) if pool.num_threads() >= num_threads => pool,
            _ => ThreadPool::new(num_threads),
        };
        self.pool.insert(pool).run_on(num_threads, &|_| {
            // SAFETY: the plan is checked, `run` fits the dtype and the machine, and each item is run once.
            unsafe { call.run_items(run, &next) };
        });
    }
}

/// Attention of all layers of a step, for threads of a region: layers of one kind (window) share a checked plan.
#[derive(Default)]
pub struct StepAttention {
    plans: Vec<Plan>,
    partials: Floats,
    /// Per layer, its items that have been taken, and the parts of its splits that are not done.
    counters: Vec<(AtomicUsize, Vec<AtomicUsize>)>,
}

impl StepAttention {
    /// Check a step once for each kind of layer, and reset the counters. `kinds[layer]` is one of `kind_args`, whose
    /// pointers to q, cache and out may be any layer's.
    ///
    /// # Errors
    /// As `paged_attention`.
    ///
    /// # Safety
    /// The index arrays hold as many numbers as the sizes say.
    pub unsafe fn prepare(
        &mut self,
        kind_args: &[AttentionArgs],
        kinds: &[usize],
    ) -> Result<(), KernelError> {
        self.plans.resize_with(kind_args.len(), Plan::default);
        for (plan, args) in self.plans.iter_mut().zip(kind_args) {
            // SAFETY: the caller's.
            unsafe { plan.fill(args)? };
        }
        let partials = self.plans.iter().map(|plan| plan.partials).max();
        self.partials.take(partials.unwrap_or(0) + PADDING);
        self.counters.resize_with(kinds.len(), Default::default);
        for ((next, remaining), &kind) in self.counters.iter_mut().zip(kinds) {
            *next.get_mut() = 0;
            remaining.clear();
            let splits = self.plans[kind].splits.iter();
            remaining.extend(splits.map(|split| AtomicUsize::new(split.num_parts)));
        }
        Ok(())
    }

    /// This thread's part of layer `layer`, of kind `kind`. No barrier: the caller places them.
    ///
    /// # Safety
    /// `prepare` has seen the same arguments (but for q, cache and out) for this kind; pointers are valid for the sizes;
    /// all threads of the region call it, and nobody writes q or the cache, or touches `out`, meanwhile.
    pub unsafe fn run(&self, layer: usize, kind: usize, args: AttentionArgs) {
        let (next, remaining) = &self.counters[layer];
        let run = kernel(args.dtype, Isa::best());
        let call = Call::new(args, &self.plans[kind], self.partials.start(), remaining);
        // SAFETY: the caller's; barriers between layers let one buffer of partial results serve them all.
        unsafe { call.run_items(run, next) };
    }
}
