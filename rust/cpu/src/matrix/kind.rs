//! A storage format as a type, so that kernels are compiled for each, and what follows from it.

use super::format::Format;
use crate::formats::{planes, scales};
use crate::simd::Simd;

/// A storage format as a type, so that a tile is compiled for each.
pub trait Kind: Copy + 'static {
    const FORMAT: Format;
    const BITS: usize = planes::bits(Self::FORMAT);
    const BLOCK_BYTES: usize = planes::block_bytes(Self::BITS);
    /// Scales of a block and row.
    const HALVES: usize = if matches!(Self::FORMAT, Format::Q6K) {
        2
    } else {
        1
    };
}

/// `Kind` number `Format as usize`.
#[derive(Clone, Copy)]
pub struct Of<const FORMAT: usize>;

impl<const FORMAT: usize> Kind for Of<FORMAT> {
    const FORMAT: Format = Format::ALL[FORMAT];
}

/// What is taken from a number before it is scaled, as `S` multiplies it.
pub const fn zero<S: Simd, K: Kind>() -> i32 {
    scales::zero(K::FORMAT) + if K::BITS == 8 { S::BIAS } else { 0 }
}

/// Blocks have minima.
pub const fn has_minima<K: Kind>() -> bool {
    matches!(K::FORMAT, Format::Q4_1 | Format::Q4K | Format::Q5K)
}

/// Bytes of the scales of eight blocks of a K format.
pub const fn large_bytes<K: Kind>() -> usize {
    match K::FORMAT {
        Format::Q4K | Format::Q5K => 320,
        Format::Q6K => 288,
        _ => 0,
    }
}

/// Bytes of a block's scales, on average.
pub const fn scale_bytes<K: Kind>() -> usize {
    match K::FORMAT {
        Format::Int8 => 0,
        Format::Q8_0 | Format::Q4_0 => 32,
        Format::Q4_1 => 64,
        _ => large_bytes::<K>() / 8,
    }
}
