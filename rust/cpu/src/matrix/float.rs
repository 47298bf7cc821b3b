//! Tiles of a product of float weights: widened to f32 on the way in, everything f32.

use super::ahead::{NEAR, STEP};
use super::format::{Format, GROUP};
use super::kind::Kind;
use super::product::{Product, Tile};
use crate::simd::{Simd, prefetch};

/// Load a vector of weights.
///
/// # Safety
/// `LANES` numbers of `K`'s format are readable; the machine has `S`'s instructions.
#[inline(always)]
pub unsafe fn widen<S: Simd, K: Kind>(source: *const u8) -> S::V {
    // SAFETY: the caller's.
    unsafe {
        match K::FORMAT {
            Format::Bf16 => S::load_bf16(source.cast()),
            Format::F16 => S::load_f16(source.cast()),
            _ => S::load(source.cast()),
        }
    }
}

/// Add the products of one column.
///
/// # Safety
/// The weights and the input have that column; the machine has `S`'s instructions.
#[inline(always)]
unsafe fn add<S: Simd, K: Kind, const M: usize, const J: usize>(
    sums: &mut [[S::V; J]; M],
    x: &[*const f32; M],
    weights: &[*const u8; J],
    column: usize,
) {
    let bytes = const { K::FORMAT.block().1 };
    // SAFETY: the caller's.
    unsafe {
        let mut weight = [S::splat(0.0); J];
        for j in 0..J {
            weight[j] = widen::<S, K>(weights[j].add(column * GROUP * bytes));
        }
        for m in 0..M {
            let value = S::splat(*x[m].add(column));
            for j in 0..J {
                sums[m][j] = S::fma(value, weight[j], sums[m][j]);
            }
        }
    }
}

/// M rows of the input against J vectors of weights from group `tile.group` on, over the tile's columns.
///
/// # Safety
/// The tile is within the product, whose matrix has format `K`; the machine has `S`'s instructions.
#[inline(always)]
pub unsafe fn tile<S: Simd, K: Kind, const M: usize, const J: usize>(
    product: &Product<'_>,
    tile: &Tile,
) {
    let (matrix, k) = (product.matrix, product.matrix.k());
    let bytes = const { K::FORMAT.block().1 };
    let group = |j: usize| tile.group + j / S::PARTS;
    let lane = |j: usize| j % S::PARTS * S::LANES;
    // SAFETY: rows and groups are the product's; column < k.
    unsafe {
        let weights: [*const u8; J] =
            std::array::from_fn(|j| matrix.numbers(group(j)).add(lane(j) * bytes));
        let x: [*const f32; M] = std::array::from_fn(|m| product.x.add((tile.row + m) * k));
        let mut sums = [[S::splat(0.0); J]; M];
        let mut ahead = tile.ahead;
        if M > 1 {
            product.expect::<S, M, J>(tile);
        }
        // One row asks column by column.
        let step = if M == 1 { tile.columns.len() } else { STEP };
        let mut start = tile.columns.start;
        while start < tile.columns.end {
            if M > 1 {
                ahead.ask::<J, S>();
            }
            // How many is hidden from the compiler: it would unroll the loop and run out of registers.
            let end = tile.columns.end.min(start + step);
            for column in start..end {
                if M == 1 {
                    for j in (0..J).step_by(S::PARTS) {
                        let near = weights[j].wrapping_add(column * GROUP * bytes + NEAR);
                        prefetch(near, GROUP * bytes);
                    }
                }
                add::<S, K, M, J>(&mut sums, &x, &weights, column);
            }
            start = end;
        }
        product.finish_all::<S, M, J>(tile, sums);
    }
}
