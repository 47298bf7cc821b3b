//! What this machine can do at most, measured: how fast threads read memory, multiply int8 and multiply f32. A kernel's
//! speed says little until it stands beside these.

use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::dispatch;
use crate::isa::Isa;
use crate::lanes::{Lanes, Numbers, STEPS};
use crate::lines::Lines;
use crate::pool::{Team, ThreadPool};

/// Bytes that are read: more than any cache holds of it.
const READ_BYTES: usize = 256 << 20;
/// Bytes of a run, one piece after the other: short, so that some runs are not interrupted.
const PIECE_BYTES: usize = 16 << 20;
/// A measurement is the best of as many runs.
const RUNS: usize = 48;
/// Rounds of the arithmetic loops: about a millisecond.
const ROUNDS: usize = 1 << 14;

/// Of all threads of a pool together.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub num_threads: usize,
    /// Bytes read a second.
    pub read_bytes: f64,
    /// int8 multiply-adds a second, as the integer kernels do them.
    pub int8_macs: f64,
    /// f32 multiply-adds a second.
    pub f32_macs: f64,
}

/// Measure all of it, with the best instructions: about half a second.
pub fn measure(pool: &ThreadPool) -> Limits {
    measure_with(pool, Isa::best())
}

/// The same with chosen instructions (those that the machine has not are replaced by the best).
pub fn measure_with(pool: &ThreadPool, isa: Isa) -> Limits {
    let isa = isa.or_best();
    Limits {
        num_threads: pool.num_threads(),
        read_bytes: read_bytes(pool),
        int8_macs: macs(pool, dispatch::int8_peak(isa)),
        f32_macs: macs(pool, dispatch::f32_peak(isa)),
    }
}

/// Bytes a second that the pool's threads read together.
pub fn read_bytes(pool: &ThreadPool) -> f64 {
    let memory = Lines::zeroed(READ_BYTES);
    let time = best(pool, |run, team| {
        let piece = run % (READ_BYTES / PIECE_BYTES) * (PIECE_BYTES / 8);
        let part = team.share(PIECE_BYTES / 8, 512);
        // SAFETY: in bounds, and nobody writes.
        let words = unsafe {
            let start = memory.start::<u64>().add(piece + part.start);
            std::slice::from_raw_parts(start, part.len())
        };
        let mut sums = [0u64; 64];
        for line in words.as_chunks::<64>().0 {
            for (sum, word) in sums.iter_mut().zip(line) {
                *sum ^= word;
            }
        }
        black_box(sums);
    });
    PIECE_BYTES as f64 / time.as_secs_f64()
}

/// A loop of multiply-adds; how many it did.
pub type Peak = unsafe fn(usize) -> usize;

fn macs(pool: &ThreadPool, peak: Peak) -> f64 {
    let done = AtomicUsize::new(0);
    let time = best(pool, |_, _| {
        // SAFETY: `dispatch` gives loops for instructions that the machine has.
        let count = unsafe { peak(ROUNDS) };
        done.store(count, Ordering::Relaxed);
    });
    (done.into_inner() * pool.num_threads()) as f64 / time.as_secs_f64()
}

fn best(pool: &ThreadPool, f: impl Fn(usize, &Team<'_>) + Sync) -> Duration {
    let run = |run| {
        let start = Instant::now();
        pool.run(&|team| f(run, team));
        start.elapsed()
    };
    (0..RUNS).map(run).min().unwrap_or_default()
}

/// Weights that stay in registers.
struct Held<L: Lanes>(L::Bytes);

impl<L: Lanes> Numbers<L> for Held<L> {
    const BITS: usize = 4;

    #[inline(always)]
    unsafe fn step(&self, _group: usize, _step: usize) -> L::Bytes {
        self.0
    }
}

/// # Safety
/// The machine has `L`'s instructions.
#[inline(always)]
pub unsafe fn int8<L: Lanes>(rounds: usize) -> usize {
    const M: usize = 6;
    let x = [3i8; 32];
    // SAFETY: x has a block's numbers.
    unsafe {
        let held = Held::<L>(L::load_bytes([1u8; 64].as_ptr()));
        let mut sums = [L::splat_i32(0); M];
        for _ in 0..rounds {
            let dots = L::dots::<_, STEPS, M, 1>(&held, 0, &[black_box(x.as_ptr()); M], &sums);
            sums = dots.map(|[sum]| sum);
        }
        black_box(sums);
    }
    rounds * M * 16 * 32
}

/// # Safety
/// The machine has `L`'s instructions.
#[inline(always)]
pub unsafe fn f32<L: Lanes>(rounds: usize) -> usize {
    const CHAINS: usize = 12;
    // SAFETY: the caller's.
    unsafe {
        let (a, b) = (L::splat(black_box(0.5)), L::splat(black_box(1.0)));
        let mut sums = [b; CHAINS];
        for _ in 0..rounds {
            for _ in 0..8 {
                for sum in &mut sums {
                    *sum = L::fma(*sum, a, b);
                }
            }
        }
        black_box(sums);
    }
    rounds * 8 * CHAINS * 16
}
