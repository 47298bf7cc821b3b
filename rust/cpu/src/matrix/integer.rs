//! Tiles of a product of integer weights with int8 activations: exact integer sums within a block of 32 columns (or a half
//! of 16), scaled and added up in f32.
//!
//! A block's numbers stay unsigned (or moved by the instruction set's bias): sum (number - zero) x scale + minimum is
//! dot * scale + (minimum - zero * scale) * total, with the input's total made once (activations.rs).

use std::marker::PhantomData;

use super::format::{Format, GROUP};
use super::product::{Product, Tile};
use crate::activations::Block;
use crate::formats::{planes, scales};
use crate::simd::{Numbers, STEPS, Simd, prefetch};

/// Bytes ahead of the products that one row's weights are asked for.
const AHEAD: usize = 2048;

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
const fn zero<S: Simd, K: Kind>() -> i32 {
    scales::zero(K::FORMAT) + if K::BITS == 8 { S::BIAS } else { 0 }
}

/// Products have a part that depends on the input's totals.
const fn has_least<S: Simd, K: Kind>() -> bool {
    zero::<S, K>() != 0 || matches!(K::FORMAT, Format::Q4_1 | Format::Q4K | Format::Q5K)
}

/// A block of some vectors of weights.
pub trait Source<S: Simd>: Numbers<S> {
    /// Per row, of half `half` of the block: what the dot of the numbers is multiplied by, and what the input's total is.
    ///
    /// # Safety
    /// The machine has `S`'s instructions.
    unsafe fn scales(&self, vector: usize, half: usize) -> (S::V, S::V);
}

/// The same block of J vectors as a matrix keeps it.
pub struct Packed<K, const J: usize> {
    numbers: [*const u8; J],
    scales: [*const u8; J],
    block: usize,
    kind: PhantomData<K>,
}

impl<K: Kind, const J: usize> Packed<K, J> {
    /// Block `block` from group `group` on.
    ///
    /// # Safety
    /// The product's matrix has format `K`, these groups and this block.
    #[inline(always)]
    pub unsafe fn new<S: Simd>(product: &Product<'_>, group: usize, block: usize) -> Self {
        let matrix = product.matrix;
        let group = |j: usize| group + j / S::PARTS;
        Self {
            numbers: std::array::from_fn(|j| {
                let vector = j % S::PARTS * 4 * S::LANES;
                // SAFETY: within the group's packed block.
                unsafe {
                    matrix
                        .numbers(group(j))
                        .add(block * K::BLOCK_BYTES + vector)
                }
            }),
            scales: std::array::from_fn(|j| matrix.scales(group(j))),
            block,
            kind: PhantomData,
        }
    }
}

impl<S: Simd, K: Kind, const J: usize> Numbers<S> for Packed<K, J> {
    const BITS: usize = K::BITS;

    #[inline(always)]
    unsafe fn step(&self, vector: usize, step: usize) -> S::B {
        // SAFETY: a packed block has the vectors that its bits imply (planes.rs).
        unsafe {
            let at = self.numbers[vector];
            if K::BITS == 8 {
                return S::bias(S::load_bytes(at.add(64 * step)));
            }
            let pair = S::load_bytes(at.add(64 * (step % 4)));
            let low = if step < 4 {
                S::and(pair, 15)
            } else {
                S::and(S::shift_right::<4>(pair), 15)
            };
            match K::BITS {
                5 => S::or(low, high::<S>(at.add(256), step, 0x10)),
                6 => {
                    let plane = at.add(256 + 64 * (step / 4));
                    S::or(low, high::<S>(plane, 2 * (step % 4), 0x30))
                }
                _ => low,
            }
        }
    }
}

/// Bits from `first` on of each byte of a plane, moved to where `mask` is.
///
/// # Safety
/// A vector of the plane is readable; the machine has `S`'s instructions.
#[inline(always)]
unsafe fn high<S: Simd>(plane: *const u8, first: usize, mask: u8) -> S::B {
    // SAFETY: the caller's.
    unsafe {
        let plane = S::load_bytes(plane);
        let moved = match first {
            0 => S::shift_left::<4>(plane),
            1 => S::shift_left::<3>(plane),
            2 => S::shift_left::<2>(plane),
            3 => S::shift_left::<1>(plane),
            4 => plane,
            5 => S::shift_right::<1>(plane),
            6 => S::shift_right::<2>(plane),
            _ => S::shift_right::<3>(plane),
        };
        S::and(moved, mask)
    }
}

impl<S: Simd, K: Kind, const J: usize> Source<S> for Packed<K, J> {
    #[inline(always)]
    unsafe fn scales(&self, vector: usize, half: usize) -> (S::V, S::V) {
        let (plane, block) = (self.scales[vector], self.block);
        let lane = vector % S::PARTS * S::LANES;
        let zero = const { -zero::<S, K>() as f32 };
        // SAFETY: the layout is that of formats/scales.rs.
        unsafe {
            let f16 = |at: usize| S::load_f16(plane.add(at + 2 * lane).cast());
            let u8 = |at: usize| S::load_u8(plane.add(at + lane));
            let (scale, least) = match K::FORMAT {
                Format::Q4_1 => return (f16(block * 64), f16(block * 64 + 32)),
                Format::Q4K | Format::Q5K => {
                    let start = block / 8 * 320;
                    let small = start + 64 + block % 8 * 32;
                    let least = S::mul(f16(start + 32), u8(small + GROUP));
                    let scale = S::mul(f16(start), u8(small));
                    return (scale, S::mul(least, S::splat(-1.0)));
                }
                Format::Q6K => {
                    let start = block / 8 * 288;
                    let small = plane.add(start + 32 + (block % 8 * 2 + half) * GROUP + lane);
                    (S::mul(f16(start), S::load_i8(small.cast())), zero)
                }
                Format::Q8_0 | Format::Q4_0 => (f16(block * 32), zero),
                _ => (S::splat(1.0), zero),
            };
            (scale, S::mul(scale, S::splat(least)))
        }
    }
}

/// Add a block's products of M rows and J vectors.
///
/// # Safety
/// x points to a block each; the machine has `S`'s instructions.
#[inline(always)]
unsafe fn add<S: Simd, K: Kind, W: Source<S>, const M: usize, const J: usize>(
    sums: &mut [[S::V; J]; M],
    weights: &W,
    x: &[*const Block; M],
) {
    // SAFETY: the caller's; quants are a block's first bytes.
    unsafe {
        let quants = x.map(<*const Block>::cast::<i8>);
        for half in 0..K::HALVES {
            let dots = if K::HALVES == 1 {
                S::dots::<_, STEPS, M, J>(weights, 0, &quants)
            } else {
                S::dots::<_, { STEPS / 2 }, M, J>(weights, half * STEPS / 2, &quants)
            };
            let mut scales = [(S::splat(0.0), S::splat(0.0)); J];
            for j in 0..J {
                scales[j] = weights.scales(j, half);
            }
            for m in 0..M {
                let factor = S::splat((*x[m]).scale);
                let total = S::splat(if K::HALVES == 1 {
                    (*x[m]).total
                } else {
                    (*x[m]).halves[half]
                });
                for j in 0..J {
                    let (scale, least) = scales[j];
                    let dot = S::to_float(dots[m][j]);
                    sums[m][j] = if matches!(K::FORMAT, Format::Int8) {
                        S::fma(dot, factor, sums[m][j])
                    } else {
                        S::fma(S::mul(dot, factor), scale, sums[m][j])
                    };
                    if const { has_least::<S, K>() } {
                        sums[m][j] = S::fma(total, least, sums[m][j]);
                    }
                }
            }
        }
    }
}

/// M rows of the input against J vectors of weights from group `tile.group` on, over the tile's blocks.
///
/// # Safety
/// The tile is within the product, whose matrix has format `K`; `panel`, if any, was made of these groups and blocks; the
/// machine has `S`'s instructions.
#[inline(always)]
pub unsafe fn tile<S: Simd, K: Kind, const M: usize, const J: usize>(
    product: &Product<'_>,
    tile: &Tile,
) {
    let blocks = tile.columns.start / 32..tile.columns.end.div_ceil(32);
    // SAFETY: blocks are the matrix's, and those of the input (the widths are equal).
    unsafe {
        let rows: [*const Block; M] = std::array::from_fn(|m| product.quantized.row(tile.row + m));
        let mut sums = [[S::splat(0.0); J]; M];
        for block in blocks {
            let weights = Packed::<K, J>::new::<S>(product, tile.group, block);
            if M == 1 {
                for j in (0..J).step_by(S::PARTS) {
                    prefetch(weights.numbers[j].wrapping_add(AHEAD), K::BLOCK_BYTES);
                }
            }
            add::<S, K, _, M, J>(&mut sums, &weights, &rows.map(|row| row.add(block)));
        }
        finish::<S, K, M, J>(product, tile, sums);
    }
}

/// # Safety
/// As `tile`.
#[inline(always)]
unsafe fn finish<S: Simd, K: Kind, const M: usize, const J: usize>(
    product: &Product<'_>,
    tile: &Tile,
    sums: [[S::V; J]; M],
) {
    for j in 0..J {
        let group = tile.group + j / S::PARTS;
        let lane = j % S::PARTS * S::LANES;
        #[allow(clippy::cast_ptr_alignment)] // scales of int8 are f32
        // SAFETY: the caller's; a group of int8 has a scale for each row.
        unsafe {
            let scale = match K::FORMAT {
                Format::Int8 => S::load(product.matrix.scales(group).cast::<f32>().add(lane)),
                _ => S::splat(1.0),
            };
            for m in 0..M {
                let sum = match K::FORMAT {
                    Format::Int8 => S::mul(sums[m][j], scale),
                    _ => sums[m][j],
                };
                product.finish::<S>(tile, m, group * GROUP + lane, sum);
            }
        }
    }
}
