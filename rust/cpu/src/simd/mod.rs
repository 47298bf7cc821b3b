//! A vector of f32 lanes, as few operations as the kernels need; one file per instruction set.

#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
pub mod portable;

/// Ask for the cache lines of `count` elements at `source`, to be read soon.
#[inline(always)]
pub fn prefetch<T>(source: *const T, count: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..count * size_of::<T>()).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch of any address is harmless, and SSE is part of x86-64.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(source.wrapping_byte_add(line).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (source, count);
}

/// One instruction set. Every method must be inlined into a function compiled for that set.
///
/// # Safety
/// All methods: the machine has the instructions; pointers are valid for `LANES` elements (any alignment).
pub trait Simd: Copy + 'static {
    type V: Copy;
    const LANES: usize;
    /// Vectors of queries that the wide kernel keeps in registers at once.
    const TILE: usize;

    unsafe fn splat(value: f32) -> Self::V;
    unsafe fn load(source: *const f32) -> Self::V;
    unsafe fn store(target: *mut f32, value: Self::V);
    unsafe fn load_bf16(source: *const u16) -> Self::V;
    unsafe fn store_bf16(target: *mut u16, value: Self::V);
    unsafe fn load_f16(source: *const u16) -> Self::V;
    unsafe fn store_f16(target: *mut u16, value: Self::V);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// a * b + c.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// Per lane: `if a <= b { x } else { y }`.
    unsafe fn select_le(a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V;
    /// Sum of the lanes.
    unsafe fn sum(a: Self::V) -> f32;
    /// Greatest lane.
    unsafe fn greatest(a: Self::V) -> f32;
    /// Nearest integers, ties to even.
    unsafe fn round(a: Self::V) -> Self::V;
    /// a * 2^n for integral n in -126..=127.
    unsafe fn scale_by_power(a: Self::V, n: Self::V) -> Self::V;

    /// 2^x, relative error below 3e-7; 0 below -126 (so for -inf). x must be at most 127.
    #[inline(always)]
    unsafe fn exp2(x: Self::V) -> Self::V {
        // SAFETY: the caller's.
        unsafe {
            let least = Self::splat(-126.0);
            let clamped = Self::max(least, x); // in this order NaN stays NaN
            let n = Self::round(clamped);
            let f = Self::sub(clamped, n);
            // Taylor series of 2^f on |f| <= 1/2 up to f^7 (the rest is below 2e-9).
            let mut p = Self::splat(1.525_273_4e-5);
            for c in [
                1.540_353e-4,
                1.333_355_8e-3,
                9.618_129e-3,
                5.550_411e-2,
                2.402_265e-1,
                std::f32::consts::LN_2,
                1.0,
            ] {
                p = Self::fma(p, f, Self::splat(c));
            }
            Self::select_le(x, least, Self::splat(0.0), Self::scale_by_power(p, n))
        }
    }

    /// cap * tanh(x) for the soft cap, with `cap` already in the units wanted.
    #[inline(always)]
    unsafe fn soft_cap(x: Self::V, cap: f32) -> Self::V {
        // SAFETY: the caller's.
        unsafe {
            // tanh(x) = 1 - 2 / (e^2x + 1); beyond |x| = 15 it is 1 in f32.
            let bound = Self::splat(15.0);
            let low = Self::max(Self::splat(-15.0), x);
            let x = Self::select_le(low, bound, low, bound);
            let e = Self::exp2(Self::mul(x, Self::splat(2.0 * std::f32::consts::LOG2_E)));
            let ratio = Self::div(Self::splat(2.0), Self::add(e, Self::splat(1.0)));
            Self::mul(Self::splat(cap), Self::sub(Self::splat(1.0), ratio))
        }
    }
}
