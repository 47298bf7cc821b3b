//! Sixteen f32 lanes, one a row of a packed group, and products of int8 columns summed per lane; one file per instruction
//! set.

#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
pub mod portable;

use crate::element::Dtype;

/// Steps of four columns in a block of 32.
pub const STEPS: usize = 8;

/// The packed numbers of a block for some groups, step by step.
pub trait Numbers<L: Lanes> {
    /// Bits of the numbers: 4, 5, 6 (unsigned) or 8 (signed, moved by `L::BIAS`).
    const BITS: usize;

    /// The vector of step `step` of group `group`.
    ///
    /// # Safety
    /// The machine has `L`'s instructions; step < `STEPS`.
    unsafe fn step(&self, group: usize, step: usize) -> L::Bytes;
}

/// One instruction set. Every method must be inlined into a function compiled for that set.
///
/// # Safety
/// All methods: the machine has the instructions; pointers are valid for what is read or written (any alignment).
pub trait Lanes: Copy + 'static {
    /// 16 f32.
    type F: Copy;
    /// 16 i32.
    type I: Copy;
    /// 64 bytes.
    type Bytes: Copy;
    /// What 8-bit numbers are moved by to be what `dots` multiplies.
    const BIAS: i32;
    /// Rows of the input and groups of the weight in a tile of the integer kernel.
    const TILE: (usize, usize);
    /// The same of the float kernel.
    const FLOAT_TILE: (usize, usize);

    unsafe fn splat(value: f32) -> Self::F;
    unsafe fn load(source: *const f32) -> Self::F;
    unsafe fn store(target: *mut f32, value: Self::F);
    /// Widen 16 numbers of a 16-bit or 32-bit format.
    unsafe fn widen(dtype: Dtype, source: *const u8) -> Self::F;
    unsafe fn load_u8(source: *const u8) -> Self::F;
    unsafe fn load_i8(source: *const u8) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// a * b + c.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;

    /// Greatest bits of the magnitudes of twice 16 f32 (bits order as magnitudes do, NaN above all).
    unsafe fn most_bits(source: [*const f32; 2]) -> u32;
    /// Write 16 f32 times `factor` as the nearest int8 (ties to even); their sum. The results must fit.
    unsafe fn round(source: *const f32, factor: f32, target: *mut i8) -> i32;

    unsafe fn splat_i32(value: i32) -> Self::I;
    unsafe fn to_float(a: Self::I) -> Self::F;

    unsafe fn load_bytes(source: *const u8) -> Self::Bytes;
    unsafe fn or(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    unsafe fn and(a: Self::Bytes, mask: u8) -> Self::Bytes;
    /// Each 16-bit pair of bytes shifted; bits move between the two bytes of a pair.
    unsafe fn shift_right(a: Self::Bytes, bits: u32) -> Self::Bytes;
    unsafe fn shift_left(a: Self::Bytes, bits: u32) -> Self::Bytes;
    /// 8-bit numbers moved by `BIAS`.
    unsafe fn bias(a: Self::Bytes) -> Self::Bytes;

    /// For each row of the input and group of `numbers`: `start` + the sum over steps `first..first + N` and their four
    /// columns of number * x. The x of step s is at `x + 4 s`.
    unsafe fn dots<W: Numbers<Self>, const N: usize, const M: usize, const J: usize>(
        numbers: &W,
        first: usize,
        x: &[*const i8; M],
        start: &[Self::I; M],
    ) -> [[Self::I; J]; M];
}
