//! Tiles of a product of integer weights with int8 activations: exact integer sums within a block of 32 columns (or a half
//! of 16), scaled and added up in f32.
//!
//! A block's numbers stay unsigned (or moved by the instruction set's bias): the sum over (number - zero) * scale + minimum
//! is (dot - zero * total) * scale + minimum * total, with the input's total made once (activations.rs).

use std::marker::PhantomData;

use super::format::{Format, GROUP};
use super::panel::Panel;
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

/// Blocks have minima.
pub const fn has_minima<K: Kind>() -> bool {
    matches!(K::FORMAT, Format::Q4_1 | Format::Q4K | Format::Q5K)
}

/// A block of some vectors of weights.
pub trait Source<S: Simd>: Numbers<S> {
    /// Per row, the scales of half `half` of the block; of formats that have them.
    ///
    /// # Safety
    /// The machine has `S`'s instructions.
    unsafe fn scale(&self, vector: usize, half: usize) -> S::V;

    /// Per row, the minima.
    ///
    /// # Safety
    /// As `scale`.
    unsafe fn minimum(&self, vector: usize) -> S::V;
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
    unsafe fn scale(&self, vector: usize, half: usize) -> S::V {
        let (plane, block) = (self.scales[vector], self.block);
        let lane = vector % S::PARTS * S::LANES;
        // SAFETY: the layout is that of formats/scales.rs.
        unsafe {
            let f16 = |at: usize| S::load_f16(plane.add(at + 2 * lane).cast());
            match K::FORMAT {
                Format::Q8_0 | Format::Q4_0 => f16(block * 32),
                Format::Q4_1 => f16(block * 64),
                Format::Q4K | Format::Q5K => {
                    let start = block / 8 * 320;
                    let small = plane.add(start + 64 + block % 8 * 32 + lane);
                    S::mul(f16(start), S::load_u8(small))
                }
                Format::Q6K => {
                    let start = block / 8 * 288;
                    let small = plane.add(start + 32 + (block % 8 * 2 + half) * GROUP + lane);
                    S::mul(f16(start), S::load_i8(small.cast()))
                }
                _ => S::splat(1.0),
            }
        }
    }

    #[inline(always)]
    unsafe fn minimum(&self, vector: usize) -> S::V {
        let (plane, block) = (self.scales[vector], self.block);
        let lane = vector % S::PARTS * S::LANES;
        // SAFETY: as above.
        unsafe {
            let f16 = |at: usize| S::load_f16(plane.add(at + 2 * lane).cast());
            match K::FORMAT {
                Format::Q4_1 => f16(block * 64 + 32),
                Format::Q4K | Format::Q5K => {
                    let start = block / 8 * 320;
                    let small = plane.add(start + 64 + block % 8 * 32 + GROUP + lane);
                    S::mul(S::mul(f16(start + 32), S::splat(-1.0)), S::load_u8(small))
                }
                _ => S::splat(0.0),
            }
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
            let (mut scale, mut minimum) = ([S::splat(0.0); J], [S::splat(0.0); J]);
            for j in 0..J {
                scale[j] = weights.scale(j, half);
                if const { has_minima::<K>() } {
                    minimum[j] = weights.minimum(j);
                }
            }
            for m in 0..M {
                let factor = S::splat((*x[m]).scale);
                let total = S::splat(if K::HALVES == 1 {
                    (*x[m]).total
                } else {
                    (*x[m]).halves[half]
                });
                let offset = S::mul(total, S::splat(const { -zero::<S, K>() as f32 }));
                for j in 0..J {
                    let dot = S::to_float(dots[m][j]);
                    if matches!(K::FORMAT, Format::Int8) {
                        sums[m][j] = S::fma(dot, factor, sums[m][j]);
                        continue;
                    }
                    let scaled = if const { zero::<S, K>() == 0 } {
                        S::mul(dot, factor)
                    } else {
                        S::fma(dot, factor, offset)
                    };
                    sums[m][j] = S::fma(scaled, scale[j], sums[m][j]);
                    if const { has_minima::<K>() } {
                        sums[m][j] = S::fma(total, minimum[j], sums[m][j]);
                    }
                }
            }
        }
    }
}

/// M rows of the input against J vectors of weights from group `tile.group` on, over the tile's blocks.
///
/// # Safety
/// The tile is within the product, whose matrix has format `K`; its panel, if any, was made for it; the machine has `S`'s
/// instructions.
#[inline(always)]
pub unsafe fn tile<S: Simd, K: Kind, const M: usize, const J: usize>(
    product: &Product<'_>,
    tile: &Tile,
) {
    let first = tile.columns.start / 32;
    let num_blocks = tile.columns.end.div_ceil(32) - first;
    // SAFETY: blocks are the matrix's, and those of the input (the widths are equal).
    unsafe {
        let rows: [*const Block; M] =
            std::array::from_fn(|m| product.quantized.row(tile.row + m).add(first));
        let mut sums = [[S::splat(0.0); J]; M];
        // Tiles of one row are alone, so that they have no panel.
        if M > 1 && !tile.panel.is_null() {
            for block in 0..num_blocks {
                let weights = Panel::<K, J>::new::<S>(tile.panel, block);
                add::<S, K, _, M, J>(&mut sums, &weights, &rows.map(|row| row.add(block)));
            }
        } else {
            for block in 0..num_blocks {
                let weights = Packed::<K, J>::new::<S>(product, tile.group, first + block);
                if M == 1 {
                    for j in (0..J).step_by(S::PARTS) {
                        prefetch(weights.numbers[j].wrapping_add(AHEAD), K::BLOCK_BYTES);
                    }
                }
                add::<S, K, _, M, J>(&mut sums, &weights, &rows.map(|row| row.add(block)));
            }
        }
        finish::<S, K, M, J>(product, tile, sums);
    }
}

/// Hand over the sums. Those of int8 are scaled by row, and its zero is taken from them here, as it is every block's.
///
/// # Safety
/// As `tile`.
#[inline(always)]
unsafe fn finish<S: Simd, K: Kind, const M: usize, const J: usize>(
    product: &Product<'_>,
    tile: &Tile,
    sums: [[S::V; J]; M],
) {
    let blocks = tile.columns.start / 32..tile.columns.end.div_ceil(32);
    let is_int8 = const { matches!(K::FORMAT, Format::Int8) };
    // SAFETY: the caller's; a group of int8 has a scale for each row.
    unsafe {
        for m in 0..M {
            let row = product.quantized.row(tile.row + m);
            let mut offset = 0.0;
            if const { is_int8_moved::<S, K>() } {
                for block in blocks.clone() {
                    offset -= zero::<S, K>() as f32 * (*row.add(block)).total;
                }
            }
            for j in 0..J {
                let group = tile.group + j / S::PARTS;
                let lane = j % S::PARTS * S::LANES;
                let mut sum = sums[m][j];
                if is_int8 {
                    #[allow(clippy::cast_ptr_alignment)] // scales of int8 are f32
                    let scale = S::load(product.matrix.scales(group).cast::<f32>().add(lane));
                    sum = S::mul(S::add(sum, S::splat(offset)), scale);
                }
                product.finish::<S>(tile, m, group * GROUP + lane, sum);
            }
        }
    }
}

/// Int8 that `S` multiplies moved.
const fn is_int8_moved<S: Simd, K: Kind>() -> bool {
    matches!(K::FORMAT, Format::Int8) && S::BIAS != 0
}
