//! Sixteen lanes with AVX-512 (F, BW, VL, DQ); byte products with VNNI.

#[allow(clippy::wildcard_imports)] // intrinsics carry their own prefix
use std::arch::x86_64::*;

use super::{Numbers, Simd};

/// AVX-512 F, BW, VL, DQ; `dots` needs VNNI too.
#[derive(Clone, Copy)]
pub struct Avx512;

// SAFETY (all blocks below): `Simd`'s contract: the machine has the instructions, and pointers cover sixteen elements.
impl Simd for Avx512 {
    type V = __m512;
    type I = __m512i;
    type B = __m512i;
    const LANES: usize = 16;
    const TILE: usize = 4;
    const FLOAT_TILE: (usize, usize) = (12, 2);
    const BIAS: i32 = 128;
    const INTEGER_TILES: [(usize, usize); 5] = [(6, 2); 5];

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
    unsafe fn load_bf16(source: *const u16) -> __m512 {
        // SAFETY: see above.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(source.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    unsafe fn store_bf16(target: *mut u16, value: __m512) {
        // SAFETY: see above.
        unsafe {
            let bits = _mm512_castps_si512(value);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value);
            let high = _mm512_mask_mov_epi32(
                _mm512_srli_epi32::<16>(rounded),
                nan,
                _mm512_set1_epi32(0x7fc0),
            );
            _mm256_storeu_si256(target.cast(), _mm512_cvtepi32_epi16(high));
        }
    }

    #[inline(always)]
    unsafe fn load_f16(source: *const u16) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(source.cast())) }
    }

    #[inline(always)]
    unsafe fn store_f16(target: *mut u16, value: __m512) {
        // SAFETY: see above.
        unsafe {
            let half = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(value);
            _mm256_storeu_si256(target.cast(), half);
        }
    }

    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn select_le(a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LE_OQ>(a, b), y, x) }
    }

    #[inline(always)]
    unsafe fn sum(a: __m512) -> f32 {
        // SAFETY: see above.
        unsafe { _mm512_reduce_add_ps(a) }
    }

    #[inline(always)]
    unsafe fn greatest(a: __m512) -> f32 {
        // SAFETY: see above.
        unsafe { _mm512_reduce_max_ps(a) }
    }

    #[inline(always)]
    unsafe fn round(a: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }

    #[inline(always)]
    unsafe fn scale_by_power(a: __m512, n: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_scalef_ps(a, n) }
    }

    #[inline(always)]
    unsafe fn load_u8(source: *const u8) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(source.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_i8(source: *const i8) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(source.cast()))) }
    }

    #[inline(always)]
    unsafe fn splat_i32(value: i32) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_set1_epi32(value) }
    }

    #[inline(always)]
    unsafe fn add_i32(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_add_epi32(a, b) }
    }

    #[inline(always)]
    unsafe fn max_i32(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_max_epi32(a, b) }
    }

    #[inline(always)]
    unsafe fn sum_i32(a: __m512i) -> i32 {
        // SAFETY: see above.
        unsafe { _mm512_reduce_add_epi32(a) }
    }

    #[inline(always)]
    unsafe fn greatest_i32(a: __m512i) -> i32 {
        // SAFETY: see above.
        unsafe { _mm512_reduce_max_epi32(a) }
    }

    #[inline(always)]
    unsafe fn magnitude(a: __m512) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fff_ffff)) }
    }

    #[inline(always)]
    unsafe fn to_float(a: __m512i) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtepi32_ps(a) }
    }

    #[inline(always)]
    unsafe fn to_i32(a: __m512) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_cvtps_epi32(a) }
    }

    #[inline(always)]
    unsafe fn store_i8(target: *mut i8, a: __m512i) {
        // SAFETY: see above.
        unsafe { _mm_storeu_si128(target.cast(), _mm512_cvtepi32_epi8(a)) }
    }

    #[inline(always)]
    unsafe fn load_bytes(source: *const u8) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_loadu_si512(source.cast()) }
    }

    #[inline(always)]
    unsafe fn store_bytes(target: *mut u8, value: __m512i) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_si512(target.cast(), value) }
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
    unsafe fn shift_right<const BITS: i32>(a: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_srl_epi16(a, _mm_cvtsi32_si128(BITS)) }
    }

    #[inline(always)]
    unsafe fn shift_left<const BITS: i32>(a: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_sll_epi16(a, _mm_cvtsi32_si128(BITS)) }
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
    ) -> [[__m512i; J]; M] {
        // SAFETY: see above.
        unsafe {
            let mut sums = [[_mm512_setzero_si512(); J]; M];
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
