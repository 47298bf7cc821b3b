//! A vector of f32 lanes, one of i32 and one of four times as many bytes, as few operations as the kernels need; one file
//! per instruction set. Kernels are generic over `Simd`; `by_isa!` compiles them for each set and picks one at run time.

#[cfg(target_arch = "x86_64")]
pub mod amx;
#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
#[cfg(target_arch = "aarch64")]
pub mod neon;
pub mod portable;

/// Rows of a weight matrix that are interleaved: vectors cover them in `Simd::PARTS`.
pub const GROUP: usize = 16;
/// Steps of four columns in a block of 32.
pub const STEPS: usize = 8;

/// Ask for the cache lines of `count` elements at `source`, to be read soon.
#[inline(always)]
pub fn prefetch<T>(source: *const T, count: usize) {
    #[cfg(target_arch = "x86_64")]
    prefetch_as::<{ std::arch::x86_64::_MM_HINT_T0 }, T>(source, count);
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (source, count);
}

/// The same for what is read later: into the second-level cache, as the first has no room for it.
#[inline(always)]
pub fn prefetch_far<T>(source: *const T, count: usize) {
    #[cfg(target_arch = "x86_64")]
    prefetch_as::<{ std::arch::x86_64::_MM_HINT_T1 }, T>(source, count);
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (source, count);
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn prefetch_as<const HINT: i32, T>(source: *const T, count: usize) {
    for line in (0..count * size_of::<T>()).step_by(64) {
        use std::arch::x86_64::_mm_prefetch;
        // SAFETY: a prefetch of any address is harmless, and SSE is part of x86-64.
        unsafe { _mm_prefetch::<HINT>(source.wrapping_byte_add(line).cast()) };
    }
}

/// Numbers of some vectors of weights, step by step.
pub trait Numbers<S: Simd> {
    /// Bits of the numbers: 4, 5, 6 (unsigned) or 8 (signed, moved by `S::BIAS`).
    const BITS: usize;
    /// The order in which steps are asked for best: what the same bytes hold follows each other, so that few registers
    /// hold it; none: as they come. Steps of each half stay within it.
    const ORDER: Option<[usize; STEPS]> = None;

    /// Four columns of vector `vector` in step `step`, a row's side by side.
    ///
    /// # Safety
    /// The machine has `S`'s instructions; step < `STEPS`.
    unsafe fn step(&self, vector: usize, step: usize) -> S::B;

    /// Where the steps lie in memory as `step` gives them, a step's vectors side by side, and the bytes from one to the
    /// next; none if they lie so nowhere.
    #[inline(always)]
    fn steps(&self) -> Option<(*const u8, usize)> {
        None
    }
}

/// One instruction set. Every method must be inlined into a function compiled for that set.
///
/// # Safety
/// All methods: the machine has the instructions; pointers are valid for `LANES` elements (any alignment).
pub trait Simd: Copy + 'static {
    /// f32.
    type V: Copy;
    /// i32.
    type I: Copy;
    /// Bytes, four a lane.
    type B: Copy;
    /// A divisor of `GROUP`.
    const LANES: usize;
    /// Vectors of a group.
    const PARTS: usize = GROUP / Self::LANES;
    /// Vectors of queries that the wide attention kernel keeps in registers at once.
    const TILE: usize;
    /// Rows of the input and groups of weights (1 or 2) in a tile of the integer kernel, for numbers of 4 to 8 bits.
    const INTEGER_TILES: [(usize, usize); 5];
    /// The same of the float kernel.
    const FLOAT_TILE: (usize, usize);
    /// Rows of the input from which on the integer kernel's weights are unpacked, even if one tile has them all.
    const PANEL_ROWS: usize = usize::MAX;
    /// What 8-bit numbers are moved by to be what `dots` multiplies.
    const BIAS: i32;

    unsafe fn splat(value: f32) -> Self::V;
    unsafe fn load(source: *const f32) -> Self::V;
    unsafe fn store(target: *mut f32, value: Self::V);
    unsafe fn load_bf16(source: *const u16) -> Self::V;
    unsafe fn store_bf16(target: *mut u16, value: Self::V);
    unsafe fn load_f16(source: *const u16) -> Self::V;
    unsafe fn store_f16(target: *mut u16, value: Self::V);
    unsafe fn load_u8(source: *const u8) -> Self::V;
    unsafe fn load_i8(source: *const i8) -> Self::V;
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// a * b + c.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// Per lane: `if a <= b { x } else { y }`.
    unsafe fn select_le(a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V;
    /// Sum of the lanes: the second half is added to the first until one is left.
    unsafe fn sum(a: Self::V) -> f32;
    /// Greatest lane.
    unsafe fn greatest(a: Self::V) -> f32;
    /// The first `LANES` vectors are a square's rows; its columns.
    unsafe fn transpose(rows: [Self::V; GROUP]) -> [Self::V; GROUP];
    /// Nearest integers, ties to even.
    unsafe fn round(a: Self::V) -> Self::V;
    /// a * 2^n for integral n in -126..=127.
    unsafe fn scale_by_power(a: Self::V, n: Self::V) -> Self::V;

    unsafe fn splat_i32(value: i32) -> Self::I;
    unsafe fn add_i32(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn max_i32(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn sum_i32(a: Self::I) -> i32;
    unsafe fn greatest_i32(a: Self::I) -> i32;
    /// Bits without the sign: they order as magnitudes do, NaN above all.
    unsafe fn magnitude(a: Self::V) -> Self::I;
    unsafe fn to_float(a: Self::I) -> Self::V;
    /// Nearest integers, ties to even, of numbers that fit.
    unsafe fn to_i32(a: Self::V) -> Self::I;
    /// Write numbers of -128..=127 as bytes.
    unsafe fn store_i8(target: *mut i8, a: Self::I);

    unsafe fn load_bytes(source: *const u8) -> Self::B;
    unsafe fn store_bytes(target: *mut u8, value: Self::B);
    unsafe fn splat_bytes(value: u8) -> Self::B;
    unsafe fn xor(a: Self::B, b: Self::B) -> Self::B;
    unsafe fn and(a: Self::B, mask: Self::B) -> Self::B;
    unsafe fn and_not(a: Self::B, mask: Self::B) -> Self::B;
    /// Each byte shifted, or each pair of bytes as one: bits that would move from one to the other are zero.
    unsafe fn shift_right<const BITS: i32>(a: Self::B) -> Self::B;
    /// 8-bit numbers moved by `BIAS`.
    unsafe fn bias(a: Self::B) -> Self::B;

    /// Before and behind calls of `dots` with `Numbers::steps`, on each thread.
    unsafe fn begin() {}
    unsafe fn end() {}

    /// For M rows of the input (as far apart from each other) and J vectors of `numbers`: `start` of the row, and the sum over steps `first..first + N` and
    /// their four columns of number * x. The x of step s is at `x + 4 s`.
    unsafe fn dots<W: Numbers<Self>, const N: usize, const M: usize, const J: usize>(
        numbers: &W,
        first: usize,
        x: &[*const i8; M],
        start: [Self::I; M],
    ) -> [[Self::I; J]; M];

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

/// Define a function that gives, for an `Isa` that the machine has, the kernel `body` compiled for it. `floats` kernels
/// multiply no bytes: instruction sets that differ in that alone share one. `tiles` kernels are for AMX.
macro_rules! by_isa {
    ($(#[$doc:meta])* $vis:vis fn $name:ident [$($g:ident: $bound:path),*] ($($arg:ident: $type:ty),*) -> $ret:ty = $kind:ident $body:tt) => {
        $(#[$doc])*
        $vis fn $name<$($g: $bound),*>(isa: $crate::isa::Isa) -> unsafe fn($($type),*) -> $ret {
            $crate::simd::by_isa!(@$kind isa, ([$($g: $bound),*], [$($arg: $type),*], $ret, $body));
            debug_assert_eq!(isa, $crate::isa::Isa::Portable);
            $crate::simd::by_isa!(@call $body, $crate::simd::portable::Portable, [$($g),*])
        }
    };
    (@floats $isa:ident, $kernel:tt) => {
        #[cfg(target_arch = "x86_64")]
        $crate::simd::by_isa!(@rows $isa, $kernel,
            Amx | Avx512Vnni | Avx512 => $crate::simd::avx512::Avx512, "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c";
            AvxVnni | Avx2 => $crate::simd::avx2::Avx2, "avx2,fma,f16c";
        );
        #[cfg(target_arch = "aarch64")]
        $crate::simd::by_isa!(@rows $isa, $kernel,
            NeonDot | Neon => $crate::simd::neon::Neon, "neon";
        );
    };
    (@bytes $isa:ident, $kernel:tt) => {
        #[cfg(target_arch = "x86_64")]
        $crate::simd::by_isa!(@rows $isa, $kernel,
            Amx | Avx512Vnni => $crate::simd::avx512::Avx512, "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c";
            AvxVnni => $crate::simd::avx2::AvxVnni, "avxvnni,avx2,fma,f16c";
            Avx512 | Avx2 => $crate::simd::avx2::Avx2, "avx2,fma,f16c";
        );
        #[cfg(target_arch = "aarch64")]
        $crate::simd::by_isa!(@rows $isa, $kernel,
            NeonDot => $crate::simd::neon::NeonDot, "neon,dotprod";
            Neon => $crate::simd::neon::Neon, "neon";
        );
    };
    (@tiles $isa:ident, $kernel:tt) => {
        #[cfg(target_arch = "x86_64")]
        $crate::simd::by_isa!(@rows $isa, $kernel,
            Amx => $crate::simd::avx512::Amx, "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c";
        );
    };
    (@rows $isa:ident, $kernel:tt, $($($variant:ident)|+ => $simd:ty, $features:literal;)*) => {
        $(if matches!($isa, $($crate::isa::Isa::$variant)|+) {
            return $crate::simd::by_isa!(@compiled $simd, $features, $kernel);
        })*
    };
    (@compiled $simd:ty, $features:literal, ([$($g:ident: $bound:path),*], [$($arg:ident: $type:ty),*], $ret:ty, $body:tt)) => {{
        #[target_feature(enable = $features)]
        unsafe fn kernel<$($g: $bound),*>($($arg: $type),*) -> $ret {
            // SAFETY: the caller's; the machine has the instructions, or `isa` would be another.
            unsafe { $crate::simd::by_isa!(@call $body, $simd, [$($g),*])($($arg),*) }
        }
        kernel::<$($g),*>
    }};
    (@call ($($body:ident)::+), $simd:ty, [$($g:ident),*]) => { $($body)::+::<$simd $(, $g)*> };
}
pub(crate) use by_isa;
