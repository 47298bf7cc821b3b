//! Float weights made into small integers when they are loaded.

use super::Matrix;
use super::format::{Format, GROUP};
use super::pack::put_row;
use crate::element::{Bf16, Element, F16, Rounded};
use crate::error::KernelError;
use crate::pool::ThreadPool;

/// Columns of a block.
const BLOCK: usize = 32;
/// Times that scale and minimum are fitted to the numbers that they gave.
const FITS: usize = 3;

impl Matrix {
    /// Pack a float weight `[n, k]` (bytes of format `source`) as `format`: `Int8`, `Q8_0`, `Q4_0` or `Q4_1`. Where a number is
    /// not finite its block (`Int8`: its row) becomes NaN.
    ///
    /// # Errors
    /// As `pack`; or `source` is no float format, or `format` none of the four.
    pub fn quantize(
        format: Format,
        source: Format,
        bytes: &[u8],
        n: usize,
        k: usize,
    ) -> Result<Matrix, KernelError> {
        Matrix::quantize_on(None, format, source, bytes, n, k)
    }

    /// The same by a pool's threads.
    ///
    /// # Errors
    /// As `quantize`.
    pub fn quantize_on(
        pool: Option<&ThreadPool>,
        format: Format,
        source: Format,
        bytes: &[u8],
        n: usize,
        k: usize,
    ) -> Result<Matrix, KernelError> {
        let encode = match format {
            _ if source.is_integer() => None,
            Format::Int8 => Some(int8 as Encode),
            Format::Q8_0 => Some(q8_0 as Encode),
            Format::Q4_0 => Some(q4_0 as Encode),
            Format::Q4_1 => Some(q4_1 as Encode),
            _ => None,
        };
        let encode = encode.ok_or(KernelError::Quantize {
            source_format: source.name(),
            format: format.name(),
        })?;
        let width = source.check_bytes(bytes, n, k)?;
        format.row_bytes(k)?;
        let mut matrix = Matrix::empty(format, n, k)?;
        matrix.fill(pool, &|group, numbers, scales| {
            let (mut values, mut row_bytes) = (vec![0.0; k], vec![]);
            let rows = bytes[group * GROUP * width..].chunks_exact(width);
            for (lane, source_bytes) in rows.take(GROUP).enumerate() {
                widen(source, source_bytes, &mut values);
                row_bytes.clear();
                if format == Format::Int8 {
                    let scale = encode(&values, &mut row_bytes);
                    scales[4 * lane..][..4].copy_from_slice(&scale.to_le_bytes());
                } else {
                    for block in values.chunks_exact(BLOCK) {
                        encode(block, &mut row_bytes);
                    }
                }
                put_row(format, numbers, scales, lane, &row_bytes);
            }
        });
        Ok(matrix)
    }
}

/// Append the bytes of a block, or of a row for `Int8`; its scale.
type Encode = fn(&[f32], &mut Vec<u8>) -> f32;

/// Read a row of floats.
fn widen(source: Format, bytes: &[u8], values: &mut [f32]) {
    let halves = bytes
        .as_chunks::<2>()
        .0
        .iter()
        .map(|b| u16::from_le_bytes(*b));
    let words = bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|b| f32::from_le_bytes(*b));
    match source {
        Format::Bf16 => values
            .iter_mut()
            .zip(halves)
            .for_each(|(v, bits)| *v = Bf16(bits).to_f32()),
        Format::F16 => values
            .iter_mut()
            .zip(halves)
            .for_each(|(v, bits)| *v = F16(bits).to_f32()),
        _ => values.iter_mut().zip(words).for_each(|(v, word)| *v = word),
    }
}

/// The number of greatest magnitude, with its sign; NaN if one is not finite.
fn extreme(values: &[f32]) -> f32 {
    if !values.iter().all(|v| v.is_finite()) {
        return f32::NAN;
    }
    let larger = |most: f32, &v: &f32| if v.abs() > most.abs() { v } else { most };
    values.iter().fold(0.0, larger)
}

/// 1 / scale, or 0 where everything is zero.
fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// As f16 stores it, and its bytes.
fn half(value: f32) -> (f32, [u8; 2]) {
    let stored = F16::from_f32(value);
    (stored.to_f32(), stored.0.to_le_bytes())
}

/// Append numbers as int8.
fn bytes(values: &[f32], scale: f32, out: &mut Vec<u8>) {
    let factor = inverse(scale);
    let round = |v: &f32| (v * factor).round_ties_even().clamp(-127.0, 127.0) as i8;
    out.extend(values.iter().map(|v| round(v).cast_unsigned()));
}

/// Append numbers below 16: 0 to 15 in low nibbles, 16 to 31 in high ones.
fn nibbles(out: &mut Vec<u8>, code: impl Fn(usize) -> f32) {
    let code = |i| code(i).round_ties_even().clamp(0.0, 15.0) as u8;
    out.extend((0..BLOCK / 2).map(|i| code(i) | code(i + BLOCK / 2) << 4));
}

fn int8(values: &[f32], out: &mut Vec<u8>) -> f32 {
    let scale = extreme(values).abs() / 127.0;
    bytes(values, scale, out);
    scale
}

fn q8_0(values: &[f32], out: &mut Vec<u8>) -> f32 {
    let (scale, stored) = half(extreme(values).abs() / 127.0);
    out.extend(stored);
    bytes(values, scale, out);
    scale
}

/// The number of greatest magnitude becomes -8: the side with one step more.
fn q4_0(values: &[f32], out: &mut Vec<u8>) -> f32 {
    let (scale, stored) = half(extreme(values) / -8.0);
    let factor = inverse(scale);
    out.extend(stored);
    nibbles(out, |i| values[i] * factor + 8.0);
    scale
}

/// From least to greatest in 15 steps; then scale and minimum are fitted to the numbers by least squares, and the fit of
/// least error is kept.
fn q4_1(values: &[f32], out: &mut Vec<u8>) -> f32 {
    let finite = extreme(values).is_finite();
    let least = values.iter().copied().fold(f32::INFINITY, f32::min);
    let most = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let (mut scale, mut minimum) = ((most - least) / 15.0, least);
    let mut best = (f32::INFINITY, half(f32::NAN), half(f32::NAN));
    for _ in 0..if finite { FITS } else { 0 } {
        let (step, low) = (half(scale), half(minimum));
        let factor = inverse(step.0);
        let code = |v: f32| ((v - low.0) * factor).round_ties_even().clamp(0.0, 15.0);
        let error = values
            .iter()
            .map(|&v| (code(v) * step.0 + low.0 - v).powi(2))
            .sum();
        if error < best.0 {
            best = (error, step, low);
        }
        let count = values.len() as f32;
        let mean_code = values.iter().map(|&v| code(v)).sum::<f32>() / count;
        let mean = values.iter().sum::<f32>() / count;
        let off = |v: f32| code(v) - mean_code;
        let spread: f32 = values.iter().map(|&v| off(v).powi(2)).sum();
        if spread == 0.0 {
            break;
        }
        scale = values.iter().map(|&v| off(v) * v).sum::<f32>() / spread;
        minimum = mean - scale * mean_code;
    }
    let (_, step, low) = best;
    out.extend(step.1);
    out.extend(low.1);
    let factor = inverse(step.0);
    nibbles(out, |i| (values[i] - low.0) * factor);
    step.0
}
