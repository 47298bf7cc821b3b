//! Sixteen lanes in one AVX-512 register; byte products with VNNI.

#[allow(clippy::wildcard_imports)] // intrinsics carry their own prefix
use std::arch::x86_64::*;

use super::{Lanes, Numbers};
use crate::element::Dtype;

/// AVX-512 F, BW, VL, DQ; `dots` needs VNNI too.
#[derive(Clone, Copy)]
pub struct Zmm;

// SAFETY (all blocks below): `Lanes`' contract: the machine has the instructions, pointers cover what is read or written.
impl Lanes for Zmm {
    type F = __m512;
    type I = __m512i;
    type Bytes = __m512i;
    const BIAS: i32 = 128;
    const TILE: (usize, usize) = (6, 2);
    const FLOAT_TILE: (usize, usize) = (12, 2);

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn load(source: *const f32) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_loadu_ps(source) }
    }

    #[inline(always)]
    unsafe fn store(target: *mut f32, value: __m512) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_ps(target, value) }
    }

    #[inline(always)]
    unsafe fn widen(dtype: Dtype, source: *const u8) -> __m512 {
        // SAFETY: see above.
        unsafe {
            match dtype {
                Dtype::F32 => _mm512_loadu_ps(source.cast()),
                Dtype::Bf16 => {
                    let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(source.cast()));
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
                }
                Dtype::F16 => _mm512_cvtph_ps(_mm256_loadu_si256(source.cast())),
            }
        }
    }

    #[inline(always)]
    unsafe fn load_u8(source: *const u8) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(source.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_i8(source: *const u8) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(source.cast()))) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn most_bits(source: [*const f32; 2]) -> u32 {
        // SAFETY: see above.
        unsafe {
            let sign = _mm512_set1_epi32(0x7fff_ffff);
            let low = _mm512_and_si512(_mm512_loadu_si512(source[0].cast()), sign);
            let high = _mm512_and_si512(_mm512_loadu_si512(source[1].cast()), sign);
            _mm512_reduce_max_epi32(_mm512_max_epi32(low, high)).cast_unsigned()
        }
    }

    #[inline(always)]
    unsafe fn round(source: *const f32, factor: f32, target: *mut i8) -> i32 {
        // SAFETY: see above.
        unsafe {
            let scaled = _mm512_mul_ps(_mm512_loadu_ps(source), _mm512_set1_ps(factor));
            let wide = _mm512_cvtps_epi32(scaled);
            _mm_storeu_si128(target.cast(), _mm512_cvtepi32_epi8(wide));
            _mm512_reduce_add_epi32(wide)
        }
    }

    #[inline(always)]
    unsafe fn splat_i32(value: i32) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_set1_epi32(value) }
    }

    #[inline(always)]
    unsafe fn to_float(a: __m512i) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtepi32_ps(a) }
    }

    #[inline(always)]
    unsafe fn load_bytes(source: *const u8) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_loadu_si512(source.cast()) }
    }

    #[inline(always)]
    unsafe fn or(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_or_si512(a, b) }
    }

    #[inline(always)]
    unsafe fn and(a: __m512i, mask: u8) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_and_si512(a, _mm512_set1_epi8(mask.cast_signed())) }
    }

    #[inline(always)]
    unsafe fn shift_right(a: __m512i, bits: u32) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_srl_epi16(a, _mm_cvtsi32_si128(bits.cast_signed())) }
    }

    #[inline(always)]
    unsafe fn shift_left(a: __m512i, bits: u32) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_sll_epi16(a, _mm_cvtsi32_si128(bits.cast_signed())) }
    }

    #[inline(always)]
    unsafe fn bias(a: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_xor_si512(a, _mm512_set1_epi8(-128)) }
    }

    #[inline(always)]
    unsafe fn dots<W: Numbers<Self>, const N: usize, const M: usize, const J: usize>(
        numbers: &W,
        first: usize,
        x: &[*const i8; M],
        start: &[__m512i; M],
    ) -> [[__m512i; J]; M] {
        // SAFETY: see above.
        unsafe {
            let mut sums = [[_mm512_setzero_si512(); J]; M];
            for m in 0..M {
                sums[m] = [start[m]; J];
            }
            for step in first..first + N {
                let mut bytes = [_mm512_setzero_si512(); J];
                for j in 0..J {
                    bytes[j] = numbers.step(j, step);
                }
                for m in 0..M {
                    let four = x[m].add(4 * step).cast::<i32>().read_unaligned();
                    let four = _mm512_set1_epi32(four);
                    for j in 0..J {
                        sums[m][j] = _mm512_dpbusd_epi32(sums[m][j], bytes[j], four);
                    }
                }
            }
            sums
        }
    }
}
