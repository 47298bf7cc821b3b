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

/// Rows and groups of the tiles that an instruction set's registers hold, and the rows where only one group is left.
const fn sizes((rows, width): (usize, usize)) -> (usize, usize, usize) {
    let lone = if width == 2 && rows > 4 { 4 } else { rows };
    (rows, width, lone)
}

/// A kernel for tiles of M rows by J groups.
macro_rules! tiles {
    ($name:ident, $module:ident, $tile:ident, [$($m:literal),*]) => {
        /// Compute rows by columns.
        ///
        /// # Safety
        /// As `run`; the matrix has format `K`, the machine has `L`'s instructions.
        #[inline(always)]
        pub unsafe fn $name<L: Lanes, K: Kind>(product: &Product<'_>, rows: Range<usize>, columns: Range<usize>) {
            // A closure in place of this loop's body would not be compiled for the instructions.
            for (tile, num_rows, wide) in Cut::of::<K>(product.matrix.k(), L::$tile, rows, columns) {
                // SAFETY: the caller's; the cut's tiles are within rows and columns.
                unsafe {
                    // A tile that no cut gives is not compiled.
                    match (num_rows, wide) {
                        $(
                            ($m, true) => if const { $m > 1 && $m <= sizes(L::$tile).0 && sizes(L::$tile).1 == 2 } {
                                $module::tile::<L, K, $m, 2>(product, tile);
                            },
                            ($m, false) => if const { $m <= sizes(L::$tile).2 } {
                                $module::tile::<L, K, $m, 1>(product, tile);
                            },
                        )*
                        _ => unreachable!("{num_rows} rows in a tile"),
                    }
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

/// The tiles of a part: chunks of rows that stay in cache; within one, group after group (or pair of groups); within
/// that, all rows.
struct Cut {
    rows: Range<usize>,
    groups: Range<usize>,
    tile: (usize, usize),
    /// Rows of a chunk.
    chunk: usize,
    /// The chunk's and the group's that come next, and the number of the tile within the chunk.
    row: usize,
    group: usize,
    index: usize,
}

impl Cut {
    fn of<K: Kind>(
        k: usize,
        tile: (usize, usize),
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Cut {
        let row_bytes = k * if K::FORMAT.is_integer() { 1 } else { 4 };
        let groups = columns.start / GROUP..columns.end.div_ceil(GROUP);
        Cut {
            chunk: (ROWS_BYTES / row_bytes)
                .next_multiple_of(tile.0)
                .max(tile.0),
            row: rows.start,
            group: groups.start,
            index: 0,
            rows,
            groups,
            tile,
        }
    }
}

impl Iterator for Cut {
    /// Where, how many rows, and whether it has two groups.
    type Item = (Tile, usize, bool);

    fn next(&mut self) -> Option<Self::Item> {
        if self.row >= self.rows.end || self.groups.is_empty() {
            return None;
        }
        let (most, width, lone) = sizes(self.tile);
        let count = self.chunk.min(self.rows.end - self.row);
        // One row: the weights' speed counts, and one stream of them is read fastest.
        let wide = width == 2 && count > 1 && self.group + 2 <= self.groups.end;
        // Tiles of nearly the same size: a last one of one row would cost as much as a full one.
        let num_tiles = count.div_ceil(if wide { most } else { lone });
        let at = |i: usize| self.row + count * i / num_tiles;
        let (row, end) = (at(self.index), at(self.index + 1));
        let group = self.group;
        self.index += 1;
        if self.index == num_tiles {
            self.index = 0;
            self.group += if wide { 2 } else { 1 };
            if self.group == self.groups.end {
                self.group = self.groups.start;
                self.row += count;
            }
        }
        Some((Tile { row, group }, end - row, wide))
    }
}

#[cfg(test)]
mod tests {
    use super::super::integer::Of;
    use super::*;

    #[test]
    fn a_cut_covers_every_row_and_group_once() {
        for (num_rows, columns, k, tile) in [
            (1, 0..160, 64, (6, 2)),
            (23, 32..100, 64, (6, 2)),
            (40, 0..17, 1 << 16, (6, 2)),
            (9, 16..48, 1 << 20, (4, 1)),
            (5, 0..0, 64, (4, 1)),
            (0, 0..64, 64, (12, 2)),
        ] {
            let groups = columns.start / GROUP..columns.end.div_ceil(GROUP);
            let mut seen = vec![0; num_rows * groups.end];
            for (at, rows, wide) in Cut::of::<Of<4>>(k, tile, 0..num_rows, columns) {
                assert!(rows >= 1 && rows <= sizes(tile).0 && (wide || rows <= sizes(tile).2));
                for row in at.row..at.row + rows {
                    for group in at.group..=at.group + usize::from(wide) {
                        seen[row * groups.end + group] += 1;
                    }
                }
            }
            for (i, count) in seen.into_iter().enumerate() {
                let inside = groups.contains(&(i % groups.end));
                assert_eq!(count, u8::from(inside));
            }
        }
    }
}
