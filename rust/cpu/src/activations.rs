//! A product's input as the integer kernels read it: int8 in blocks of 32 with a scale each, made once and used by every
//! matrix that has the same input.
//!
//! Within a block x = scale * q, scale = max |x| / 127, q rounded to nearest. A block with a number that is not finite
//! has the scale NaN, so that every product it enters is NaN.

use std::ops::Range;

use crate::lines::Lines;

/// Elements of a block.
pub const BLOCK: usize = 32;

/// Rows of quantized numbers.
#[derive(Default)]
pub struct Activations {
    num_rows: usize,
    width: usize,
    /// i8 `[rows, blocks * 32]`, zero behind `width`.
    quants: Lines,
    /// f32 `[rows, blocks]`.
    scales: Lines,
    /// i32 `[rows, blocks, 2]`: sums of the first and the second 16 quants.
    sums: Lines,
}

impl Activations {
    /// No rows: what float products are given.
    pub(crate) const NONE: Activations = Activations {
        num_rows: 0,
        width: 0,
        quants: Lines::EMPTY,
        scales: Lines::EMPTY,
        sums: Lines::EMPTY,
    };

    /// Rows of quantized numbers, `[num_rows, width]`, zero at first.
    pub fn new(num_rows: usize, width: usize) -> Activations {
        let mut new = Activations::default();
        new.resize(num_rows, width);
        new
    }

    /// Have the shape `[num_rows, width]`. Contents are unspecified until they are written.
    pub fn resize(&mut self, num_rows: usize, width: usize) {
        self.num_rows = num_rows;
        self.width = width;
        let count = num_rows * self.num_blocks();
        self.quants.grow(count * BLOCK);
        self.scales.grow(count * 4);
        self.sums.grow(count * 8);
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
        // SAFETY: borrowed mutably, so there is no other thread.
        unsafe { self.fill_part(x, 0..self.num_rows, 0..self.width) };
    }

    /// Quantize a part of `x` `[num_rows, width]`: `rows` by `columns`, which start at a block and end at one or at the
    /// end of the row.
    ///
    /// # Safety
    /// No other thread reads or writes this part during the call (others they may).
    ///
    /// # Panics
    /// `x` has another length, or the part is not within it or cuts a block.
    pub unsafe fn fill_part(&self, x: &[f32], rows: Range<usize>, columns: Range<usize>) {
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
        for row in rows {
            let line = &x[row * self.width..][..self.width];
            for start in columns.clone().step_by(BLOCK) {
                let values = &line[start..self.width.min(start + BLOCK)];
                let block = row * self.num_blocks() + start / BLOCK;
                // SAFETY: block < rows * blocks, and this part is this thread's.
                unsafe {
                    let quants = &mut *self.quants.start::<[i8; BLOCK]>().add(block);
                    let (scale, sums) = quantize(values, quants);
                    self.scales.start::<f32>().add(block).write(scale);
                    self.sums.start::<[i32; 2]>().add(block).write(sums);
                }
            }
        }
    }

    /// Quants of a row, i8 `[blocks * 32]`.
    pub(crate) fn quants(&self, row: usize) -> *const i8 {
        debug_assert!(row < self.num_rows);
        // SAFETY: row < num_rows.
        unsafe {
            self.quants
                .start::<i8>()
                .add(row * self.num_blocks() * BLOCK)
        }
    }

    /// Scales of a row, f32 `[blocks]`.
    pub(crate) fn scales(&self, row: usize) -> *const f32 {
        debug_assert!(row < self.num_rows);
        // SAFETY: row < num_rows.
        unsafe { self.scales.start::<f32>().add(row * self.num_blocks()) }
    }

    /// Sums of a row, i32 `[blocks, 2]`.
    pub(crate) fn sums(&self, row: usize) -> *const i32 {
        debug_assert!(row < self.num_rows);
        // SAFETY: row < num_rows.
        unsafe { self.sums.start::<i32>().add(2 * row * self.num_blocks()) }
    }
}

/// Quantize up to 32 numbers; scale and sums.
fn quantize(values: &[f32], quants: &mut [i8; BLOCK]) -> (f32, [i32; 2]) {
    *quants = [0; BLOCK];
    let (mut most, mut finite) = (0.0f32, true);
    for value in values {
        most = most.max(value.abs());
        finite &= value.is_finite();
    }
    if !finite {
        return (f32::NAN, [0; 2]);
    }
    let scale = most / 127.0;
    let factor = if scale >= f32::MIN_POSITIVE {
        1.0 / scale
    } else {
        0.0
    };
    let mut sums = [0; 2];
    for (i, value) in values.iter().enumerate() {
        let quant = (value * factor).round_ties_even().clamp(-127.0, 127.0) as i8;
        quants[i] = quant;
        sums[i / 16] += i32::from(quant);
    }
    (scale, sums)
}
