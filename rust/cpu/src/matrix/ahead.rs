//! Float weights that are asked for while others are multiplied, so that they come from memory meanwhile: spread evenly over
//! the tiles of a pass. Not here: what one row of integers asks for (packed.rs).

use super::Matrix;
use super::format::GROUP;
use super::kind::Kind;
use super::pass::{FLOAT_COLUMNS, Pass};
use crate::simd::{Simd, prefetch};

/// Columns of a tile between two looks ahead.
pub const STEP: usize = 8;
const LINE: usize = 64;
/// Bytes that a lone tile looks ahead in each of its groups: what a core reads during an access to memory.
pub const NEAR: usize = 4096;

/// Weights that are multiplied next: where they start in two groups, and how many bytes of each.
#[derive(Clone, Copy)]
pub struct Coming {
    at: [*const u8; 2],
    num_bytes: usize,
}

impl Coming {
    /// Those of a pass.
    #[inline(always)]
    pub fn pass<K: Kind>(matrix: &Matrix, pass: &Pass) -> Coming {
        let column = const { GROUP * K::FORMAT.block().1 };
        let groups = [pass.group, pass.group + usize::from(pass.is_wide)];
        Coming {
            at: groups.map(|group| {
                matrix
                    .numbers(group)
                    .wrapping_add(pass.columns.start * column)
            }),
            num_bytes: pass.columns.len() * column,
        }
    }

    /// The first of a matrix from group `group` on.
    pub fn first(matrix: &Matrix, group: usize) -> Coming {
        let last = matrix.n().div_ceil(GROUP) - 1;
        Coming {
            at: [group, last.min(group + 1)].map(|group| matrix.numbers(group)),
            num_bytes: matrix.stride.min(FLOAT_COLUMNS * GROUP * size_of::<f32>()),
        }
    }
}

/// Where a tile's looks ahead are, in each of its groups.
#[derive(Clone, Copy)]
pub struct Ahead {
    at: [*const u8; 2],
    /// Steps until they go on at `then`.
    steps: usize,
    then: [*const u8; 2],
    /// Lines of each group that a step asks for.
    lines: usize,
}

impl Ahead {
    /// Nothing.
    pub const NONE: Ahead = Ahead {
        at: [std::ptr::null(); 2],
        steps: 0,
        then: [std::ptr::null(); 2],
        lines: 0,
    };

    /// What tile `index` of `pass` asks for: its part of what comes next; if it is the only tile, what it needs itself soon,
    /// and the first of what comes next.
    #[inline(always)]
    pub fn new<K: Kind>(
        matrix: &Matrix,
        pass: &Pass,
        coming: Option<Coming>,
        index: usize,
    ) -> Ahead {
        let step = const { STEP * GROUP * K::FORMAT.block().1 };
        if pass.num_tiles == 1 {
            let own = Coming::pass::<K>(matrix, pass);
            let near = NEAR.min(own.num_bytes);
            return Ahead {
                at: own.at.map(|at| at.wrapping_add(near)),
                steps: (own.num_bytes - near) / step,
                then: coming.unwrap_or(own).at,
                lines: step / LINE,
            };
        }
        let Some(coming) = coming else {
            return Ahead::NONE;
        };
        let part = coming.num_bytes.div_ceil(pass.num_tiles);
        let part = part.next_multiple_of(LINE);
        let steps = pass.columns.len().div_ceil(STEP);
        let at = coming.at.map(|at| at.wrapping_add(index * part));
        Ahead {
            at,
            steps,
            then: at,
            lines: (part / LINE).div_ceil(steps),
        }
    }

    /// A step's part, of the groups of J vectors.
    #[inline(always)]
    pub fn ask<const J: usize, S: Simd>(&mut self) {
        if self.steps == 0 {
            self.at = self.then;
        }
        self.steps = self.steps.wrapping_sub(1);
        for _ in 0..self.lines {
            for at in &mut self.at[..const { J / S::PARTS }] {
                prefetch(*at, LINE);
                *at = at.wrapping_add(LINE);
            }
        }
    }
}
