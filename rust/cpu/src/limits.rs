//! What this machine can do at most, measured: how fast threads read memory, multiply int8 and multiply f32. A kernel's
//! speed says little until it stands beside these.

use std::hint::black_box;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::isa::Isa;
use crate::lines::Lines;
use crate::pool::ThreadPool;
use crate::simd::{Numbers, STEPS, Simd, by_isa, prefetch};

/// Bytes that are read: more than any cache holds of it.
const READ_BYTES: usize = 256 << 20;
/// Bytes of a run, one piece after the other: short, so that some runs are not interrupted.
pub const PIECE_BYTES: usize = 16 << 20;
/// Bytes of a step of the reading loop, and how far ahead it asks for them.
const READ_STEP: usize = 512;
const READ_AHEAD: usize = 4096;
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
        read_bytes: read_bytes(pool, isa),
        int8_macs: int_macs(pool, isa, 4),
        f32_macs: macs(pool, f32_peak(isa)),
    }
}

/// Bytes a second that the pool's threads read together.
pub fn read_bytes(pool: &ThreadPool, isa: Isa) -> f64 {
    let reading = Reading::new(isa);
    let time = (0..RUNS).map(|run| reading.run(pool, run)).min();
    PIECE_BYTES as f64 / time.unwrap_or_default().as_secs_f64()
}

/// Memory to be read by a pool's threads together: loads of whole vectors, and nothing else that could be the limit.
pub struct Reading {
    memory: Lines,
    read: unsafe fn(*const u8, usize),
}

impl Reading {
    /// With chosen instructions (those that the machine has not are replaced by the best).
    pub fn new(isa: Isa) -> Reading {
        Reading {
            memory: Lines::zeroed(READ_BYTES),
            read: reader(isa.or_best()),
        }
    }

    /// The time that `PIECE_BYTES` take; others in each run, so that they are in no cache.
    pub fn run(&self, pool: &ThreadPool, run: usize) -> Duration {
        let piece = run % (READ_BYTES / PIECE_BYTES) * PIECE_BYTES;
        let start = Instant::now();
        pool.run(&|team| {
            let part = team.share(PIECE_BYTES, READ_STEP);
            // SAFETY: in bounds, and nobody writes; `by_isa` gives loops for instructions that the machine has.
            unsafe {
                (self.read)(
                    self.memory.start::<u8>().add(piece + part.start),
                    part.len(),
                );
            };
        });
        start.elapsed()
    }
}

by_isa! {
    fn reader[](start: *const u8, num_bytes: usize) -> () = bytes (read)
}

/// # Safety
/// As many bytes are readable, a multiple of `READ_STEP`; the machine has `S`'s instructions.
#[inline(always)]
unsafe fn read<S: Simd>(start: *const u8, num_bytes: usize) {
    // SAFETY: the caller's.
    unsafe {
        let mut sums = [S::load_bytes(start); 4];
        for at in (0..num_bytes).step_by(READ_STEP) {
            let step = start.add(at);
            prefetch(step.wrapping_add(READ_AHEAD), READ_STEP);
            for i in 0..READ_STEP / (4 * S::LANES) {
                sums[i % 4] = S::xor(sums[i % 4], S::load_bytes(step.add(i * 4 * S::LANES)));
            }
        }
        black_box(sums);
    }
}

/// Multiply-adds a second of int8 with numbers of 4, 5, 6 or 8 bits. Without VNNI wide numbers cost more: fewer products
/// fit in 16 bits.
pub fn int_macs(pool: &ThreadPool, isa: Isa, bits: usize) -> f64 {
    let isa = isa.or_best();
    macs(
        pool,
        match bits {
            _ if isa == Isa::Amx => tiled_peak(isa),
            5 => int_peak::<Of<5>>(isa),
            6 => int_peak::<Of<6>>(isa),
            8 => int_peak::<Of<8>>(isa),
            _ => int_peak::<Of<4>>(isa),
        },
    )
}

/// A loop of multiply-adds; how many it did.
type Peak = unsafe fn(usize) -> usize;

fn macs(pool: &ThreadPool, peak: Peak) -> f64 {
    let done = AtomicUsize::new(0);
    let time = best(pool, || {
        // SAFETY: `by_isa` gives loops for instructions that the machine has.
        let count = unsafe { peak(ROUNDS) };
        done.store(count, Ordering::Relaxed);
    });
    (done.into_inner() * pool.num_threads()) as f64 / time.as_secs_f64()
}

fn best(pool: &ThreadPool, f: impl Fn() + Sync) -> Duration {
    let run = |_| {
        let start = Instant::now();
        pool.run(&|_| f());
        start.elapsed()
    };
    (0..RUNS).map(run).min().unwrap_or_default()
}

by_isa! {
    fn int_peak[H: Bits](rounds: usize) -> usize = bytes (int)
}
by_isa! {
    fn tiled_peak[](rounds: usize) -> usize = tiles (tiled)
}
by_isa! {
    fn f32_peak[](rounds: usize) -> usize = floats (f32)
}

/// Bits of weights as a type.
trait Bits: 'static {
    const BITS: usize;
}

struct Of<const BITS: usize>;

impl<const BITS: usize> Bits for Of<BITS> {
    const BITS: usize = BITS;
}

/// Weights that stay in registers, or in the first-level cache for those who read them there.
struct Held<S: Simd, H> {
    bytes: S::B,
    steps: *const u8,
    bits: PhantomData<H>,
}

impl<S: Simd, H: Bits> Numbers<S> for Held<S, H> {
    const BITS: usize = H::BITS;

    #[inline(always)]
    unsafe fn step(&self, _vector: usize, _step: usize) -> S::B {
        self.bytes
    }

    #[inline(always)]
    fn steps(&self) -> Option<(*const u8, usize)> {
        Some((self.steps, 0))
    }
}

/// # Safety
/// The machine has `S`'s instructions.
#[inline(always)]
unsafe fn int<S: Simd, H: Bits>(rounds: usize) -> usize {
    // SAFETY: the caller's.
    unsafe { int_tiles::<S, H, 12, 1>(rounds) }
}

/// Blocks of 32 columns, whose sums leave the tiles each time.
///
/// # Safety
/// The machine has `S`'s instructions.
#[inline(always)]
unsafe fn tiled<S: Simd>(rounds: usize) -> usize {
    // SAFETY: the caller's.
    unsafe {
        S::begin();
        let count = int_tiles::<S, Of<8>, 8, 2>(rounds);
        S::end();
        count
    }
}

/// # Safety
/// The machine has `S`'s instructions.
#[inline(always)]
unsafe fn int_tiles<S: Simd, H: Bits, const M: usize, const J: usize>(rounds: usize) -> usize {
    let x = [3i8; 32];
    // SAFETY: x has a block's numbers.
    unsafe {
        let weights = black_box([1u8; 128]);
        let held = Held::<S, H> {
            bytes: S::load_bytes(weights.as_ptr()),
            steps: weights.as_ptr(),
            bits: PhantomData,
        };
        let zeros = [S::splat_i32(0); M];
        let mut sums = [[S::splat_i32(0); J]; M];
        for _ in 0..rounds {
            // All the same, which the compiler must not know.
            let rows = std::array::from_fn(|_| black_box(x.as_ptr()));
            let dots = S::dots::<_, STEPS, M, J>(&held, 0, &rows, zeros);
            for m in 0..M {
                for j in 0..J {
                    sums[m][j] = S::add_i32(sums[m][j], dots[m][j]);
                }
            }
        }
        black_box(sums);
    }
    rounds * M * J * S::LANES * 32
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
