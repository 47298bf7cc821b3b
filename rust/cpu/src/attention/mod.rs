//! Paged attention of packed rows: checks, shares the work among threads, merges rows whose keys were seen in parts.
//!
//! The function is that of `octavo.kernels.reference.paged_attention`: softmax(scale * q k^T) v with an optional soft
//! cap and sliding window, causal within the row. Softmax runs online over chunks of keys (Milakov & Gimelshein 2018;
//! parts as in Flash-Decoding, Dao et al. 2023, and of common prefixes as in Hydragen, Juravsky et al. 2024), in base 2: scale * log2(e) is folded into q.

mod args;
mod call;
mod items;
mod narrow;
mod plan;
mod products;
mod segment;
mod wide;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::element::{Bf16, CacheDtype, Dtype, Element, F16, I8};
use crate::error::KernelError;
use crate::isa::Isa;
use crate::pool::ThreadPool;
use crate::scratch::{Floats, MAX_ROWS, Scratch, with_scratch};
use crate::simd::{Simd, by_isa};
pub use args::AttentionArgs;
use call::Call;
use plan::{Item, Plan};

/// Compute one item on this thread, which is likely to get the other one then.
type Run = unsafe fn(&Call<'_>, &Item, Option<&Item>, &mut Scratch);

/// # Safety
/// `E` is the cache's dtype and the machine has `S`'s instructions.
#[inline(always)]
unsafe fn run<S: Simd, E: Element>(
    call: &Call<'_>,
    item: &Item,
    next: Option<&Item>,
    scratch: &mut Scratch,
) {
    // SAFETY: the caller's.
    unsafe {
        if item.num_pairs() <= narrow::MAX_PAIRS && call.args.head_dim.is_multiple_of(S::LANES) {
            narrow::run::<S, E>(call, item, next, scratch);
        } else {
            wide::run::<S, E>(call, item, next, scratch);
        }
        call.merge::<S>(item, &mut scratch.line);
    }
}

by_isa! {
    fn select[E: Element](call: &Call<'_>, item: &Item, next: Option<&Item>, scratch: &mut Scratch) -> () = floats (run)
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

/// Take items of a call until there are none; `next` counts those that all threads took.
///
/// # Safety
/// The plan was filled for the call's arguments, whose pointers are valid; `run` fits the cache's dtype and the machine;
/// all threads of the call have the same `next`, 0 at first.
unsafe fn run_items(call: &Call<'_>, run: Run, next: &AtomicUsize) {
    with_scratch(|scratch| {
        let items = &call.plan.items;
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index) else {
                break;
            };
            debug_assert!(item.num_pairs() <= MAX_ROWS);
            let next = items.get(index + call.args.num_threads);
            // SAFETY: the caller's.
            unsafe { run(call, item, next, scratch) };
        }
    });
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
        let counts = plan.counts.iter().map(|&count| AtomicUsize::new(count));
        self.remaining.clear();
        self.remaining.extend(counts);
        let partials = self.partials.take(plan.partials);
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
            unsafe { run_items(&call, run, &next) };
        });
    }
}

/// Attention of all layers of a step, for threads of a region: layers of one kind (window) share a checked plan.
#[derive(Default)]
pub struct StepAttention {
    plans: Vec<Plan>,
    partials: Floats,
    /// Per layer, its items that have been taken, and of rows with parts those that are not done.
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
        self.partials.take(partials.unwrap_or(0));
        self.counters.resize_with(kinds.len(), Default::default);
        for ((next, remaining), &kind) in self.counters.iter_mut().zip(kinds) {
            *next.get_mut() = 0;
            remaining.clear();
            let counts = self.plans[kind].counts.iter();
            remaining.extend(counts.map(|&count| AtomicUsize::new(count)));
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
        unsafe { run_items(&call, run, next) };
    }
}
