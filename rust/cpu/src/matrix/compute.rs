//! One thread's part of a product.

use std::ops::Range;

use super::format::GROUP;
use super::{Input, Matrix, Output};
use crate::formats::{planes, scales};

/// Rows of the input that a tile handles at once, at most.
pub const ROWS: usize = 8;

/// # Safety
/// Sizes fit the matrix (`Matrix::check`); rows and columns are this thread's.
pub unsafe fn run(
    matrix: &Matrix,
    input: &Input<'_>,
    output: &Output<'_>,
    rows: Range<usize>,
    columns: Range<usize>,
) {
    let mut weights = vec![0.0; matrix.k];
    for column in columns {
        matrix.unpack(column, &mut weights);
        for row in rows.clone() {
            let mut value = if matrix.format.is_integer() {
                // SAFETY: the caller's.
                unsafe { dot(matrix, input, row, column) }
            } else {
                let x = &input.x[row * matrix.k..][..matrix.k];
                x.iter().zip(&weights).map(|(x, w)| x * w).sum()
            };
            if let Some(bias) = output.bias {
                value += bias[column];
            }
            // SAFETY: in bounds by `check`, and this thread's.
            unsafe {
                let place = output
                    .to
                    .address(row * output.stride + output.column + column);
                if output.add {
                    value += *place;
                }
                place.write(value);
            }
        }
    }
}

/// # Safety
/// As `run`.
unsafe fn dot(matrix: &Matrix, input: &Input<'_>, row: usize, column: usize) -> f32 {
    let Some(x) = input.quantized else {
        return f32::NAN;
    };
    let (group, lane) = (column / GROUP, column % GROUP);
    let bits = planes::bits(matrix.format);
    let zero = scales::zero(matrix.format);
    let mut sum = 0.0;
    // SAFETY: group < number of groups; block < blocks of the row.
    unsafe {
        let numbers = std::slice::from_raw_parts(matrix.numbers(group), matrix.stride);
        let plane = std::slice::from_raw_parts(matrix.scales(group), matrix.scale_stride);
        for (block, packed) in numbers.chunks_exact(planes::block_bytes(bits)).enumerate() {
            let codes = planes::get(bits, packed, lane);
            for half in 0..2 {
                let mut total = 0;
                for i in 16 * half..16 * half + 16 {
                    let code = if bits == 8 {
                        i32::from(codes[i].cast_signed())
                    } else {
                        i32::from(codes[i])
                    };
                    total += (code - zero) * i32::from(*x.quants(row).add(32 * block + i));
                }
                let (scale, minimum) = scales::get(matrix.format, plane, lane, block, half);
                let factor = *x.scales(row).add(block);
                sum += scale * factor * total as f32;
                sum += minimum * factor * *x.sums(row).add(2 * block + half) as f32;
            }
        }
    }
    sum
}
