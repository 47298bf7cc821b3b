//! Which compiled kernel runs a format on an instruction set.

#[cfg(target_arch = "x86_64")]
use std::ops::Range;

use crate::activations::{self, Quantize};
use crate::isa::Isa;
use crate::lanes::portable::Plain;
#[cfg(target_arch = "x86_64")]
use crate::lanes::{avx2::Ymm, avx512::Zmm};
use crate::limits::{self, Peak};
use crate::matrix::format::Format;
use crate::matrix::integer::{Kind, Of};
#[cfg(target_arch = "x86_64")]
use crate::matrix::product::Product;
use crate::matrix::product::{Run, floats, integers};

/// Functions compiled for an instruction set.
macro_rules! compiled {
    ($($name:ident = $body:ident::<$lanes:ty>, $features:literal;)*) => {
        $(
            /// # Safety
            /// As `product::run`; the machine has these instructions, the matrix has format `K`.
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = $features)]
            unsafe fn $name<K: Kind>(product: &Product<'_>, rows: Range<usize>, columns: Range<usize>) {
                // SAFETY: the caller's.
                unsafe { $body::<$lanes, K>(product, rows, columns) }
            }
        )*
    };
}

compiled! {
    integers_vnni512 = integers::<Zmm>, "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c";
    integers_vnni = integers::<Ymm<true>>, "avxvnni,avx2,fma,f16c";
    integers_avx2 = integers::<Ymm<false>>, "avx2,fma,f16c";
    floats_avx512 = floats::<Zmm>, "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c";
    floats_avx2 = floats::<Ymm<false>>, "avx2,fma,f16c";
}

/// Loops of the machine's limits compiled for an instruction set.
macro_rules! peaks {
    ($($name:ident = $body:ident::<$lanes:ty>, $features:literal;)*) => {
        $(
            /// # Safety
            /// The machine has these instructions.
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = $features)]
            unsafe fn $name(rounds: usize) -> usize {
                // SAFETY: the caller's.
                unsafe { limits::$body::<$lanes>(rounds) }
            }
        )*
    };
}

peaks! {
    int8_vnni512 = int8::<Zmm>, "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c";
    int8_vnni = int8::<Ymm<true>>, "avxvnni,avx2,fma,f16c";
    int8_avx2 = int8::<Ymm<false>>, "avx2,fma,f16c";
    f32_avx512 = f32::<Zmm>, "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c";
    f32_avx2 = f32::<Ymm<false>>, "avx2,fma,f16c";
}

/// The loop of int8 products. The machine must have the instructions.
pub fn int8_peak(isa: Isa) -> Peak {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni => int8_vnni512,
        #[cfg(target_arch = "x86_64")]
        Isa::AvxVnni => int8_vnni,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx2 => int8_avx2,
        _ => limits::int8::<Plain>,
    }
}

/// The loop of f32 products. The machine must have the instructions.
pub fn f32_peak(isa: Isa) -> Peak {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni | Isa::Avx512 => f32_avx512,
        #[cfg(target_arch = "x86_64")]
        Isa::AvxVnni | Isa::Avx2 => f32_avx2,
        _ => limits::f32::<Plain>,
    }
}

/// Quantization of activations compiled for an instruction set.
macro_rules! quantizers {
    ($($name:ident = $lanes:ty, $features:literal;)*) => {
        $(
            /// # Safety
            /// As `activations::quantize`; the machine has these instructions.
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = $features)]
            unsafe fn $name(x: *const f32, blocks: usize, quants: *mut i8, scales: *mut f32, sums: *mut [i32; 2]) {
                // SAFETY: the caller's.
                unsafe { activations::quantize::<$lanes>(x, blocks, quants, scales, sums) }
            }
        )*
    };
}

quantizers! {
    quantize_avx512 = Zmm, "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c";
    quantize_avx2 = Ymm<false>, "avx2,fma,f16c";
}

/// The function that quantizes activations. The machine must have the instructions.
pub fn quantize(isa: Isa) -> Quantize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni | Isa::Avx512 => quantize_avx512,
        #[cfg(target_arch = "x86_64")]
        Isa::AvxVnni | Isa::Avx2 => quantize_avx2,
        _ => activations::quantize::<Plain>,
    }
}

fn integer<K: Kind>(isa: Isa) -> Run {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni => integers_vnni512::<K>,
        #[cfg(target_arch = "x86_64")]
        Isa::AvxVnni => integers_vnni::<K>,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx2 => integers_avx2::<K>,
        _ => integers::<Plain, K>,
    }
}

fn float<K: Kind>(isa: Isa) -> Run {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni | Isa::Avx512 => floats_avx512::<K>,
        #[cfg(target_arch = "x86_64")]
        Isa::AvxVnni | Isa::Avx2 => floats_avx2::<K>,
        _ => floats::<Plain, K>,
    }
}

/// The kernel for products with a matrix of this format. The machine must have the instructions.
pub fn product(format: Format, isa: Isa) -> Run {
    match format {
        Format::F32 => float::<Of<{ Format::F32 as usize }>>(isa),
        Format::Bf16 => float::<Of<{ Format::Bf16 as usize }>>(isa),
        Format::F16 => float::<Of<{ Format::F16 as usize }>>(isa),
        Format::Int8 => integer::<Of<{ Format::Int8 as usize }>>(isa),
        Format::Q8_0 => integer::<Of<{ Format::Q8_0 as usize }>>(isa),
        Format::Q4_0 => integer::<Of<{ Format::Q4_0 as usize }>>(isa),
        Format::Q4_1 => integer::<Of<{ Format::Q4_1 as usize }>>(isa),
        Format::Q4K => integer::<Of<{ Format::Q4K as usize }>>(isa),
        Format::Q5K => integer::<Of<{ Format::Q5K as usize }>>(isa),
        Format::Q6K => integer::<Of<{ Format::Q6K as usize }>>(isa),
    }
}
