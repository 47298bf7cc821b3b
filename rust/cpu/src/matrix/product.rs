//! A checked product and a tile of it, as the kernels of every format see them.

use std::ops::Range;

use super::ahead::{Ahead, Coming};
use super::format::GROUP;
use super::{Matrix, Output};
use crate::activations::Activations;
use crate::simd::{Simd, prefetch};

/// A checked product, as kernels see it.
pub struct Product<'a> {
    pub matrix: &'a Matrix,
    /// f32 `[rows, k]`; only for float formats.
    pub x: *const f32,
    pub quantized: &'a Activations,
    pub output: &'a Output<'a>,
    /// What this thread multiplies with behind it, as far as that is known.
    pub next: Option<Coming>,
}

/// Where a tile starts, and the columns of the input that it adds up: those from 0 on overwrite the output (unless it is
/// to be added to), later ones are added.
pub struct Tile {
    pub row: usize,
    pub group: usize,
    pub columns: Range<usize>,
    /// The weights unpacked (panel.rs), or null.
    pub panel: *const f32,
    /// Float weights to be asked for.
    pub ahead: Ahead,
}

impl Product<'_> {
    /// Ask for the places of the results of a tile of M rows and J vectors: rows lie far apart, often in the same sets of the
    /// caches.
    #[inline(always)]
    pub fn expect<S: Simd, const M: usize, const J: usize>(&self, tile: &Tile) {
        let output = self.output;
        let first = output.to.address(0).wrapping_add(self.place(tile, 0));
        for m in 0..M {
            prefetch(first.wrapping_add(m * output.stride), J * S::LANES);
        }
    }

    /// Of the first result of row `m` of a tile.
    fn place(&self, tile: &Tile, m: usize) -> usize {
        (tile.row + m) * self.output.stride + self.output.column + tile.group * GROUP
    }

    /// Take the results of a tile of M rows and J vectors.
    ///
    /// # Safety
    /// They are this thread's; the machine has `S`'s instructions.
    #[inline(always)]
    pub unsafe fn finish_all<S: Simd, const M: usize, const J: usize>(
        &self,
        tile: &Tile,
        mut sums: [[S::V; J]; M],
    ) {
        let (output, first) = (self.output, tile.group * GROUP);
        let is_first = tile.columns.start == 0;
        // SAFETY: the caller's; the output holds every row's n results (`Matrix::check`), the bias n.
        unsafe {
            if first + J * S::LANES > self.matrix.n() {
                for m in 0..M {
                    for j in 0..J {
                        self.finish::<S>(tile, m, first + j * S::LANES, sums[m][j]);
                    }
                }
                return;
            }
            if let Some(bias) = output.bias.filter(|_| is_first) {
                for j in 0..J {
                    let bias = S::load(bias.as_ptr().add(first + j * S::LANES));
                    for m in 0..M {
                        sums[m][j] = S::add(sums[m][j], bias);
                    }
                }
            }
            let target = output.to.address(self.place(tile, 0));
            for m in 0..M {
                for j in 0..J {
                    let target = target.add(m * output.stride + j * S::LANES);
                    if output.add || !is_first {
                        sums[m][j] = S::add(sums[m][j], S::load(target));
                    }
                    S::store(target, sums[m][j]);
                }
            }
        }
    }

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
