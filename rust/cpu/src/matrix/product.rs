//! A checked product and a tile of it, as the kernels of every format see them.

use std::ops::Range;

use super::format::GROUP;
use super::{Matrix, Output};
use crate::activations::Activations;
use crate::simd::Simd;

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
