//! One thread's part of a product: cut into tiles, each computed by the kernel of its format and instruction set.
//!
//! A result is the same to the last bit however many rows it is computed with: whatever the tile, a row's products with an
//! output are added up in the order of the columns, in pieces that depend on the matrix alone.

use std::ops::Range;

use super::format::{Format, GROUP};
use super::integer::{Kind, Of};
use super::{Input, Matrix, Output, float, integer, panel};
use crate::activations::Activations;
use crate::isa::Isa;
use crate::simd::{Simd, by_isa};

/// Rows of the input that a tile handles at once, at most.
pub const ROWS: usize = 12;
/// Bytes of the input's rows that stay in the second-level cache while all weights pass by.
const ROWS_BYTES: usize = 384 << 10;
/// Columns of which a group's weights stay in the first-level cache while rows pass by: whole blocks of every format.
const INTEGER_COLUMNS: usize = 2048;
const FLOAT_COLUMNS: usize = 256;

/// A checked product, as kernels see it.
pub struct Product<'a> {
    pub matrix: &'a Matrix,
    /// f32 `[rows, k]`; only for float formats.
    pub x: *const f32,
    pub quantized: &'a Activations,
    pub output: &'a Output<'a>,
}

/// Where a tile starts, and the columns of the input that it adds up: those from 0 on overwrite the output (unless it is
/// to be added to), later ones are added.
pub struct Tile {
    pub row: usize,
    pub group: usize,
    pub columns: Range<usize>,
    /// The weights unpacked (panel.rs), or null.
    pub panel: *const f32,
}

impl Product<'_> {
    /// Take the results of row `m` of a tile and the outputs from `first` on, those of one vector.
    ///
    /// # Safety
    /// They are this thread's; the machine has `S`'s instructions.
    #[inline(always)]
    pub unsafe fn finish<S: Simd>(&self, tile: &Tile, m: usize, first: usize, sums: S::V) {
        let output = self.output;
        let count = S::LANES.min(self.matrix.n().saturating_sub(first));
        if count == 0 {
            return;
        }
        let is_first = tile.columns.start == 0;
        let bias = output
            .bias
            .filter(|_| is_first)
            .map(|bias| &bias[first..first + count]);
        let add = output.add || !is_first;
        let at = (tile.row + m) * output.stride + output.column + first;
        // SAFETY: the output holds every row's n results (`Matrix::check`).
        unsafe {
            let target = output.to.address(at);
            if count == S::LANES {
                let mut sums = sums;
                if let Some(bias) = bias {
                    sums = S::add(sums, S::load(bias.as_ptr()));
                }
                if add {
                    sums = S::add(sums, S::load(target));
                }
                return S::store(target, sums);
            }
            let mut line = [0.0; GROUP];
            S::store(line.as_mut_ptr(), sums);
            for (i, value) in line[..count].iter_mut().enumerate() {
                *value += bias.map_or(0.0, |bias| bias[i]);
                *value += if add { *target.add(i) } else { 0.0 };
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

by_isa! {
    fn float[K: Kind](product: &Product<'_>, rows: Range<usize>, columns: Range<usize>) -> () = floats (floats)
}
by_isa! {
    fn integer[K: Kind](product: &Product<'_>, rows: Range<usize>, columns: Range<usize>) -> () = bytes (integers)
}
by_isa! {
    fn tiled[K: Kind](product: &Product<'_>, rows: Range<usize>, columns: Range<usize>) -> () = tiles (tiled_integers)
}

/// The kernel of an integer format.
fn any_integer<K: Kind>(isa: Isa) -> Run {
    if isa == Isa::Amx {
        with_tiles::<K>
    } else {
        integer::<K>(isa)
    }
}

/// As many rows and pairs of groups as fill AMX's tiles by those, and the rest by VNNI, with the same bits.
///
/// # Safety
/// As `run`; the machine has AMX, the matrix has format `K`.
unsafe fn with_tiles<K: Kind>(product: &Product<'_>, rows: Range<usize>, columns: Range<usize>) {
    let full = rows.start + rows.len() / TILE.0 * TILE.0;
    let pairs = columns.start + columns.len().div_ceil(GROUP) / TILE.1 * TILE.1 * GROUP;
    let wide = columns.end.min(pairs);
    // SAFETY: the caller's.
    unsafe {
        let rest = integer::<K>(Isa::Amx);
        if full > rows.start && wide > columns.start {
            tiled::<K>(Isa::Amx)(product, rows.start..full, columns.start..wide);
        }
        if full > rows.start && wide < columns.end {
            rest(product, rows.start..full, wide..columns.end);
        }
        if full < rows.end {
            rest(product, full..rows.end, columns);
        }
    }
}

/// The kernel for products with a matrix of this format. The machine must have the instructions.
pub fn kernel(format: Format, isa: Isa) -> Run {
    match format {
        Format::F32 => float::<Of<{ Format::F32 as usize }>>(isa),
        Format::Bf16 => float::<Of<{ Format::Bf16 as usize }>>(isa),
        Format::F16 => float::<Of<{ Format::F16 as usize }>>(isa),
        Format::Int8 => any_integer::<Of<{ Format::Int8 as usize }>>(isa),
        Format::Q8_0 => any_integer::<Of<{ Format::Q8_0 as usize }>>(isa),
        Format::Q4_0 => any_integer::<Of<{ Format::Q4_0 as usize }>>(isa),
        Format::Q4_1 => any_integer::<Of<{ Format::Q4_1 as usize }>>(isa),
        Format::Q4K => any_integer::<Of<{ Format::Q4K as usize }>>(isa),
        Format::Q5K => any_integer::<Of<{ Format::Q5K as usize }>>(isa),
        Format::Q6K => any_integer::<Of<{ Format::Q6K as usize }>>(isa),
    }
}

/// Rows and groups of a tile that registers hold.
type Size = (usize, usize);

/// That of AMX's tiles.
const TILE: Size = (8, 2);

const fn float_size<S: Simd, K: Kind>() -> Size {
    S::FLOAT_TILE
}

const fn integer_size<S: Simd, K: Kind>() -> Size {
    S::INTEGER_TILES[K::BITS - 4]
}

/// Rows of a tile where only one group is left: not more than needed to hide latencies, as each size is compiled.
const fn lone((rows, width): Size) -> usize {
    if width == 2 && rows > 4 { 4 } else { rows }
}

/// Tiles of so many rows may have two groups. One row of floats needs their chains of additions to hide an addition's
/// latency; one row of integers does not, and one stream of weights is read fastest.
const fn may_be_wide(rows: usize, size: Size, is_integer: bool) -> bool {
    if rows == 1 {
        !is_integer
    } else {
        size.1 == 2 && rows <= size.0
    }
}

/// A kernel for tiles of M rows by J vectors.
macro_rules! tiles {
    ($name:ident, $module:ident, $size:ident, $is_integer:literal, [$($m:literal),*]) => {
        /// Compute rows by columns.
        ///
        /// # Safety
        /// As `run`; the matrix has format `K`, the machine has `S`'s instructions.
        #[inline(always)]
        unsafe fn $name<S: Simd, K: Kind>(product: &Product<'_>, rows: Range<usize>, columns: Range<usize>) {
            let has_panels = $is_integer && rows.len() >= S::PANEL_ROWS;
            if has_panels {
                // SAFETY: the caller's.
                unsafe { S::begin() };
            }
            // A closure in place of these loops' bodies would not be compiled for the instructions.
            for pass in Passes::of::<K>(product.matrix.k(), const { $size::<S, K>() }, rows, columns) {
                let panel = if const { $is_integer } && (pass.num_tiles > 1 || pass.rows.len() >= S::PANEL_ROWS) {
                    // SAFETY: as below.
                    unsafe { panel::unpack::<S, K>(product, &pass) }
                } else {
                    std::ptr::null()
                };
                for index in 0..pass.num_tiles {
                    let (tile, num_rows) = pass.tile(index, panel);
                    // SAFETY: the caller's; a pass is within rows and columns.
                    unsafe {
                        // A tile that no pass has is not compiled.
                        match (num_rows, pass.is_wide, S::PARTS) {
                            (1, true, 2) => if const { may_be_wide(1, $size::<S, K>(), $is_integer) && S::PARTS == 2 } {
                                $module::tile::<S, K, 1, 4>(product, &tile);
                            },
                            (1, true, 4) => if const { may_be_wide(1, $size::<S, K>(), $is_integer) && S::PARTS == 4 } {
                                $module::tile::<S, K, 1, 8>(product, &tile);
                            },
                            $(
                                ($m, true, 1) => if const { may_be_wide($m, $size::<S, K>(), $is_integer) && S::PARTS == 1 } {
                                    $module::tile::<S, K, $m, 2>(product, &tile);
                                },
                                ($m, false, 1) => if const { $m <= lone($size::<S, K>()) && S::PARTS == 1 } {
                                    $module::tile::<S, K, $m, 1>(product, &tile);
                                },
                                ($m, false, 2) => if const { $m <= lone($size::<S, K>()) && S::PARTS == 2 } {
                                    $module::tile::<S, K, $m, 2>(product, &tile);
                                },
                                ($m, false, 4) => if const { $m <= lone($size::<S, K>()) && S::PARTS == 4 } {
                                    $module::tile::<S, K, $m, 4>(product, &tile);
                                },
                            )*
                            _ => unreachable!("{num_rows} rows in a tile"),
                        }
                    }
                }
            }
            if has_panels {
                // SAFETY: the caller's.
                unsafe { S::end() };
            }
        }
    };
}

tiles!(integers, integer, integer_size, true, [1, 2, 3, 4, 5, 6]);
tiles!(tiled_integers, integer, integer_size, true, [8]);
tiles!(
    floats,
    float,
    float_size,
    false,
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
);

/// Rows that pass by the same weights, tile by tile.
pub struct Pass {
    rows: Range<usize>,
    pub group: usize,
    /// Two groups.
    pub is_wide: bool,
    pub columns: Range<usize>,
    num_tiles: usize,
}

impl Pass {
    /// Tile `index`, and its rows. Tiles are of nearly the same size: a last one of one row would cost as much as a full
    /// one.
    fn tile(&self, index: usize, panel: *const f32) -> (Tile, usize) {
        let at = |i: usize| self.rows.start + self.rows.len() * i / self.num_tiles;
        let tile = Tile {
            row: at(index),
            group: self.group,
            columns: self.columns.clone(),
            panel,
        };
        (tile, at(index + 1) - at(index))
    }
}

/// The passes of a part: chunks of rows that stay in cache; within one, group after group (or pair of groups); within
/// that, pieces of columns.
struct Passes {
    rows: Range<usize>,
    groups: Range<usize>,
    k: usize,
    size: Size,
    is_integer: bool,
    /// Columns of a piece: of nearly the same size, whatever the rows.
    piece: usize,
    /// Rows of a chunk.
    chunk: usize,
    /// What the next one starts with.
    row: usize,
    group: usize,
    column: usize,
}

impl Passes {
    fn of<K: Kind>(k: usize, size: Size, rows: Range<usize>, columns: Range<usize>) -> Passes {
        let (bytes, most) = if K::FORMAT.is_integer() {
            (1, INTEGER_COLUMNS)
        } else {
            (4, FLOAT_COLUMNS)
        };
        let groups = columns.start / GROUP..columns.end.div_ceil(GROUP);
        Passes {
            chunk: (ROWS_BYTES / (k * bytes))
                .next_multiple_of(size.0)
                .max(size.0),
            is_integer: K::FORMAT.is_integer(),
            // Pieces of nearly the same size.
            piece: k.div_ceil(k.div_ceil(most)).next_multiple_of(256),
            row: rows.start,
            group: groups.start,
            column: 0,
            k,
            rows,
            groups,
            size,
        }
    }
}

impl Iterator for Passes {
    type Item = Pass;

    fn next(&mut self) -> Option<Pass> {
        if self.row >= self.rows.end || self.groups.is_empty() {
            return None;
        }
        let count = self.chunk.min(self.rows.end - self.row);
        let is_wide = self.group + 2 <= self.groups.end
            && may_be_wide(count.min(self.size.0), self.size, self.is_integer);
        let most = if is_wide {
            self.size.0
        } else {
            lone(self.size)
        };
        let num_tiles = count.div_ceil(most);
        let end = self.k.min(self.column + self.piece);
        let pass = Pass {
            rows: self.row..self.row + count,
            group: self.group,
            is_wide,
            columns: self.column..end,
            num_tiles,
        };
        self.column = end;
        if end == self.k {
            self.column = 0;
            self.group += if is_wide { 2 } else { 1 };
            if self.group == self.groups.end {
                self.group = self.groups.start;
                self.row += count;
            }
        }
        Some(pass)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_cover_every_row_group_and_column_once() {
        for (num_rows, columns, k, size) in [
            (1, 0..160, 64, (6, 2)),
            (23, 32..100, 64, (6, 2)),
            (40, 0..17, 1 << 16, (6, 2)),
            (9, 16..48, 1 << 17, (4, 1)),
            (7, 0..32, 2336, (4, 1)),
            (5, 0..0, 64, (4, 1)),
            (0, 0..64, 64, (12, 2)),
        ] {
            let groups = columns.start / GROUP..columns.end.div_ceil(GROUP);
            let mut seen = vec![0; num_rows * groups.end];
            for pass in Passes::of::<Of<4>>(k, size, 0..num_rows, columns) {
                let mut row = pass.rows.start;
                for (tile, rows) in (0..pass.num_tiles).map(|i| pass.tile(i, std::ptr::null())) {
                    assert!(rows >= 1 && rows <= if pass.is_wide { size.0 } else { lone(size) });
                    assert_eq!((tile.row, tile.group), (row, pass.group));
                    assert!(tile.columns.start.is_multiple_of(256));
                    row += rows;
                }
                assert_eq!(row, pass.rows.end);
                for row in pass.rows {
                    for group in pass.group..=pass.group + usize::from(pass.is_wide) {
                        let sum = &mut seen[row * groups.end + group];
                        assert_eq!(*sum, pass.columns.start, "pieces come in order");
                        *sum = pass.columns.end;
                    }
                }
            }
            for (i, sum) in seen.into_iter().enumerate() {
                let inside = groups.contains(&(i % groups.end));
                assert_eq!(sum, if inside { k } else { 0 });
            }
        }
    }
}
