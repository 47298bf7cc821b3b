//! Rows of float weights into groups: squares of numbers are transposed in registers, as large matrices are packed when a
//! model starts. Not here: integers (pack.rs), a row back (pack.rs).

use super::float::widen;
use super::format::{Format, GROUP};
use super::kind::{Kind, Of};
use crate::isa::Isa;
use crate::simd::{Simd, by_isa};

/// Packs a group of 16 rows of so many columns, which lie one behind the other.
pub type Interleave = unsafe fn(*const u8, usize, *mut u8);

/// Of a float format.
pub fn interleave(format: Format, isa: Isa) -> Interleave {
    match format {
        Format::Bf16 => select::<Of<{ Format::Bf16 as usize }>>(isa),
        Format::F16 => select::<Of<{ Format::F16 as usize }>>(isa),
        _ => select::<Of<{ Format::F32 as usize }>>(isa),
    }
}

by_isa! {
    fn select[K: Kind](rows: *const u8, k: usize, group: *mut u8) -> () = floats (pack)
}

/// # Safety
/// `rows` is readable and `group` writable for 16 rows of k numbers of format `K`; the machine has `S`'s instructions.
#[inline(always)]
unsafe fn pack<S: Simd, K: Kind>(rows: *const u8, k: usize, group: *mut u8) {
    let bytes = const { K::FORMAT.block().1 };
    let squares = k - k % S::LANES;
    // SAFETY: the caller's; rows and columns stay below 16 and k.
    unsafe {
        for first in (0..GROUP).step_by(S::LANES) {
            for column in (0..squares).step_by(S::LANES) {
                let mut square = [S::splat(0.0); GROUP];
                for i in 0..S::LANES {
                    square[i] = widen::<S, K>(rows.add(((first + i) * k + column) * bytes));
                }
                let square = S::transpose(square);
                for i in 0..S::LANES {
                    let target = group.add(((column + i) * GROUP + first) * bytes);
                    match K::FORMAT {
                        Format::Bf16 => S::store_bf16(target.cast(), square[i]),
                        Format::F16 => S::store_f16(target.cast(), square[i]),
                        _ => S::store(target.cast(), square[i]),
                    }
                }
            }
        }
        for column in squares..k {
            for row in 0..GROUP {
                let source = rows.add((row * k + column) * bytes);
                source.copy_to_nonoverlapping(group.add((column * GROUP + row) * bytes), bytes);
            }
        }
    }
}
