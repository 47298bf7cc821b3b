//! One thread's part of a product: cut into tiles, each computed by the kernel of its format and instruction set.
//!
//! A result is the same to the last bit however many rows it is computed with: whatever the tile, a row's products with an
//! output are added up in the order of the columns, in pieces that depend on the matrix alone.

use std::ops::Range;

use super::ahead::{Ahead, Coming};
use super::format::{Format, GROUP};
use super::kind::{Kind, Of};
use super::pass::{Passes, Size, lone, may_be_wide};
use super::product::Product;
use super::{Input, Matrix, Output, float, integer, packed, panel};
use crate::activations::Activations;
use crate::isa::Isa;
use crate::simd::{Simd, by_isa};

/// Rows of the input that a tile handles at once, at most.
pub const ROWS: usize = 12;
/// Compute `rows` by `columns` of a product.
pub type Run = unsafe fn(&Product<'_>, Range<usize>, Range<usize>);

/// # Safety
/// Sizes fit the matrix (`Matrix::check`); rows and columns are this thread's, and columns start at a group.
pub unsafe fn run(
    matrix: &Matrix,
    input: &Input<'_>,
    output: &Output<'_>,
    next: Option<Coming>,
    rows: Range<usize>,
    columns: Range<usize>,
) {
    static NONE: Activations = Activations::NONE;
    let product = Product {
        matrix,
        x: input.x.as_ptr(),
        quantized: input.quantized.unwrap_or(&NONE),
        output,
        next,
    };
    // SAFETY: the caller's.
    unsafe { (matrix.run)(&product, rows, columns) };
}

by_isa! {
    fn float[K: Kind](product: &Product<'_>, rows: Range<usize>, columns: Range<usize>) -> () = floats (floats)
}
by_isa! {
    fn integer[K: Kind](product: &Product<'_>, rows: Range<usize>, columns: Range<usize>) -> () = bytes (integers)
}
by_isa! {
    fn tiled[K: Kind](product: &Product<'_>, rows: Range<usize>, columns: Range<usize>) -> () = tiles (tiled_integers)
}

/// The kernel of an integer format.
fn any_integer<K: Kind>(isa: Isa) -> Run {
    if isa == Isa::Amx {
        with_tiles::<K>
    } else {
        integer::<K>(isa)
    }
}

/// As many rows and pairs of groups as fill AMX's tiles by those, and the rest by VNNI, with the same bits.
///
/// # Safety
/// As `run`; the machine has AMX, the matrix has format `K`.
unsafe fn with_tiles<K: Kind>(product: &Product<'_>, rows: Range<usize>, columns: Range<usize>) {
    let full = rows.start + rows.len() / TILE.0 * TILE.0;
    let pairs = columns.start + columns.len().div_ceil(GROUP) / TILE.1 * TILE.1 * GROUP;
    let wide = columns.end.min(pairs);
    // SAFETY: the caller's.
    unsafe {
        let rest = integer::<K>(Isa::Amx);
        if full > rows.start && wide > columns.start {
            tiled::<K>(Isa::Amx)(product, rows.start..full, columns.start..wide);
        }
        if full > rows.start && wide < columns.end {
            rest(product, rows.start..full, wide..columns.end);
        }
        if full < rows.end {
            rest(product, full..rows.end, columns);
        }
    }
}

/// The kernel for products with a matrix of this format. The machine must have the instructions.
pub fn kernel(format: Format, isa: Isa) -> Run {
    match format {
        Format::F32 => float::<Of<{ Format::F32 as usize }>>(isa),
        Format::Bf16 => float::<Of<{ Format::Bf16 as usize }>>(isa),
        Format::F16 => float::<Of<{ Format::F16 as usize }>>(isa),
        Format::Int8 => any_integer::<Of<{ Format::Int8 as usize }>>(isa),
        Format::Q8_0 => any_integer::<Of<{ Format::Q8_0 as usize }>>(isa),
        Format::Q4_0 => any_integer::<Of<{ Format::Q4_0 as usize }>>(isa),
        Format::Q4_1 => any_integer::<Of<{ Format::Q4_1 as usize }>>(isa),
        Format::Q4K => any_integer::<Of<{ Format::Q4K as usize }>>(isa),
        Format::Q5K => any_integer::<Of<{ Format::Q5K as usize }>>(isa),
        Format::Q6K => any_integer::<Of<{ Format::Q6K as usize }>>(isa),
    }
}

/// That of AMX's tiles.
const TILE: Size = (8, 2);

const fn float_size<S: Simd, K: Kind>() -> Size {
    S::FLOAT_TILE
}

const fn integer_size<S: Simd, K: Kind>() -> Size {
    S::INTEGER_TILES[K::BITS - 4]
}

/// A kernel for tiles of M rows by J vectors.
macro_rules! tiles {
    ($name:ident, $module:ident, $size:ident, $is_integer:literal, [$($m:literal),*]) => {
        /// Compute rows by columns.
        ///
        /// # Safety
        /// As `run`; the matrix has format `K`, the machine has `S`'s instructions.
        #[inline(always)]
        unsafe fn $name<S: Simd, K: Kind>(product: &Product<'_>, rows: Range<usize>, columns: Range<usize>) {
            let has_panels = $is_integer && rows.len() >= S::PANEL_ROWS;
            if has_panels {
                // SAFETY: the caller's.
                unsafe { S::begin() };
            }
            if $is_integer && rows.len() == 1 {
                packed::prefetch_start::<K>(product.matrix, columns.start / GROUP);
            }
            // A closure in place of these loops' bodies would not be compiled for the instructions.
            let mut passes = Passes::of::<K>(product.matrix.k(), const { $size::<S, K>() }, rows, columns);
            let mut next = passes.next();
            while let Some(pass) = next {
                next = passes.next();
                let coming = next.as_ref().map(|next| Coming::pass::<K>(product.matrix, next)).or(product.next);
                let panel = if const { $is_integer } && (pass.num_tiles > 1 || pass.rows.len() >= S::PANEL_ROWS) {
                    // SAFETY: as below.
                    unsafe { panel::unpack::<S, K>(product, &pass) }
                } else {
                    std::ptr::null()
                };
                for index in 0..pass.num_tiles {
                    let ahead = if const { $is_integer } {
                        Ahead::NONE
                    } else {
                        Ahead::new::<K>(product.matrix, &pass, coming, index)
                    };
                    let (tile, num_rows) = pass.tile(index, panel, ahead);
                    // SAFETY: the caller's; a pass is within rows and columns.
                    unsafe {
                        // A tile that no pass has is not compiled.
                        match (num_rows, pass.is_wide, S::PARTS) {
                            (1, true, 2) => if const { may_be_wide(1, $size::<S, K>(), $is_integer) && S::PARTS == 2 } {
                                $module::tile::<S, K, 1, 4>(product, &tile);
                            },
                            (1, true, 4) => if const { may_be_wide(1, $size::<S, K>(), $is_integer) && S::PARTS == 4 } {
                                $module::tile::<S, K, 1, 8>(product, &tile);
                            },
                            $(
                                ($m, true, 1) => if const { may_be_wide($m, $size::<S, K>(), $is_integer) && S::PARTS == 1 } {
                                    $module::tile::<S, K, $m, 2>(product, &tile);
                                },
                                ($m, false, 1) => if const { $m <= lone($size::<S, K>()) && S::PARTS == 1 } {
                                    $module::tile::<S, K, $m, 1>(product, &tile);
                                },
                                ($m, false, 2) => if const { $m <= lone($size::<S, K>()) && S::PARTS == 2 } {
                                    $module::tile::<S, K, $m, 2>(product, &tile);
                                },
                                ($m, false, 4) => if const { $m <= lone($size::<S, K>()) && S::PARTS == 4 } {
                                    $module::tile::<S, K, $m, 4>(product, &tile);
                                },
                            )*
                            _ => unreachable!("{num_rows} rows in a tile"),
                        }
                    }
                }
            }
            if has_panels {
                // SAFETY: the caller's.
                unsafe { S::end() };
            }
        }
    };
}

tiles!(integers, integer, integer_size, true, [1, 2, 3, 4, 5, 6]);
tiles!(tiled_integers, integer, integer_size, true, [8]);
tiles!(
    floats,
    float,
    float_size,
    false,
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
);
