//! From source bytes to the packed form, and one row back.

use super::format::{Format, GROUP};
use super::interleave::interleave;
use super::{Matrix, kernels};
use crate::chunks::Piece;
use crate::element::{Bf16, Element, F16};
use crate::error::KernelError;
use crate::formats::{gguf, planes, scales};
use crate::isa::Isa;
use crate::pool::{Team, ThreadPool};
use crate::shared::Shared;

/// Bytes of a matrix from which on threads share its packing: less takes about as long as waking and waiting for them.
const SHARED_BYTES: usize = 1 << 20;

/// Packs a group: its index, and the places of its numbers and scales.
type PackGroup<'a> = &'a (dyn Fn(usize, &mut [u8], &mut [u8]) + Sync);

impl Matrix {
    /// Pack a weight `[n, k]` from its bytes as a GGUF or safetensors file holds them (row-major, little-endian). They may
    /// lie anywhere. For `Int8` all scales are 1: see `pack_channels`.
    ///
    /// # Errors
    /// A size is zero or too large, `k` is not a multiple of the format's block, or there are not as many bytes as that.
    pub fn pack(format: Format, bytes: &[u8], n: usize, k: usize) -> Result<Matrix, KernelError> {
        Matrix::pack_on(None, format, bytes, n, k)
    }

    /// The same by a pool's threads.
    ///
    /// # Errors
    /// As `pack`.
    pub fn pack_on(
        pool: Option<&ThreadPool>,
        format: Format,
        bytes: &[u8],
        n: usize,
        k: usize,
    ) -> Result<Matrix, KernelError> {
        let row_bytes = format.check_bytes(bytes, n, k)?;
        let mut matrix = Matrix::empty(format, n, k)?;
        let interleave = (!format.is_integer()).then(|| interleave(format, Isa::best()));
        matrix.fill(pool, &|group, numbers, scales| {
            let first = group * GROUP;
            let rows = &bytes[first * row_bytes..(first + GROUP).min(n) * row_bytes];
            if let Some(interleave) = interleave.filter(|_| first + GROUP <= n) {
                // SAFETY: 16 rows of k numbers, and a group's place; the machine has the instructions.
                return unsafe { interleave(rows.as_ptr(), k, numbers.as_mut_ptr()) };
            }
            for (lane, source) in rows.chunks_exact(row_bytes).enumerate() {
                put_row(format, numbers, scales, lane, source);
            }
        });
        if format == Format::Int8 {
            matrix.put_channel_scales(&vec![1.0; n]);
        }
        Ok(matrix)
    }

    /// Pack int8 `[n, k]` with a scale for each row.
    ///
    /// # Errors
    /// As `pack`, or there are not n scales.
    pub fn pack_channels(
        bytes: &[u8],
        scale: &[f32],
        n: usize,
        k: usize,
    ) -> Result<Matrix, KernelError> {
        if scale.len() != n {
            return Err(KernelError::Length {
                name: "scales",
                given: scale.len() * 4,
                wanted: n * 4,
            });
        }
        let mut matrix = Matrix::pack(Format::Int8, bytes, n, k)?;
        matrix.put_channel_scales(scale);
        Ok(matrix)
    }

    pub(super) fn put_channel_scales(&mut self, scale: &[f32]) {
        let places = self.scales.as_mut().chunks_exact_mut(4);
        for (place, scale) in places.zip(scale) {
            place.copy_from_slice(&scale.to_le_bytes());
        }
    }

    /// A matrix of zeros.
    pub(super) fn empty(format: Format, n: usize, k: usize) -> Result<Matrix, KernelError> {
        let fits = n
            .checked_next_multiple_of(GROUP)
            .and_then(|n| n.checked_mul(k)?.checked_mul(8));
        if fits.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
            return Err(KernelError::Overflow("n * k"));
        }
        let (stride, scale_stride) = format.group_bytes(k);
        let groups = n.div_ceil(GROUP);
        Ok(Matrix {
            format,
            n,
            k,
            run: kernels::kernel(format, Isa::best()),
            stride,
            numbers: Piece::zeroed(groups * stride),
            scale_stride,
            scales: Piece::zeroed(groups * scale_stride),
        })
    }

    /// Pack every group, by a pool's threads.
    pub(super) fn fill(&mut self, pool: Option<&ThreadPool>, pack: PackGroup<'_>) {
        let (num_groups, stride, scale_stride) =
            (self.n.div_ceil(GROUP), self.stride, self.scale_stride);
        let numbers = Shared::new(self.numbers.as_mut());
        let scales = Shared::new(self.scales.as_mut());
        let part = |team: &Team<'_>| {
            for group in team.share(num_groups, 1) {
                // SAFETY: each group is one thread's.
                let (numbers, scales) = unsafe {
                    (
                        numbers.part_mut(group * stride..(group + 1) * stride),
                        scales.part_mut(group * scale_stride..(group + 1) * scale_stride),
                    )
                };
                pack(group, numbers, scales);
            }
        };
        match pool.filter(|_| num_groups * stride >= SHARED_BYTES) {
            Some(pool) => pool.run(&part),
            None => part(&Team::solo()),
        }
    }

    /// Row `index` as f32.
    pub(super) fn unpack(&self, index: usize, out: &mut [f32]) {
        let (group, lane) = (index / GROUP, index % GROUP);
        // SAFETY: nothing writes to a packed matrix, and group < number of groups.
        let (numbers, plane) = unsafe {
            (
                std::slice::from_raw_parts(self.numbers(group), self.stride),
                std::slice::from_raw_parts(self.scales(group), self.scale_stride),
            )
        };
        match self.format {
            Format::F32 => get_floats::<4>(numbers, lane, out, f32::from_le_bytes),
            Format::Bf16 => {
                get_floats::<2>(numbers, lane, out, |b| Bf16(u16::from_le_bytes(b)).to_f32());
            }
            Format::F16 => {
                get_floats::<2>(numbers, lane, out, |b| F16(u16::from_le_bytes(b)).to_f32());
            }
            format => {
                let bits = planes::bits(format);
                let blocks = numbers.chunks_exact(planes::block_bytes(bits));
                for (index, (out, block)) in out.chunks_mut(32).zip(blocks).enumerate() {
                    let codes = planes::get(bits, block, lane);
                    for (column, out) in out.iter_mut().enumerate() {
                        let (scale, minimum) = scales::get(format, plane, lane, index, column / 16);
                        *out = scale * number(bits, codes[column], scales::zero(format)) + minimum;
                    }
                }
            }
        }
    }
}

/// Store a row as row `lane` of a group.
pub(super) fn put_row(
    format: Format,
    numbers: &mut [u8],
    scales: &mut [u8],
    lane: usize,
    source: &[u8],
) {
    match format {
        Format::F32 => put_floats::<4>(numbers, lane, source),
        Format::Bf16 | Format::F16 => put_floats::<2>(numbers, lane, source),
        _ => put_integers(format, numbers, scales, lane, source),
    }
}

/// Store a row of blocks.
fn put_integers(format: Format, numbers: &mut [u8], plane: &mut [u8], lane: usize, source: &[u8]) {
    let (columns, bytes) = match format {
        Format::Int8 => (32, 32),
        _ => format.block(),
    };
    let bits = planes::bits(format);
    let mut codes = [0; 256];
    let mut targets = numbers.chunks_exact_mut(planes::block_bytes(bits));
    for (index, block) in source.chunks(bytes).enumerate() {
        gguf::codes(format, block, &mut codes);
        scales::put(format, plane, lane, index, block);
        // A row of int8 may end within a block.
        let count = if format == Format::Int8 {
            block.len()
        } else {
            columns
        };
        for (codes, target) in codes[..count].chunks(32).zip(&mut targets) {
            planes::put(bits, target, lane, codes);
        }
    }
}

/// The number that stored bits stand for.
fn number(bits: usize, code: u8, zero: i32) -> f32 {
    let code = if bits == 8 {
        i32::from(code.cast_signed())
    } else {
        i32::from(code)
    };
    (code - zero) as f32
}

fn put_floats<const BYTES: usize>(group: &mut [u8], lane: usize, source: &[u8]) {
    let places = group.chunks_exact_mut(BYTES).skip(lane).step_by(GROUP);
    for (place, value) in places.zip(source.chunks_exact(BYTES)) {
        place.copy_from_slice(value);
    }
}

fn get_floats<const BYTES: usize>(
    group: &[u8],
    lane: usize,
    out: &mut [f32],
    widen: impl Fn([u8; BYTES]) -> f32,
) {
    let values = group
        .as_chunks::<BYTES>()
        .0
        .iter()
        .skip(lane)
        .step_by(GROUP);
    for (out, value) in out.iter_mut().zip(values) {
        *out = widen(*value);
    }
}
