//! A product's input as the integer kernels read it: int8 in blocks of 32 with a scale each, made once and used by every
//! matrix that has the same input.
//!
//! Within a block x = scale * q, scale = max |x| / 127, q rounded to nearest. A block with a number that is not finite
//! has the scale NaN, so that every product it enters is NaN.

use std::ops::Range;

use crate::isa::Isa;
use crate::lines::Lines;
use crate::shared::Shared;
use crate::simd::{Simd, by_isa};

/// Elements of a block.
pub const BLOCK: usize = 32;

/// Some numbers of a row, and what products need beside them.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
pub struct Block {
    pub quants: [i8; BLOCK],
    pub scale: f32,
    /// scale * the sum of the quants.
    pub total: f32,
    /// What the zero of 6-bit numbers takes from a half's products: -32 * the sum of its quants.
    pub zeros: [i32; 2],
}

/// Rows of quantized numbers.
#[derive(Default)]
pub struct Activations {
    /// None: the machine's best.
    isa: Option<Isa>,
    num_rows: usize,
    width: usize,
    /// `Block` `[rows, blocks]`; quants behind `width` are zero.
    blocks: Lines,
}

impl Activations {
    /// No rows: what float products are given.
    pub(crate) const NONE: Activations = Activations {
        isa: None,
        num_rows: 0,
        width: 0,
        blocks: Lines::EMPTY,
    };

    /// Rows of quantized numbers, `[num_rows, width]`, zero at first.
    pub fn new(num_rows: usize, width: usize) -> Activations {
        let mut new = Activations::default();
        new.resize(num_rows, width);
        new
    }

    /// The same with chosen instructions (those that the machine has not are replaced by the best).
    #[must_use]
    pub fn with_isa(mut self, isa: Isa) -> Activations {
        self.isa = Some(isa.or_best());
        self
    }

    /// Have the shape `[num_rows, width]`. Contents are unspecified until they are written.
    pub fn resize(&mut self, num_rows: usize, width: usize) {
        self.num_rows = num_rows;
        self.width = width;
        self.blocks
            .grow(num_rows * self.num_blocks() * size_of::<Block>());
    }

    pub fn num_rows(&self) -> usize {
        self.num_rows
    }

    pub fn width(&self) -> usize {
        self.width
    }

    /// Blocks of a row.
    pub fn num_blocks(&self) -> usize {
        self.width.div_ceil(BLOCK)
    }

    /// Quantize `x` `[num_rows, width]`.
    ///
    /// # Panics
    /// `x` has another length.
    pub fn fill(&mut self, x: &[f32]) {
        // Only `Shared` of what is written needs to be borrowed mutably; this is read.
        let x = Shared::reading(x);
        // SAFETY: `self` is borrowed mutably and `x` shared, so nobody writes to either.
        unsafe { self.fill_part(x, 0..self.num_rows, 0..self.width) };
    }

    /// Quantize a part of `x` `[num_rows, width]`: `rows` by `columns`, which start at a block and end at one or at the
    /// end of the row.
    ///
    /// # Safety
    /// No other thread touches this part, nor writes to this part of `x`, during the call.
    ///
    /// # Panics
    /// `x` has another length, or the part is not within it or cuts a block.
    pub unsafe fn fill_part(&self, x: Shared<'_, f32>, rows: Range<usize>, columns: Range<usize>) {
        assert_eq!(x.len(), self.num_rows * self.width, "length of x");
        assert!(
            rows.end <= self.num_rows && columns.end <= self.width,
            "part out of range"
        );
        assert!(
            columns.start.is_multiple_of(BLOCK)
                && (columns.end.is_multiple_of(BLOCK) || columns.end == self.width),
            "part cuts a block"
        );
        if columns.is_empty() {
            return;
        }
        let run = quantizer(self.isa.unwrap_or(Isa::best()));
        let (first, whole) = (columns.start / BLOCK, columns.end / BLOCK);
        for row in rows {
            let start = row * self.width;
            // SAFETY: blocks are within the row, and this part is this thread's.
            unsafe {
                let line = x.part(start + columns.start..start + columns.end);
                let target = self.row(row).cast_mut();
                run(line.as_ptr(), whole - first, target.add(first));
                let rest = &line[(whole - first) * BLOCK..];
                if !rest.is_empty() {
                    let mut padded = [0.0; BLOCK];
                    padded[..rest.len()].copy_from_slice(rest);
                    run(padded.as_ptr(), 1, target.add(whole));
                }
            }
        }
    }

    /// Blocks of a row.
    pub(crate) fn row(&self, row: usize) -> *const Block {
        debug_assert!(row < self.num_rows);
        // SAFETY: row < num_rows.
        unsafe { self.blocks.start::<Block>().add(row * self.num_blocks()) }
    }
}

by_isa! {
    /// Blocks of 32 quantized one after the other: of as many numbers, to as many blocks.
    fn quantizer[](x: *const f32, num_blocks: usize, blocks: *mut Block) -> () = floats (quantize)
}

/// # Safety
/// `x` holds 32 numbers for each of the blocks; the machine has `S`'s instructions.
#[inline(always)]
unsafe fn quantize<S: Simd>(x: *const f32, num_blocks: usize, blocks: *mut Block) {
    for index in 0..num_blocks {
        // SAFETY: the caller's.
        unsafe { quantize_block::<S>(x.add(index * BLOCK), blocks.add(index)) };
    }
}

/// # Safety
/// As `quantize`, of one block.
#[inline(always)]
unsafe fn quantize_block<S: Simd>(x: *const f32, block: *mut Block) {
    const HALF: usize = BLOCK / 2;
    // SAFETY: the caller's; LANES divides a half.
    unsafe {
        let mut most = S::splat_i32(0);
        for at in (0..BLOCK).step_by(S::LANES) {
            most = S::max_i32(most, S::magnitude(S::load(x.add(at))));
        }
        let most = S::greatest_i32(most).cast_unsigned();
        if most >= NOT_FINITE {
            block.write(Block {
                quants: [0; BLOCK],
                scale: f32::NAN,
                total: f32::NAN,
                zeros: [0; 2],
            });
            return;
        }
        let scale = f32::from_bits(most) / 127.0;
        let factor = S::splat(if scale < f32::MIN_POSITIVE {
            0.0
        } else {
            1.0 / scale
        });
        let quants = (&raw mut (*block).quants).cast::<i8>();
        let mut sums = [0; 2];
        for (half, total) in sums.iter_mut().enumerate() {
            let mut sum = S::splat_i32(0);
            for at in (half * HALF..(half + 1) * HALF).step_by(S::LANES) {
                let rounded = S::to_i32(S::mul(S::load(x.add(at)), factor));
                S::store_i8(quants.add(at), rounded);
                sum = S::add_i32(sum, rounded);
            }
            *total = S::sum_i32(sum);
        }
        (&raw mut (*block).scale).write(scale);
        (&raw mut (*block).total).write(scale * (sums[0] + sums[1]) as f32);
        (&raw mut (*block).zeros).write(sums.map(|sum| -32 * sum));
    }
}

/// Bits of infinity; those of NaN are greater.
const NOT_FINITE: u32 = 0x7f80_0000;
