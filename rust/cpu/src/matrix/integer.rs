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

/// Bytes ahead of the products that one row's numbers are asked for, and their scales.
const AHEAD: usize = 4096;
const SCALES_AHEAD: usize = 512;

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

/// A block of J vectors as a matrix keeps it.
pub struct Packed<S: Simd, K, const J: usize> {
    numbers: [*const u8; J],
    /// Of the vectors' lanes, all blocks.
    scales: [*const u8; J],
    block: usize,
    /// What K formats have for eight blocks: d and -dmin.
    large: [[S::V; J]; 2],
    /// A number's bits.
    mask: S::B,
    kind: PhantomData<K>,
}

impl<S: Simd, K: Kind, const J: usize> Packed<S, K, J> {
    /// Block `block` from group `group` on.
    ///
    /// # Safety
    /// The product's matrix has format `K`, these groups and this block; the machine has `S`'s instructions.
    #[inline(always)]
    pub unsafe fn new(product: &Product<'_>, group: usize, block: usize) -> Self {
        let matrix = product.matrix;
        let group = |j: usize| group + j / S::PARTS;
        let lane = |j: usize| j % S::PARTS * S::LANES;
        // SAFETY: within the group's packed block.
        unsafe {
            let mut new = Self {
                numbers: std::array::from_fn(|j| {
                    let numbers = matrix.numbers(group(j));
                    numbers.add(block * K::BLOCK_BYTES + 4 * lane(j))
                }),
                scales: std::array::from_fn(|j| matrix.scales(group(j))),
                block,
                large: [[S::splat(0.0); J]; 2],
                mask: S::splat_bytes(const { u8::MAX >> (8 - K::BITS) }),
                kind: PhantomData,
            };
            new.load_large();
            new
        }
    }

    /// Go on to the next block.
    ///
    /// # Safety
    /// There is one.
    #[inline(always)]
    pub unsafe fn advance(&mut self) {
        self.block += 1;
        // SAFETY: the caller's.
        unsafe {
            for numbers in &mut self.numbers {
                *numbers = numbers.add(K::BLOCK_BYTES);
            }
            if self.block.is_multiple_of(8) {
                self.load_large();
            }
        }
    }

    /// # Safety
    /// As `new`.
    #[inline(always)]
    unsafe fn load_large(&mut self) {
        let at = self.block / 8 * large_bytes::<K>();
        // SAFETY: the layout is that of formats/scales.rs.
        unsafe {
            for j in 0..J {
                if const { large_bytes::<K>() > 0 } {
                    self.large[0][j] = self.f16(j, at);
                }
                if const { large_bytes::<K>() > 0 && has_minima::<K>() } {
                    self.large[1][j] = self.f16(j, at + 2 * GROUP);
                }
            }
        }
    }

    /// # Safety
    /// `at` is the place of 16 f16 in the scales.
    #[inline(always)]
    unsafe fn f16(&self, vector: usize, at: usize) -> S::V {
        // SAFETY: the caller's.
        unsafe { S::load_f16(self.scales[vector].add(at + 2 * lane::<S>(vector)).cast()) }
    }

    /// Ask for what one row needs soon.
    #[inline(always)]
    fn prefetch(&self) {
        for j in (0..J).step_by(S::PARTS) {
            prefetch(self.numbers[j].wrapping_add(AHEAD), K::BLOCK_BYTES);
            let bytes = const { scale_bytes::<K>() };
            if bytes > 0 {
                prefetch(
                    self.scales[j].wrapping_add(self.block * bytes + SCALES_AHEAD),
                    1,
                );
            }
        }
    }
}

/// Where a vector begins among the group's rows.
#[inline(always)]
fn lane<S: Simd>(vector: usize) -> usize {
    vector % S::PARTS * S::LANES
}

/// Bytes of the scales of eight blocks of a K format.
const fn large_bytes<K: Kind>() -> usize {
    match K::FORMAT {
        Format::Q4K | Format::Q5K => 320,
        Format::Q6K => 288,
        _ => 0,
    }
}

/// Bytes of a block's scales, on average.
const fn scale_bytes<K: Kind>() -> usize {
    match K::FORMAT {
        Format::Int8 => 0,
        Format::Q8_0 | Format::Q4_0 => 32,
        Format::Q4_1 => 64,
        _ => large_bytes::<K>() / 8,
    }
}

impl<S: Simd, K: Kind, const J: usize> Numbers<S> for Packed<S, K, J> {
    const BITS: usize = K::BITS;
    const ORDER: Option<[usize; STEPS]> = match K::BITS {
        4 => Some([0, 4, 1, 5, 2, 6, 3, 7]),
        5 => Some([0, 1, 5, 2, 3, 6, 4, 7]),
        _ => None,
    };

    #[inline(always)]
    unsafe fn step(&self, vector: usize, step: usize) -> S::B {
        let at = self.numbers[vector];
        // SAFETY: a packed block has the vectors that its bits imply; numbers are put together as planes.rs has it.
        unsafe {
            match K::BITS {
                8 => S::bias(S::load_bytes(at.add(64 * step))),
                4 if step < 4 => self.low(at, step),
                4 => S::shift_right::<4>(self.high(at, step - 4)),
                5 => self.five(at, step),
                _ => self.six(at.add(step / 4 * 192), step % 4),
            }
        }
    }
}

/// What vectors of a block hold of its numbers, as planes.rs has it.
impl<S: Simd, K: Kind, const J: usize> Packed<S, K, J> {
    /// Vector `vector`'s own numbers.
    ///
    /// # Safety
    /// The block has it; the machine has `S`'s instructions.
    #[inline(always)]
    unsafe fn low(&self, block: *const u8, vector: usize) -> S::B {
        // SAFETY: the caller's.
        unsafe { S::and(S::load_bytes(block.add(64 * vector)), self.mask) }
    }

    /// Bits above them.
    ///
    /// # Safety
    /// As `low`.
    #[inline(always)]
    unsafe fn high(&self, block: *const u8, vector: usize) -> S::B {
        // SAFETY: the caller's.
        unsafe { S::and_not(S::load_bytes(block.add(64 * vector)), self.mask) }
    }

    /// A step of 5-bit numbers.
    ///
    /// # Safety
    /// As `low`.
    #[inline(always)]
    unsafe fn five(&self, block: *const u8, step: usize) -> S::B {
        // SAFETY: the caller's.
        unsafe {
            if step < 5 {
                return self.low(block, step);
            }
            let three = S::shift_right::<5>(self.high(block, 2 * (step - 5)));
            match step {
                5 => S::xor(three, S::shift_right::<3>(self.high(block, 1))),
                7 => S::xor(three, S::shift_right::<3>(self.high(block, 3))),
                _ => {
                    let (one, other) = (self.high(block, 1), self.high(block, 3));
                    let two = S::xor(S::shift_right::<2>(one), S::shift_right::<1>(other));
                    S::and(S::xor(three, two), self.mask)
                }
            }
        }
    }

    /// One of four steps of 6-bit numbers.
    ///
    /// # Safety
    /// As `low`.
    #[inline(always)]
    unsafe fn six(&self, half: *const u8, step: usize) -> S::B {
        // SAFETY: the caller's.
        unsafe {
            if step < 3 {
                return self.low(half, step);
            }
            let (a, b, c) = (self.high(half, 0), self.high(half, 1), self.high(half, 2));
            let ab = S::xor(S::shift_right::<6>(a), S::shift_right::<4>(b));
            S::xor(ab, S::shift_right::<2>(c))
        }
    }
}

impl<S: Simd, K: Kind, const J: usize> Source<S> for Packed<S, K, J> {
    #[inline(always)]
    unsafe fn scale(&self, vector: usize, half: usize) -> S::V {
        let (plane, block) = (self.scales[vector], self.block);
        // SAFETY: the layout is that of formats/scales.rs.
        unsafe {
            match K::FORMAT {
                Format::Q8_0 | Format::Q4_0 => self.f16(vector, block * 32),
                Format::Q4_1 => self.f16(vector, block * 64),
                Format::Q4K | Format::Q5K => {
                    let at = block / 8 * 320 + 64 + block % 8 * 32 + lane::<S>(vector);
                    S::mul(self.large[0][vector], S::load_u8(plane.add(at)))
                }
                Format::Q6K => {
                    let at = block / 8 * 288 + 32 + (block % 8 * 2 + half) * GROUP;
                    let small = plane.add(at + lane::<S>(vector));
                    S::mul(self.large[0][vector], S::load_i8(small.cast()))
                }
                _ => S::splat(1.0),
            }
        }
    }

    #[inline(always)]
    unsafe fn minimum(&self, vector: usize) -> S::V {
        let (plane, block) = (self.scales[vector], self.block);
        // SAFETY: as above.
        unsafe {
            match K::FORMAT {
                Format::Q4_1 => self.f16(vector, block * 64 + 32),
                Format::Q4K | Format::Q5K => {
                    let at = block / 8 * 320 + 64 + block % 8 * 32 + GROUP + lane::<S>(vector);
                    S::mul(self.large[1][vector], S::load_u8(plane.add(at)))
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
