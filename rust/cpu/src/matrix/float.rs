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
        for column in 0..k {
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
        for m in 0..M {
            for j in 0..J {
                product.finish::<L>(tile.row + m, tile.group + j, sums[m][j]);
            }
        }
    }
}
