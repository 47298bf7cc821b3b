//! The number formats of caches and activations. Arithmetic is always f32.
//!
//! A row of a cache is one token's key or value in one head: `head_dim` numbers, and behind int8 numbers the f32 scale that
//! they all have.

use std::str::FromStr;

use crate::error::KernelError;
use crate::simd::Simd;

/// Format of q and the output, and of most caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    F32,
    Bf16,
    F16,
}

impl Dtype {
    pub fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 | Dtype::F16 => 2,
        }
    }
}

/// Format of cached keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheDtype {
    Plain(Dtype),
    /// value = scale * number, scale = max |value| / 127; NaN if a value is not finite.
    Int8,
}

impl CacheDtype {
    /// Bytes of a row.
    pub fn row_bytes(self, head_dim: usize) -> usize {
        match self {
            CacheDtype::Plain(dtype) => head_dim * dtype.bytes(),
            CacheDtype::Int8 => I8::row_len(head_dim),
        }
    }

    /// Bytes that a cache's address is a multiple of.
    pub fn align(self) -> usize {
        match self {
            CacheDtype::Plain(dtype) => dtype.bytes(),
            CacheDtype::Int8 => 1,
        }
    }
}

impl FromStr for CacheDtype {
    type Err = KernelError;

    fn from_str(name: &str) -> Result<Self, KernelError> {
        match name {
            "int8" => Ok(CacheDtype::Int8),
            other => other.parse().map(CacheDtype::Plain),
        }
    }
}

impl FromStr for Dtype {
    type Err = KernelError;

    fn from_str(name: &str) -> Result<Self, KernelError> {
        match name {
            "float32" => Ok(Dtype::F32),
            "bfloat16" => Ok(Dtype::Bf16),
            "float16" => Ok(Dtype::F16),
            other => Err(KernelError::Dtype(other.to_owned())),
        }
    }
}

/// bfloat16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bf16(pub u16);

/// IEEE binary16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct F16(pub u16);

/// A signed byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct I8(pub i8);

/// A number of a cache's row, which widens to f32.
pub trait Element: Copy + Send + Sync + 'static {
    /// Stored as f32, so that kernels may read it in place.
    const IS_F32: bool = false;
    /// Rows end with a scale.
    const IS_SCALED: bool = false;

    fn to_f32(self) -> f32;

    /// Elements from one row to the next.
    #[inline(always)]
    fn row_len(head_dim: usize) -> usize {
        head_dim
    }

    /// What the row's numbers are multiplied by.
    ///
    /// # Safety
    /// `row` is readable for `row_len(head_dim)` elements.
    #[inline(always)]
    unsafe fn scale(_row: *const Self, _head_dim: usize) -> f32 {
        1.0
    }

    /// Widen `S::LANES` elements.
    ///
    /// # Safety
    /// `source` is readable for `S::LANES` elements and the machine has `S`'s instructions.
    unsafe fn load<S: Simd>(source: *const Self) -> S::V;
}

impl Element for I8 {
    const IS_SCALED: bool = true;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from(self.0)
    }

    #[inline(always)]
    fn row_len(head_dim: usize) -> usize {
        head_dim + size_of::<f32>()
    }

    #[inline(always)]
    unsafe fn scale(row: *const Self, head_dim: usize) -> f32 {
        // SAFETY: the caller's; the scale lies behind the numbers, anywhere.
        unsafe { row.add(head_dim).cast::<f32>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(source: *const Self) -> S::V {
        // SAFETY: the caller's; I8 is a transparent i8.
        unsafe { S::load_i8(source.cast()) }
    }
}

/// A number that f32 can be stored as, one by one.
pub trait Rounded: Element {
    /// Rounds to nearest, ties to even.
    fn from_f32(value: f32) -> Self;

    /// Round and store `S::LANES` elements.
    ///
    /// # Safety
    /// `target` is writable for `S::LANES` elements and the machine has `S`'s instructions.
    unsafe fn store<S: Simd>(target: *mut Self, value: S::V);
}

impl Element for f32 {
    const IS_F32: bool = true;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(source: *const Self) -> S::V {
        // SAFETY: the caller's.
        unsafe { S::load(source) }
    }
}

impl Rounded for f32 {
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(target: *mut Self, value: S::V) {
        // SAFETY: the caller's.
        unsafe { S::store(target, value) }
    }
}

impl Element for Bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(source: *const Self) -> S::V {
        // SAFETY: the caller's; Bf16 is a transparent u16.
        unsafe { S::load_bf16(source.cast()) }
    }
}

impl Rounded for Bf16 {
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        if value.is_nan() {
            return Bf16(0x7fc0);
        }
        Bf16(((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16)
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(target: *mut Self, value: S::V) {
        // SAFETY: the caller's; Bf16 is a transparent u16.
        unsafe { S::store_bf16(target.cast(), value) }
    }
}

impl Element for F16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        let (sign, exponent, fraction) = (
            u32::from(self.0 >> 15),
            u32::from(self.0 >> 10) & 31,
            u32::from(self.0) & 1023,
        );
        let magnitude = match exponent {
            0 => fraction as f32 * (1.0 / 16_777_216.0),
            31 => f32::from_bits(0x7f80_0000 | (fraction << 13)),
            _ => f32::from_bits(((exponent + 112) << 23) | (fraction << 13)),
        };
        f32::from_bits(magnitude.to_bits() | (sign << 31))
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(source: *const Self) -> S::V {
        // SAFETY: the caller's; F16 is a transparent u16.
        unsafe { S::load_f16(source.cast()) }
    }
}

impl Rounded for F16 {
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let sign = ((bits >> 16) & 0x8000) as u16;
        let magnitude = bits & 0x7fff_ffff;
        let half = if magnitude > 0x7f80_0000 {
            0x7e00
        } else if magnitude >= 0x4780_0000 {
            0x7c00
        } else if magnitude < 0x3880_0000 {
            // Below the least normal: adding 0.5 leaves the rounded subnormal in the low bits.
            (f32::from_bits(magnitude) + 0.5)
                .to_bits()
                .wrapping_sub(0x3f00_0000) as u16
        } else {
            ((magnitude - 0x3800_0000 + 0xfff + ((magnitude >> 13) & 1)) >> 13) as u16
        };
        F16(sign | half)
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(target: *mut Self, value: S::V) {
        // SAFETY: the caller's; F16 is a transparent u16.
        unsafe { S::store_f16(target.cast(), value) }
    }
}
