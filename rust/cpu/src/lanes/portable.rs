//! Sixteen lanes as the compiler makes them of arrays.

use super::{Lanes, Numbers};
use crate::element::{Bf16, Dtype, Element, F16};

/// Plain arrays.
#[derive(Clone, Copy)]
pub struct Plain;

// SAFETY (all blocks below): `Lanes`' contract: pointers cover what is read or written.
impl Lanes for Plain {
    type F = [f32; 16];
    type I = [i32; 16];
    type Bytes = [u8; 64];
    const BIAS: i32 = 0;
    const TILE: (usize, usize) = (2, 1);
    const FLOAT_TILE: (usize, usize) = (2, 1);

    #[inline(always)]
    unsafe fn splat(value: f32) -> [f32; 16] {
        [value; 16]
    }

    #[inline(always)]
    unsafe fn load(source: *const f32) -> [f32; 16] {
        // SAFETY: see above.
        unsafe { source.cast::<[f32; 16]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(target: *mut f32, value: [f32; 16]) {
        // SAFETY: see above.
        unsafe { target.cast::<[f32; 16]>().write_unaligned(value) }
    }

    #[inline(always)]
    unsafe fn widen(dtype: Dtype, source: *const u8) -> [f32; 16] {
        // SAFETY: see above.
        unsafe {
            match dtype {
                Dtype::F32 => source.cast::<[f32; 16]>().read_unaligned(),
                Dtype::Bf16 => source
                    .cast::<[u16; 16]>()
                    .read_unaligned()
                    .map(|bits| Bf16(bits).to_f32()),
                Dtype::F16 => source
                    .cast::<[u16; 16]>()
                    .read_unaligned()
                    .map(|bits| F16(bits).to_f32()),
            }
        }
    }

    #[inline(always)]
    unsafe fn load_u8(source: *const u8) -> [f32; 16] {
        // SAFETY: see above.
        unsafe { source.cast::<[u8; 16]>().read_unaligned() }.map(f32::from)
    }

    #[inline(always)]
    unsafe fn load_i8(source: *const u8) -> [f32; 16] {
        // SAFETY: see above.
        unsafe { source.cast::<[i8; 16]>().read_unaligned() }.map(f32::from)
    }

    #[inline(always)]
    unsafe fn mul(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    unsafe fn fma(a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }

    #[inline(always)]
    unsafe fn most_bits(source: [*const f32; 2]) -> u32 {
        // SAFETY: see above.
        let bits = source.map(|at| unsafe { at.cast::<[u32; 16]>().read_unaligned() });
        let magnitudes = bits.as_flattened().iter().map(|bits| bits & 0x7fff_ffff);
        magnitudes.fold(0, u32::max)
    }

    #[inline(always)]
    unsafe fn round(source: *const f32, factor: f32, target: *mut i8) -> i32 {
        // Adding and taking away 1.5 * 2^23 leaves the nearest integer, ties to even.
        const SHIFT: f32 = 12_582_912.0;
        // SAFETY: see above.
        unsafe {
            let values = source.cast::<[f32; 16]>().read_unaligned();
            let quants = values.map(|value| (value * factor + SHIFT - SHIFT) as i8);
            target.cast::<[i8; 16]>().write_unaligned(quants);
            quants.map(i32::from).iter().sum()
        }
    }

    #[inline(always)]
    unsafe fn splat_i32(value: i32) -> [i32; 16] {
        [value; 16]
    }

    #[inline(always)]
    unsafe fn to_float(a: [i32; 16]) -> [f32; 16] {
        a.map(|a| a as f32)
    }

    #[inline(always)]
    unsafe fn load_bytes(source: *const u8) -> [u8; 64] {
        // SAFETY: see above.
        unsafe { source.cast::<[u8; 64]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn or(a: [u8; 64], b: [u8; 64]) -> [u8; 64] {
        std::array::from_fn(|i| a[i] | b[i])
    }

    #[inline(always)]
    unsafe fn and(a: [u8; 64], mask: u8) -> [u8; 64] {
        a.map(|a| a & mask)
    }

    // Bits that move between bytes are masked away by every user, so bytes may be shifted alone.
    #[inline(always)]
    unsafe fn shift_right(a: [u8; 64], bits: u32) -> [u8; 64] {
        a.map(|a| a >> bits)
    }

    #[inline(always)]
    unsafe fn shift_left(a: [u8; 64], bits: u32) -> [u8; 64] {
        a.map(|a| a << bits)
    }

    #[inline(always)]
    unsafe fn bias(a: [u8; 64]) -> [u8; 64] {
        a
    }

    #[inline(always)]
    unsafe fn dots<W: Numbers<Self>, const N: usize, const M: usize, const J: usize>(
        numbers: &W,
        first: usize,
        x: &[*const i8; M],
        start: &[[i32; 16]; M],
    ) -> [[[i32; 16]; J]; M] {
        let mut sums: [[[i32; 16]; J]; M] = std::array::from_fn(|m| [start[m]; J]);
        for step in first..first + N {
            for j in 0..J {
                // SAFETY: see above.
                let bytes = unsafe { numbers.step(j, step) };
                let wide = bytes.map(|byte| {
                    if W::BITS == 8 {
                        i16::from(byte.cast_signed())
                    } else {
                        i16::from(byte)
                    }
                });
                for m in 0..M {
                    // SAFETY: see above.
                    let four = unsafe { x[m].add(4 * step).cast::<[i8; 4]>().read_unaligned() };
                    let four = four.map(i16::from);
                    for lane in 0..16 {
                        for c in 0..4 {
                            sums[m][j][lane] += i32::from(wide[4 * lane + c] * four[c]);
                        }
                    }
                }
            }
        }
        sums
    }
}
