//! The storage formats of weights: names, sizes of their source bytes, and sizes of the packed form.
//!
//! Packed, 16 rows (a group) lie interleaved so that a vector holds the same columns of 16 rows: floats as
//! `[k][16 rows]`, integers in blocks of 32 columns as 8 steps of `[16 rows][4 columns]`, with the bits beyond four and the
//! scales in planes of their own (formats/planes.rs).

use std::str::FromStr;

use crate::error::KernelError;

pub use crate::simd::GROUP;

/// How weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    F32,
    Bf16,
    F16,
    /// int8 with one f32 scale a row.
    Int8,
    /// GGUF: 32 int8, one f16 scale.
    Q8_0,
    /// GGUF: 32 4-bit numbers less 8, one f16 scale.
    Q4_0,
    /// GGUF: 32 4-bit numbers, f16 scale and minimum.
    Q4_1,
    /// GGUF: 256 4-bit numbers in 8 blocks with 6-bit scales and minima.
    Q4K,
    /// GGUF: as `Q4K` with 5 bits.
    Q5K,
    /// GGUF: 256 6-bit numbers less 32 in 16 blocks with int8 scales.
    Q6K,
}

impl Format {
    pub const ALL: [Format; 10] = [
        Format::F32,
        Format::Bf16,
        Format::F16,
        Format::Int8,
        Format::Q8_0,
        Format::Q4_0,
        Format::Q4_1,
        Format::Q4K,
        Format::Q5K,
        Format::Q6K,
    ];

    /// As in GGUF, or the dtype's.
    pub fn name(self) -> &'static str {
        match self {
            Format::F32 => "F32",
            Format::Bf16 => "BF16",
            Format::F16 => "F16",
            Format::Int8 => "INT8",
            Format::Q8_0 => "Q8_0",
            Format::Q4_0 => "Q4_0",
            Format::Q4_1 => "Q4_1",
            Format::Q4K => "Q4_K",
            Format::Q5K => "Q5_K",
            Format::Q6K => "Q6_K",
        }
    }

    /// Columns and bytes of a block of the source.
    pub const fn block(self) -> (usize, usize) {
        match self {
            Format::F32 => (1, 4),
            Format::Bf16 | Format::F16 => (1, 2),
            Format::Int8 => (1, 1),
            Format::Q8_0 => (32, 34),
            Format::Q4_0 => (32, 18),
            Format::Q4_1 => (32, 20),
            Format::Q4K => (256, 144),
            Format::Q5K => (256, 176),
            Format::Q6K => (256, 210),
        }
    }

    /// Products need the input as `Activations` too.
    pub const fn is_integer(self) -> bool {
        !matches!(self, Format::F32 | Format::Bf16 | Format::F16)
    }

    /// Source bytes of `k` columns.
    ///
    /// # Errors
    /// `k` is not a multiple of the block.
    pub fn row_bytes(self, k: usize) -> Result<usize, KernelError> {
        let (columns, bytes) = self.block();
        if !k.is_multiple_of(columns) {
            return Err(KernelError::Columns {
                format: self.name(),
                k,
                block: columns,
            });
        }
        (k / columns)
            .checked_mul(bytes)
            .ok_or(KernelError::Overflow("k"))
    }

    /// A weight `[n, k]` of this format is as long as `bytes`; the bytes of a row.
    pub(crate) fn check_bytes(
        self,
        bytes: &[u8],
        n: usize,
        k: usize,
    ) -> Result<usize, KernelError> {
        for (name, size) in [("n", n), ("k", k)] {
            if size == 0 {
                return Err(KernelError::Zero(name));
            }
        }
        let row_bytes = self.row_bytes(k)?;
        let wanted = n
            .checked_mul(row_bytes)
            .ok_or(KernelError::Overflow("n * k"))?;
        if bytes.len() == wanted {
            return Ok(row_bytes);
        }
        Err(KernelError::Length {
            name: "weight",
            given: bytes.len(),
            wanted,
        })
    }

    /// Packed bytes of a group's numbers and of its scales.
    pub(crate) fn group_bytes(self, k: usize) -> (usize, usize) {
        let blocks = k.div_ceil(32);
        match self {
            Format::F32 => (k * GROUP * 4, 0),
            Format::Bf16 | Format::F16 => (k * GROUP * 2, 0),
            Format::Int8 => (blocks * 512, GROUP * 4),
            Format::Q8_0 => (blocks * 512, blocks * 32),
            Format::Q4_0 => (blocks * 256, blocks * 32),
            Format::Q4_1 => (blocks * 256, blocks * 64),
            Format::Q4K => (blocks * 256, k / 256 * 320),
            Format::Q5K => (blocks * 320, k / 256 * 320),
            Format::Q6K => (blocks * 384, k / 256 * 288),
        }
    }
}

impl FromStr for Format {
    type Err = KernelError;

    fn from_str(name: &str) -> Result<Self, KernelError> {
        Format::ALL
            .into_iter()
            .find(|format| format.name() == name)
            .ok_or_else(|| KernelError::Format(name.to_owned()))
    }
}
