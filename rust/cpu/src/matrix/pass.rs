//! In which order a thread's part of a product passes by the weights: chunks of rows, groups, pieces of columns, tiles.

use std::ops::Range;

use super::ahead::Ahead;
use super::format::GROUP;
use super::kind::Kind;
use super::product::Tile;

/// Bytes of the input's rows that stay in the second-level cache while all weights pass by.
const ROWS_BYTES: usize = 384 << 10;
/// Columns of which a group's unpacked integers stay in the first-level cache while rows pass by.
const INTEGER_COLUMNS: usize = 2048;
/// Floats may come from the second-level cache, whose speed suffices: longer pieces add to the output less often.
pub const FLOAT_COLUMNS: usize = 1024;
/// Pieces are whole blocks of every integer format, or as many floats.
const UNIT: (usize, usize) = (256, 32);

/// Rows and groups of a tile that registers hold.
pub type Size = (usize, usize);

/// Rows of a tile where only one group is left: not more than needed to hide latencies, as each size is compiled.
pub const fn lone((rows, width): Size) -> usize {
    if width == 2 && rows > 4 { 4 } else { rows }
}

/// Tiles of so many rows may have two groups. One row of floats needs their chains of additions to hide an addition's
/// latency; one row of integers does not, and one stream of weights is read fastest.
pub const fn may_be_wide(rows: usize, size: Size, is_integer: bool) -> bool {
    if rows == 1 {
        !is_integer
    } else {
        size.1 == 2 && rows <= size.0
    }
}

/// Rows that pass by the same weights, tile by tile.
pub struct Pass {
    pub rows: Range<usize>,
    pub group: usize,
    /// Two groups.
    pub is_wide: bool,
    pub columns: Range<usize>,
    pub num_tiles: usize,
}

impl Pass {
    /// Tile `index`, and its rows. Tiles are of nearly the same size: a last one of one row would cost as much as a full
    /// one.
    pub fn tile(&self, index: usize, panel: *const f32, ahead: Ahead) -> (Tile, usize) {
        let at = |i: usize| self.rows.start + self.rows.len() * i / self.num_tiles;
        let tile = Tile {
            row: at(index),
            group: self.group,
            columns: self.columns.clone(),
            panel,
            ahead,
        };
        (tile, at(index + 1) - at(index))
    }
}

/// The passes of a part: chunks of rows that stay in cache; within one, group after group (or pair of groups); within
/// that, pieces of columns.
pub struct Passes {
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
    pub fn of<K: Kind>(k: usize, size: Size, rows: Range<usize>, columns: Range<usize>) -> Passes {
        let (bytes, most, unit) = if K::FORMAT.is_integer() {
            (1, INTEGER_COLUMNS, UNIT.0)
        } else {
            (4, FLOAT_COLUMNS, UNIT.1)
        };
        let groups = columns.start / GROUP..columns.end.div_ceil(GROUP);
        Passes {
            chunk: (ROWS_BYTES / (k * bytes))
                .next_multiple_of(size.0)
                .max(size.0),
            is_integer: K::FORMAT.is_integer(),
            // Pieces of nearly the same size.
            piece: k.div_ceil(k.div_ceil(most)).next_multiple_of(unit),
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
    use super::super::kind::Of;
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
                for (tile, rows) in
                    (0..pass.num_tiles).map(|i| pass.tile(i, std::ptr::null(), Ahead::NONE))
                {
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
