//! What this machine can do at most, measured: how fast threads read memory, multiply int8 and multiply f32. A kernel's
//! speed says little until it stands beside these.

use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::isa::Isa;
use crate::lines::Lines;
use crate::pool::{Team, ThreadPool};
use crate::simd::{Numbers, STEPS, Simd, by_isa};

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
    /// Multiply-adds a second of int8 with 4-bit numbers: the integer kernels' fastest.
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
        int8_macs: int_macs(pool, isa, 4),
        f32_macs: macs(pool, f32_peak(isa)),
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

/// Multiply-adds a second of int8 with numbers of 4, 5, 6 or 8 bits. Without VNNI wide numbers cost more: fewer products
/// fit in 16 bits.
pub fn int_macs(pool: &ThreadPool, isa: Isa, bits: usize) -> f64 {
    let isa = isa.or_best();
    macs(
        pool,
        match bits {
            5 => int_peak::<Held<5>>(isa),
            6 => int_peak::<Held<6>>(isa),
            8 => int_peak::<Held<8>>(isa),
            _ => int_peak::<Held<4>>(isa),
        },
    )
}

/// A loop of multiply-adds; how many it did.
type Peak = unsafe fn(usize) -> usize;

fn macs(pool: &ThreadPool, peak: Peak) -> f64 {
    let done = AtomicUsize::new(0);
    let time = best(pool, |_, _| {
        // SAFETY: `by_isa` gives loops for instructions that the machine has.
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

by_isa! {
    fn int_peak[H: Bits](rounds: usize) -> usize = bytes (int)
}
by_isa! {
    fn f32_peak[](rounds: usize) -> usize = floats (f32)
}

/// Bits of weights as a type.
trait Bits: 'static {
    const BITS: usize;
}

struct Held<const BITS: usize>;

impl<const BITS: usize> Bits for Held<BITS> {
    const BITS: usize = BITS;
}

/// Weights that stay in registers.
struct Registers<S: Simd, H>(S::B, std::marker::PhantomData<H>);

impl<S: Simd, H: Bits> Numbers<S> for Registers<S, H> {
    const BITS: usize = H::BITS;

    #[inline(always)]
    unsafe fn step(&self, _vector: usize, _step: usize) -> S::B {
        self.0
    }
}

/// # Safety
/// The machine has `S`'s instructions.
#[inline(always)]
unsafe fn int<S: Simd, H: Bits>(rounds: usize) -> usize {
    const M: usize = 12;
    let x = [3i8; 32];
    // SAFETY: x has a block's numbers.
    unsafe {
        let weights = black_box([1u8; 64]);
        let held = Registers::<S, H>(S::load_bytes(weights.as_ptr()), std::marker::PhantomData);
        let mut sums = [S::splat_i32(0); M];
        for _ in 0..rounds {
            // All the same, which the compiler must not know.
            let rows = std::array::from_fn(|_| black_box(x.as_ptr()));
            let dots = S::dots::<_, STEPS, M, 1>(&held, 0, &rows);
            for m in 0..M {
                sums[m] = S::add_i32(sums[m], dots[m][0]);
            }
        }
        black_box(sums);
    }
    rounds * M * S::LANES * 32
}

/// # Safety
/// The machine has `S`'s instructions.
#[inline(always)]
unsafe fn f32<S: Simd>(rounds: usize) -> usize {
    const CHAINS: usize = 12;
    // SAFETY: the caller's.
    unsafe {
        let (a, b) = (S::splat(black_box(0.5)), S::splat(black_box(1.0)));
        let mut sums = [b; CHAINS];
        for _ in 0..rounds {
            for _ in 0..8 {
                for sum in &mut sums {
                    *sum = S::fma(*sum, a, b);
                }
            }
        }
        black_box(sums);
    }
    rounds * 8 * CHAINS * S::LANES
}
