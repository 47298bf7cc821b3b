//! A weight matrix in a storage format, packed for the kernels, and its product with rows of activations:
//! out[i, j] = sum over c of x[i, c] * weight[j, c].
//!
//! Integer formats multiply int8 activations (activations.rs) exactly in integers and add the blocks up in f32; float
//! formats are widened and everything is f32.

mod ahead;
mod float;
pub mod format;
mod integer;
mod interleave;
mod kernels;
mod kind;
mod pack;
mod packed;
mod panel;
mod pass;
mod product;
mod quantize;

use std::ops::Range;

use ahead::Coming;

use crate::activations::{Activations, BLOCK};
use crate::chunks::Piece;
use crate::isa::Isa;
use crate::pool::{Team, ThreadPool, share};
use crate::shared::Shared;
use format::{Format, GROUP};

/// Rows of the matrix that a thread's part is a multiple of: whole groups, and whole blocks of the next product's input.
pub const UNIT: usize = BLOCK;

/// A weight `[n, k]`.
pub struct Matrix {
    format: Format,
    n: usize,
    k: usize,
    run: kernels::Run,
    /// Packed numbers of a group, bytes.
    stride: usize,
    numbers: Piece,
    /// Packed scales of a group, bytes.
    scale_stride: usize,
    scales: Piece,
}

/// The left side of a product: rows of activations `[rows, k]`.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    /// Dense. Float formats read it; for integer formats it may be empty.
    pub x: &'a [f32],
    pub rows: usize,
    /// The same numbers quantized. Integer formats need it.
    pub quantized: Option<&'a Activations>,
}

/// Where a product goes, and what is done to it on the way.
#[derive(Clone, Copy)]
pub struct Output<'a> {
    /// Result (i, j) is written at i * stride + column + j.
    pub to: Shared<'a, f32>,
    pub stride: usize,
    pub column: usize,
    /// `[n]`, added.
    pub bias: Option<&'a [f32]>,
    /// Add to what is there (a residual stream) in place of overwriting it.
    pub add: bool,
}

impl<'a> Output<'a> {
    /// A dense `[rows, n]` result, overwritten.
    pub fn dense(to: Shared<'a, f32>, n: usize) -> Output<'a> {
        Output {
            to,
            stride: n,
            column: 0,
            bias: None,
            add: false,
        }
    }
}

impl Matrix {
    pub fn format(&self) -> Format {
        self.format
    }

    /// Rows: outputs.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Columns: inputs.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Memory that it takes.
    pub fn num_bytes(&self) -> usize {
        self.numbers.num_bytes() + self.scales.num_bytes()
    }

    /// The same with chosen instructions, which the machine must have (others fall back to the best).
    #[must_use]
    pub fn with_isa(mut self, isa: Isa) -> Matrix {
        self.run = kernels::kernel(self.format, isa.or_best());
        self
    }

    /// Rows of the input and outputs (columns of the result) that a thread of the team computes.
    pub fn part(&self, team: &Team<'_>, num_rows: usize) -> (Range<usize>, Range<usize>) {
        let units = self.n.div_ceil(UNIT);
        let (index, threads) = (team.index(), team.num_threads());
        // With few units for many threads, threads also share out the input's rows.
        let across = if units >= 4 * threads || num_rows < 2 * kernels::ROWS {
            1
        } else {
            (2..=threads)
                .rev()
                .find(|&a| threads.is_multiple_of(a) && num_rows >= a * kernels::ROWS)
                .unwrap_or(1)
        };
        let rows = share(num_rows, kernels::ROWS, index % across, across);
        (rows, share(self.n, UNIT, index / across, threads / across))
    }

    /// This thread's part (`part`) of the product. No barrier: the caller places them.
    ///
    /// # Safety
    /// No other thread touches this thread's part of the output, nor writes to the input, during the call.
    ///
    /// # Panics
    /// Sizes of input or output do not fit the matrix.
    pub unsafe fn multiply(&self, team: &Team<'_>, input: &Input<'_>, output: &Output<'_>) {
        // SAFETY: the caller's.
        unsafe { self.multiply_before(team, input, output, None) };
    }

    /// The same where the thread multiplies as many rows with `next` soon, so that its first weights are asked for meanwhile.
    ///
    /// # Safety
    /// As `multiply`.
    ///
    /// # Panics
    /// As `multiply`.
    pub unsafe fn multiply_before(
        &self,
        team: &Team<'_>,
        input: &Input<'_>,
        output: &Output<'_>,
        next: Option<&Matrix>,
    ) {
        self.check(input, output);
        let (rows, columns) = self.part(team, input.rows);
        if rows.is_empty() || columns.is_empty() {
            return;
        }
        let first = |next: &Matrix| {
            let (_, columns) = next.part(team, input.rows);
            (!columns.is_empty()).then(|| Coming::first(next, columns.start / GROUP))
        };
        // SAFETY: sizes are checked; the caller's promise.
        unsafe { kernels::run(self, input, output, next.and_then(first), rows, columns) };
    }

    /// The product of `x` `[rows, k]` on all threads of a pool, into `out` `[rows, n]`: for tests and lone products.
    ///
    /// # Panics
    /// Sizes do not fit.
    pub fn multiply_on(&self, pool: &ThreadPool, x: &[f32], rows: usize, out: &mut [f32]) {
        let mut quantized = None;
        if self.format.is_integer() {
            quantized.insert(Activations::new(rows, self.k)).fill(x);
        }
        let input = Input {
            x,
            rows,
            quantized: quantized.as_ref(),
        };
        let output = Output::dense(Shared::new(out), self.n);
        // SAFETY: threads write distinct parts of `out`, which is borrowed mutably.
        pool.run(&|team| unsafe { self.multiply(team, &input, &output) });
    }

    fn check(&self, input: &Input<'_>, output: &Output<'_>) {
        if self.format.is_integer() {
            let Some(quantized) = input.quantized else {
                panic!("{} needs quantized activations", self.format.name())
            };
            assert_eq!(quantized.width(), self.k, "width of the activations");
            assert!(
                quantized.num_rows() >= input.rows,
                "rows of the activations"
            );
        } else {
            assert_eq!(input.x.len(), input.rows * self.k, "length of x");
        }
        let end = (input.rows.max(1) - 1) * output.stride + output.column + self.n;
        assert!(
            output.column + self.n <= output.stride && (input.rows == 0 || end <= output.to.len()),
            "the output does not hold {} x {}",
            input.rows,
            self.n
        );
        assert!(
            output.bias.is_none_or(|bias| bias.len() == self.n),
            "length of the bias"
        );
    }

    /// Row `index` as f32: an embedding lookup.
    ///
    /// # Panics
    /// There is no such row, or `out` has not k places.
    pub fn row(&self, index: usize, out: &mut [f32]) {
        assert!(index < self.n && out.len() == self.k, "row {index}");
        self.unpack(index, out);
    }

    /// Packed numbers of a group.
    fn numbers(&self, group: usize) -> *const u8 {
        debug_assert!(group < self.n.div_ceil(GROUP));
        // SAFETY: group < number of groups.
        unsafe { self.numbers.start::<u8>().add(group * self.stride) }
    }

    /// Packed scales of a group.
    fn scales(&self, group: usize) -> *const u8 {
        debug_assert!(group < self.n.div_ceil(GROUP));
        // SAFETY: group < number of groups.
        unsafe { self.scales.start::<u8>().add(group * self.scale_stride) }
    }
}
