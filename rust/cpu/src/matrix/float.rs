//! Tiles of a product of float weights: widened to f32 on the way in, everything f32.

use super::format::{Format, GROUP};
use super::integer::Kind;
use super::product::{Product, Tile};
use crate::element::Dtype;
use crate::lanes::Lanes;

/// Number format of a float kind's weights.
const fn dtype(format: Format) -> Dtype {
    match format {
        Format::Bf16 => Dtype::Bf16,
        Format::F16 => Dtype::F16,
        _ => Dtype::F32,
    }
}

/// Sums that one row's products are added to in turn.
const CHAINS: usize = 4;

/// Add the products of one column.
///
/// # Safety
/// The weights and the input have that column; the machine has `L`'s instructions.
#[inline(always)]
unsafe fn add<L: Lanes, const M: usize, const J: usize>(
    sums: &mut [[L::F; J]; M],
    dtype: Dtype,
    x: &[*const f32; M],
    weights: &[*const u8; J],
    column: usize,
) {
    // SAFETY: the caller's.
    unsafe {
        let mut weight = [L::splat(0.0); J];
        for j in 0..J {
            weight[j] = L::widen(dtype, weights[j].add(column * GROUP * dtype.bytes()));
        }
        for m in 0..M {
            let value = L::splat(*x[m].add(column));
            for j in 0..J {
                sums[m][j] = L::fma(value, weight[j], sums[m][j]);
            }
        }
    }
}

/// M rows of the input against J groups from `tile.group` on.
///
/// # Safety
/// The tile is within the product, whose matrix has format `K`; the machine has `L`'s instructions.
#[inline(always)]
pub unsafe fn tile<L: Lanes, K: Kind, const M: usize, const J: usize>(
    product: &Product<'_>,
    tile: Tile,
) {
    let (matrix, k) = (product.matrix, product.matrix.k());
    let dtype = const { dtype(K::FORMAT) };
    let weights: [*const u8; J] = std::array::from_fn(|j| matrix.numbers(tile.group + j));
    // SAFETY: rows and groups are the product's; column < k.
    unsafe {
        let x: [*const f32; M] = std::array::from_fn(|m| product.x.add((tile.row + m) * k));
        let mut sums = [[L::splat(0.0); J]; M];
        let mut done = 0;
        if M == 1 {
            // One chain of additions would be slower than memory.
            let mut chains = [[[L::splat(0.0); J]; M]; CHAINS];
            while done + CHAINS <= k {
                for (i, sums) in chains.iter_mut().enumerate() {
                    add::<L, M, J>(sums, dtype, &x, &weights, done + i);
                }
                done += CHAINS;
            }
            for chain in chains {
                for j in 0..J {
                    sums[0][j] = L::fma(chain[0][j], L::splat(1.0), sums[0][j]);
                }
            }
        }
        for column in done..k {
            add::<L, M, J>(&mut sums, dtype, &x, &weights, column);
        }
        for m in 0..M {
            for j in 0..J {
                product.finish::<L>(tile.row + m, tile.group + j, sums[m][j]);
            }
        }
    }
}
