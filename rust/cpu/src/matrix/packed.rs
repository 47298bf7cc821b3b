//! Blocks of integer weights as a matrix keeps them, put together and scaled on the way to the products.

use std::marker::PhantomData;

use super::Matrix;
use super::format::{Format, GROUP};
use super::kind::{Kind, has_minima, large_bytes, scale_bytes};
use super::product::Product;
use crate::simd::{Numbers, STEPS, Simd, prefetch};

/// Bytes ahead of the products that one row's numbers are asked for, and their scales.
const AHEAD: usize = 8192;
const SCALES_AHEAD: usize = 1024;

/// Ask for what one row needs first.
#[inline(always)]
pub fn prefetch_start<K: Kind>(matrix: &Matrix, group: usize) {
    prefetch(matrix.numbers(group), AHEAD);
    if const { scale_bytes::<K>() > 0 } {
        prefetch(matrix.scales(group), SCALES_AHEAD);
    }
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
    pub fn prefetch(&self) {
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
