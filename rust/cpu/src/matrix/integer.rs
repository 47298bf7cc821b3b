//! Tiles of a product of integer weights with int8 activations: exact integer sums within a block of 32 columns (or a half
//! of 16), scaled and added up in f32.

use std::marker::PhantomData;

use super::format::{Format, GROUP};
use super::product::{Product, Tile};
use crate::activations::Activations;
use crate::element::Dtype;
use crate::formats::{planes, scales};
use crate::lanes::{Lanes, Numbers, STEPS};
use crate::simd::prefetch;

/// Bytes ahead of the products that one row's weights are asked for.
const AHEAD: usize = 2048;

/// A storage format as a type, so that a tile is compiled for each.
pub trait Kind: Copy + 'static {
    const FORMAT: Format;
    const BITS: usize = planes::bits(Self::FORMAT);
    const BLOCK_BYTES: usize = planes::block_bytes(Self::BITS);
}

/// `Kind` number `Format as usize`.
#[derive(Clone, Copy)]
pub struct Of<const FORMAT: usize>;

impl<const FORMAT: usize> Kind for Of<FORMAT> {
    const FORMAT: Format = Format::ALL[FORMAT];
}

/// The same packed block of J groups.
struct Packed<K, const J: usize> {
    at: [*const u8; J],
    kind: PhantomData<K>,
}

impl<L: Lanes, K: Kind, const J: usize> Numbers<L> for Packed<K, J> {
    const BITS: usize = K::BITS;

    #[inline(always)]
    unsafe fn step(&self, group: usize, step: usize) -> L::Bytes {
        // SAFETY: a packed block has the vectors that its bits imply (planes.rs).
        unsafe {
            let at = self.at[group];
            if K::BITS == 8 {
                return L::bias(L::load_bytes(at.add(64 * step)));
            }
            let pair = L::load_bytes(at.add(64 * (step % 4)));
            let low = if step < 4 {
                L::and(pair, 15)
            } else {
                L::and(L::shift_right(pair, 4), 15)
            };
            match K::BITS {
                5 => L::or(low, high::<L>(at.add(256), step, 0x10)),
                6 => {
                    let plane = at.add(256 + 64 * (step / 4));
                    L::or(low, high::<L>(plane, 2 * (step % 4), 0x30))
                }
                _ => low,
            }
        }
    }
}

/// Bits from `first` on of each byte of a plane, moved to where `mask` is.
///
/// # Safety
/// The plane is 64 bytes; the machine has `L`'s instructions.
#[inline(always)]
unsafe fn high<L: Lanes>(plane: *const u8, first: usize, mask: u8) -> L::Bytes {
    // SAFETY: the caller's.
    unsafe {
        let plane = L::load_bytes(plane);
        let moved = if first <= 4 {
            L::shift_left(plane, 4 - first as u32)
        } else {
            L::shift_right(plane, first as u32 - 4)
        };
        L::and(moved, mask)
    }
}

/// Scales and minima of block `block` of a group; for `Q6_K` those of half `half`.
///
/// # Safety
/// `plane` is the group's plane of scales and has that block; the machine has `L`'s instructions.
#[inline(always)]
unsafe fn scale<L: Lanes, K: Kind>(plane: *const u8, block: usize, half: usize) -> (L::F, L::F) {
    // SAFETY: the layout is that of formats/scales.rs.
    unsafe {
        let f16 = |at: usize| L::widen(Dtype::F16, plane.add(at));
        match K::FORMAT {
            Format::Q8_0 | Format::Q4_0 => (f16(block * 32), L::splat(0.0)),
            Format::Q4_1 => (f16(block * 64), f16(block * 64 + 32)),
            Format::Q4K | Format::Q5K => {
                let start = block / 8 * 320;
                let small = plane.add(start + 64 + block % 8 * 32);
                let least = L::mul(f16(start + 32), L::load_u8(small.add(GROUP)));
                (
                    L::mul(f16(start), L::load_u8(small)),
                    L::mul(least, L::splat(-1.0)),
                )
            }
            Format::Q6K => {
                let start = block / 8 * 288;
                let small = plane.add(start + 32 + (block % 8 * 2 + half) * GROUP);
                (L::mul(f16(start), L::load_i8(small)), L::splat(0.0))
            }
            _ => (L::splat(1.0), L::splat(0.0)),
        }
    }
}

/// The input's rows of a tile.
struct Rows<const M: usize> {
    quants: [*const i8; M],
    scales: [*const f32; M],
    sums: [*const i32; M],
}

impl<const M: usize> Rows<M> {
    #[inline(always)]
    fn of(x: &Activations, first: usize) -> Rows<M> {
        Rows {
            quants: std::array::from_fn(|m| x.quants(first + m)),
            scales: std::array::from_fn(|m| x.scales(first + m)),
            sums: std::array::from_fn(|m| x.sums(first + m)),
        }
    }

    /// Sum of the quants of a block, or of half `half` of it.
    ///
    /// # Safety
    /// block < blocks of the row.
    #[inline(always)]
    unsafe fn sum(&self, m: usize, block: usize, half: Option<usize>) -> i32 {
        // SAFETY: the caller's.
        unsafe {
            let sums = self.sums[m].add(2 * block);
            half.map_or_else(|| *sums + *sums.add(1), |half| *sums.add(half))
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
    let (matrix, x) = (product.matrix, product.quantized);
    let rows = Rows::<M>::of(x, tile.row);
    let numbers: [*const u8; J] = std::array::from_fn(|j| matrix.numbers(tile.group + j));
    let plane: [*const u8; J] = std::array::from_fn(|j| matrix.scales(tile.group + j));
    let zero = scales::zero(K::FORMAT) + if K::BITS == 8 { L::BIAS } else { 0 };
    // SAFETY: blocks are the matrix's, and those of the input (the widths are equal).
    unsafe {
        let mut sums = [[L::splat(0.0); J]; M];
        for block in 0..x.num_blocks() {
            let packed = Packed::<K, J> {
                at: numbers.map(|at| at.add(block * K::BLOCK_BYTES)),
                kind: PhantomData,
            };
            if M == 1 {
                for at in packed.at {
                    prefetch(at.wrapping_add(AHEAD), K::BLOCK_BYTES);
                }
            }
            let quants = rows.quants.map(|at| at.add(block * 32));
            let start = |half| {
                std::array::from_fn::<_, M, _>(|m| L::splat_i32(-zero * rows.sum(m, block, half)))
            };
            let factor: [L::F; M] = std::array::from_fn(|m| L::splat(*rows.scales[m].add(block)));
            if K::FORMAT == Format::Q6K {
                let first = L::dots::<_, { STEPS / 2 }, M, J>(&packed, 0, &quants, &start(Some(0)));
                add::<L, K, M, J>(&mut sums, &first, &factor, &plane, block, 0);
                let second =
                    L::dots::<_, { STEPS / 2 }, M, J>(&packed, STEPS / 2, &quants, &start(Some(1)));
                add::<L, K, M, J>(&mut sums, &second, &factor, &plane, block, 1);
            } else {
                let start = if zero == 0 {
                    [L::splat_i32(0); M]
                } else {
                    start(None)
                };
                let dots = L::dots::<_, STEPS, M, J>(&packed, 0, &quants, &start);
                add::<L, K, M, J>(&mut sums, &dots, &factor, &plane, block, 0);
            }
            if matches!(K::FORMAT, Format::Q4_1 | Format::Q4K | Format::Q5K) {
                for j in 0..J {
                    let (_, least) = scale::<L, K>(plane[j], block, 0);
                    for m in 0..M {
                        let total = rows.sum(m, block, None) as f32 * *rows.scales[m].add(block);
                        sums[m][j] = L::fma(L::splat(total), least, sums[m][j]);
                    }
                }
            }
        }
        if K::FORMAT == Format::Int8 {
            for j in 0..J {
                let scale = L::load(plane[j].cast());
                for m in 0..M {
                    sums[m][j] = L::mul(sums[m][j], scale);
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

/// Add the scaled dots of a block (or of a half) to the sums.
///
/// # Safety
/// As `scale`.
#[inline(always)]
unsafe fn add<L: Lanes, K: Kind, const M: usize, const J: usize>(
    sums: &mut [[L::F; J]; M],
    dots: &[[L::I; J]; M],
    factor: &[L::F; M],
    plane: &[*const u8; J],
    block: usize,
    half: usize,
) {
    // SAFETY: the caller's.
    unsafe {
        for j in 0..J {
            if K::FORMAT == Format::Int8 {
                for m in 0..M {
                    sums[m][j] = L::fma(L::to_float(dots[m][j]), factor[m], sums[m][j]);
                }
                continue;
            }
            let (scale, _) = scale::<L, K>(plane[j], block, half);
            for m in 0..M {
                let scaled = L::mul(L::to_float(dots[m][j]), factor[m]);
                sums[m][j] = L::fma(scaled, scale, sums[m][j]);
            }
        }
    }
}
