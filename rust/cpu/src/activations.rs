//! A product's input as the integer kernels read it: int8 in blocks of 32 with a scale each, made once and used by every
//! matrix that has the same input.
//!
//! Within a block x = scale * q, scale = max |x| / 127, q rounded to nearest. A block with a number that is not finite
//! has the scale NaN, so that every product it enters is NaN.

use std::ops::Range;

use crate::dispatch;
use crate::isa::Isa;
use crate::lanes::Lanes;
use crate::lines::Lines;

/// Elements of a block.
pub const BLOCK: usize = 32;

/// Rows of quantized numbers.
#[derive(Default)]
pub struct Activations {
    /// None: the machine's best.
    isa: Option<Isa>,
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
        isa: None,
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
        let run = dispatch::quantize(self.isa.unwrap_or(Isa::best()));
        let (first, whole) = (columns.start / BLOCK, columns.end / BLOCK);
        for row in rows {
            let line = &x[row * self.width..][..self.width];
            // SAFETY: blocks are within the row, and this part is this thread's.
            unsafe {
                let at = |block: usize| {
                    (
                        self.quants(row).cast_mut().add(block * BLOCK),
                        self.scales(row).cast_mut().add(block),
                        self.sums(row).cast_mut().cast::<[i32; 2]>().add(block),
                    )
                };
                if whole > first {
                    let (quants, scales, sums) = at(first);
                    run(
                        line[first * BLOCK..].as_ptr(),
                        whole - first,
                        quants,
                        scales,
                        sums,
                    );
                }
                if !columns.end.is_multiple_of(BLOCK) && columns.end > columns.start {
                    let mut rest = [0.0; BLOCK];
                    rest[..self.width % BLOCK].copy_from_slice(&line[whole * BLOCK..]);
                    let (quants, scales, sums) = at(whole);
                    run(rest.as_ptr(), 1, quants, scales, sums);
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

/// Blocks of 32 quantized one after the other.
///
/// # Safety
/// `x` and `quants` hold 32, `scales` one and `sums` two numbers for each of the blocks; the machine has `L`'s
/// instructions.
#[inline(always)]
pub unsafe fn quantize<L: Lanes>(
    x: *const f32,
    num_blocks: usize,
    quants: *mut i8,
    scales: *mut f32,
    sums: *mut [i32; 2],
) {
    for block in 0..num_blocks {
        // SAFETY: the caller's.
        unsafe {
            let x = x.add(block * BLOCK);
            let most = L::most_bits([x, x.add(16)]);
            let quants = quants.add(block * BLOCK);
            if most >= NOT_FINITE {
                scales.add(block).write(f32::NAN);
                quants.write_bytes(0, BLOCK);
                sums.add(block).write([0; 2]);
                continue;
            }
            let scale = f32::from_bits(most) / 127.0;
            let factor = if scale < f32::MIN_POSITIVE {
                0.0
            } else {
                1.0 / scale
            };
            scales.add(block).write(scale);
            sums.add(block).write([
                L::round(x, factor, quants),
                L::round(x.add(16), factor, quants.add(16)),
            ]);
        }
    }
}

/// Bits of infinity; those of NaN are greater.
const NOT_FINITE: u32 = 0x7f80_0000;

/// A function made of `quantize`.
pub type Quantize = unsafe fn(*const f32, usize, *mut i8, *mut f32, *mut [i32; 2]);
