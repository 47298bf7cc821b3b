//! Tiles of a product of integer weights with int8 activations: exact integer sums within a block of 32 columns (or a half
//! of 16), scaled and added up in f32.
//!
//! A block's numbers stay unsigned (or moved by the instruction set's bias): the sum over (number - zero) * scale + minimum
//! is (dot - zero * total) * scale + minimum * total, with the input's total made once (activations.rs).

use super::format::{Format, GROUP};
use super::kind::{Kind, has_minima, zero};
use super::packed::{Packed, Source};
use super::panel::Panel;
use super::product::{Product, Tile};
use crate::activations::Block;
use crate::simd::{STEPS, Simd};

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
        if K::HALVES == 2 {
            return add_halves::<S, _, M, J>(sums, weights, x, &quants);
        }
        let dots = S::dots::<_, STEPS, M, J>(weights, 0, &quants, [S::splat_i32(0); M]);
        let (mut scale, mut minimum) = ([S::splat(0.0); J], [S::splat(0.0); J]);
        for j in 0..J {
            scale[j] = weights.scale(j, 0);
            if const { has_minima::<K>() } {
                minimum[j] = weights.minimum(j);
            }
        }
        for m in 0..M {
            let factor = S::splat((*x[m]).scale);
            let total = S::splat((*x[m]).total);
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

/// The same of 6-bit numbers, whose halves have scales of their own. Their zero is taken from the integers.
///
/// # Safety
/// As `add`.
#[inline(always)]
unsafe fn add_halves<S: Simd, W: Source<S>, const M: usize, const J: usize>(
    sums: &mut [[S::V; J]; M],
    weights: &W,
    x: &[*const Block; M],
    quants: &[*const i8; M],
) {
    // SAFETY: the caller's.
    unsafe {
        let mut scaled = [[S::splat(0.0); J]; M];
        for half in 0..2 {
            let mut zeros = [S::splat_i32(0); M];
            for m in 0..M {
                zeros[m] = S::splat_i32((*x[m]).zeros[half]);
            }
            let dots = S::dots::<_, { STEPS / 2 }, M, J>(weights, half * STEPS / 2, quants, zeros);
            for j in 0..J {
                let scale = weights.scale(j, half);
                for m in 0..M {
                    let dot = S::to_float(dots[m][j]);
                    scaled[m][j] = if half == 0 {
                        S::mul(dot, scale)
                    } else {
                        S::fma(dot, scale, scaled[m][j])
                    };
                }
            }
        }
        for m in 0..M {
            let factor = S::splat((*x[m]).scale);
            for j in 0..J {
                sums[m][j] = S::fma(scaled[m][j], factor, sums[m][j]);
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
            let mut weights = Packed::<S, K, J>::new(product, tile.group, first);
            for block in 0..num_blocks {
                if block > 0 {
                    weights.advance();
                }
                if M == 1 {
                    weights.prefetch();
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
