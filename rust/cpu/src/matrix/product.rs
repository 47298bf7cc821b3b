//! One thread's part of a product: cut into tiles, each computed by the kernel of its format and instruction set.

use std::ops::Range;

use super::format::GROUP;
use super::integer::Kind;
use super::{Input, Matrix, Output, float, integer};
use crate::activations::Activations;
use crate::lanes::Lanes;

/// Rows of the input that a tile handles at once, at most.
pub const ROWS: usize = 12;
/// Bytes of the input's rows that stay in the second-level cache while all weights pass by.
const ROWS_BYTES: usize = 384 << 10;

/// A checked product, as kernels see it.
pub struct Product<'a> {
    pub matrix: &'a Matrix,
    /// f32 `[rows, k]`; only for float formats.
    pub x: *const f32,
    pub quantized: &'a Activations,
    pub output: &'a Output<'a>,
}

/// Where a tile starts.
#[derive(Clone, Copy)]
pub struct Tile {
    pub row: usize,
    pub group: usize,
}

impl Product<'_> {
    /// Take the results of one row and the 16 outputs of one group.
    ///
    /// # Safety
    /// They are this thread's; the machine has `L`'s instructions.
    #[inline(always)]
    pub unsafe fn finish<L: Lanes>(&self, row: usize, group: usize, sums: L::F) {
        let output = self.output;
        let first = group * GROUP;
        let count = GROUP.min(self.matrix.n() - first);
        let mut line = [0.0; GROUP];
        // SAFETY: the output holds every row's n results (`Matrix::check`).
        unsafe {
            let target = output
                .to
                .address(row * output.stride + output.column + first);
            L::store(line.as_mut_ptr(), sums);
            if let Some(bias) = output.bias {
                for (value, bias) in line.iter_mut().zip(&bias[first..first + count]) {
                    *value += bias;
                }
            }
            if output.add {
                for (i, value) in line[..count].iter_mut().enumerate() {
                    *value += *target.add(i);
                }
            }
            target.copy_from_nonoverlapping(line.as_ptr(), count);
        }
    }
}

/// Compute `rows` by `columns` of a product.
pub type Run = unsafe fn(&Product<'_>, Range<usize>, Range<usize>);

/// # Safety
/// Sizes fit the matrix (`Matrix::check`); rows and columns are this thread's, and columns start at a group.
pub unsafe fn run(
    matrix: &Matrix,
    input: &Input<'_>,
    output: &Output<'_>,
    rows: Range<usize>,
    columns: Range<usize>,
) {
    static NONE: Activations = Activations::NONE;
    let product = Product {
        matrix,
        x: input.x.as_ptr(),
        quantized: input.quantized.unwrap_or(&NONE),
        output,
    };
    // SAFETY: the caller's.
    unsafe { (matrix.run)(&product, rows, columns) };
}

/// A kernel: M rows by J groups.
macro_rules! tiles {
    ($name:ident, $module:ident, $tile:ident, [$($m:literal),*]) => {
        /// Compute rows by columns in tiles as large as the instruction set has registers for.
        ///
        /// # Safety
        /// As `run`; the matrix has format `K`, the machine has `L`'s instructions.
        #[inline(always)]
        pub unsafe fn $name<L: Lanes, K: Kind>(product: &Product<'_>, rows: Range<usize>, columns: Range<usize>) {
            let (most, width) = L::$tile;
            let row_bytes = product.matrix.k() * if K::FORMAT.is_integer() { 1 } else { 4 };
            let chunk = (ROWS_BYTES / row_bytes).next_multiple_of(most);
            let groups = columns.start / GROUP..columns.end.div_ceil(GROUP);
            for first in rows.clone().step_by(chunk) {
                let rows = first..rows.end.min(first + chunk);
                let mut group = groups.start;
                while group < groups.end {
                    let wide = width == 2 && group + 2 <= groups.end;
                    let num_tiles = rows.len().div_ceil(most);
                    for index in 0..num_tiles {
                        // Tiles of nearly the same size: a last one of one row would cost as much as a full one.
                        let at = |i: usize| rows.start + rows.len() * i / num_tiles;
                        let tile = Tile { row: at(index), group };
                        // SAFETY: the caller's.
                        unsafe {
                            match (at(index + 1) - at(index), wide) {
                                $(
                                    ($m, true) if $m <= L::$tile.0 && L::$tile.1 == 2 => $module::tile::<L, K, $m, 2>(product, tile),
                                    ($m, false) if $m <= L::$tile.0 => $module::tile::<L, K, $m, 1>(product, tile),
                                )*
                                _ => unreachable!("a tile has at most {most} rows"),
                            }
                        }
                    }
                    group += if wide { 2 } else { 1 };
                }
            }
        }
    };
}

tiles!(integers, integer, TILE, [1, 2, 3, 4, 5, 6]);
tiles!(
    floats,
    float,
    FLOAT_TILE,
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
);
