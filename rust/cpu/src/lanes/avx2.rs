//! Sixteen lanes in two AVX2 registers; byte products with maddubs, or with VNNI where AVX2 machines have it.

#[allow(clippy::wildcard_imports)] // intrinsics carry their own prefix
use std::arch::x86_64::*;

use super::{Lanes, Numbers};
use crate::element::Dtype;

/// AVX2 + FMA + F16C; `dots` needs AVX-VNNI if `VNNI`.
#[derive(Clone, Copy)]
pub struct Ymm<const VNNI: bool>;

/// Steps whose products of unsigned numbers and int8 can be summed in 16 bits.
const fn steps_in_16_bits(bits: usize) -> usize {
    match bits {
        4 => 8,
        5 => 4,
        6 => 2,
        _ => 1,
    }
}

// SAFETY (all blocks below): `Lanes`' contract: the machine has the instructions, pointers cover what is read or written.
impl<const VNNI: bool> Lanes for Ymm<VNNI> {
    type F = [__m256; 2];
    type I = [__m256i; 2];
    type Bytes = [__m256i; 2];
    const BIAS: i32 = if VNNI { 128 } else { 0 };
    const TILE: (usize, usize) = (4, 1);
    const FLOAT_TILE: (usize, usize) = (6, 1);

    #[inline(always)]
    unsafe fn splat(value: f32) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_set1_ps(value); 2] }
    }

    #[inline(always)]
    unsafe fn load(source: *const f32) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_loadu_ps(source), _mm256_loadu_ps(source.add(8))] }
    }

    #[inline(always)]
    unsafe fn store(target: *mut f32, value: [__m256; 2]) {
        // SAFETY: see above.
        unsafe {
            _mm256_storeu_ps(target, value[0]);
            _mm256_storeu_ps(target.add(8), value[1]);
        }
    }

    #[inline(always)]
    unsafe fn widen(dtype: Dtype, source: *const u8) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe {
            match dtype {
                Dtype::F32 => Self::load(source.cast()),
                Dtype::Bf16 => {
                    let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(source.cast()));
                    let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(source.add(16).cast()));
                    [
                        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
                    ]
                }
                Dtype::F16 => [
                    _mm256_cvtph_ps(_mm_loadu_si128(source.cast())),
                    _mm256_cvtph_ps(_mm_loadu_si128(source.add(16).cast())),
                ],
            }
        }
    }

    #[inline(always)]
    unsafe fn load_u8(source: *const u8) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe {
            let low = _mm256_cvtepu8_epi32(_mm_loadl_epi64(source.cast()));
            let high = _mm256_cvtepu8_epi32(_mm_loadl_epi64(source.add(8).cast()));
            [_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)]
        }
    }

    #[inline(always)]
    unsafe fn load_i8(source: *const u8) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe {
            let low = _mm256_cvtepi8_epi32(_mm_loadl_epi64(source.cast()));
            let high = _mm256_cvtepi8_epi32(_mm_loadl_epi64(source.add(8).cast()));
            [_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)]
        }
    }

    #[inline(always)]
    unsafe fn mul(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }

    #[inline(always)]
    unsafe fn fma(a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe {
            [
                _mm256_fmadd_ps(a[0], b[0], c[0]),
                _mm256_fmadd_ps(a[1], b[1], c[1]),
            ]
        }
    }

    #[inline(always)]
    unsafe fn most_bits(source: [*const f32; 2]) -> u32 {
        // SAFETY: see above.
        unsafe {
            let mut most = _mm256_setzero_si256();
            for i in 0..4 {
                let bits = _mm256_loadu_si256(source[i / 2].add(8 * (i % 2)).cast());
                let magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fff_ffff));
                most = _mm256_max_epi32(most, magnitude);
            }
            let half = _mm_max_epi32(
                _mm256_castsi256_si128(most),
                _mm256_extracti128_si256::<1>(most),
            );
            let half = _mm_max_epi32(half, _mm_shuffle_epi32::<0b01_00_11_10>(half));
            let half = _mm_max_epi32(half, _mm_shuffle_epi32::<0b10_11_00_01>(half));
            _mm_cvtsi128_si32(half).cast_unsigned()
        }
    }

    #[inline(always)]
    unsafe fn round(source: *const f32, factor: f32, target: *mut i8) -> i32 {
        // SAFETY: see above.
        unsafe {
            let factor = _mm256_set1_ps(factor);
            let low = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(source), factor));
            let high = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(source.add(8)), factor));
            // Packing works within halves of registers: put the quarters in order after it.
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(low, high));
            let bytes = _mm_packs_epi16(
                _mm256_castsi256_si128(words),
                _mm256_extracti128_si256::<1>(words),
            );
            _mm_storeu_si128(target.cast(), bytes);
            let sum = _mm256_add_epi32(low, high);
            let half = _mm_add_epi32(
                _mm256_castsi256_si128(sum),
                _mm256_extracti128_si256::<1>(sum),
            );
            let half = _mm_add_epi32(half, _mm_shuffle_epi32::<0b01_00_11_10>(half));
            _mm_cvtsi128_si32(_mm_add_epi32(
                half,
                _mm_shuffle_epi32::<0b10_11_00_01>(half),
            ))
        }
    }

    #[inline(always)]
    unsafe fn splat_i32(value: i32) -> [__m256i; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_set1_epi32(value); 2] }
    }

    #[inline(always)]
    unsafe fn to_float(a: [__m256i; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_cvtepi32_ps(a[0]), _mm256_cvtepi32_ps(a[1])] }
    }

    #[inline(always)]
    unsafe fn load_bytes(source: *const u8) -> [__m256i; 2] {
        // SAFETY: see above.
        unsafe {
            [
                _mm256_loadu_si256(source.cast()),
                _mm256_loadu_si256(source.add(32).cast()),
            ]
        }
    }

    #[inline(always)]
    unsafe fn or(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])] }
    }

    #[inline(always)]
    unsafe fn and(a: [__m256i; 2], mask: u8) -> [__m256i; 2] {
        // SAFETY: see above.
        unsafe {
            let mask = _mm256_set1_epi8(mask.cast_signed());
            [_mm256_and_si256(a[0], mask), _mm256_and_si256(a[1], mask)]
        }
    }

    #[inline(always)]
    unsafe fn shift_right(a: [__m256i; 2], bits: u32) -> [__m256i; 2] {
        // SAFETY: see above.
        unsafe {
            let count = _mm_cvtsi32_si128(bits.cast_signed());
            [_mm256_srl_epi16(a[0], count), _mm256_srl_epi16(a[1], count)]
        }
    }

    #[inline(always)]
    unsafe fn shift_left(a: [__m256i; 2], bits: u32) -> [__m256i; 2] {
        // SAFETY: see above.
        unsafe {
            let count = _mm_cvtsi32_si128(bits.cast_signed());
            [_mm256_sll_epi16(a[0], count), _mm256_sll_epi16(a[1], count)]
        }
    }

    #[inline(always)]
    unsafe fn bias(a: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: see above.
        unsafe {
            if VNNI {
                let sign = _mm256_set1_epi8(-128);
                [_mm256_xor_si256(a[0], sign), _mm256_xor_si256(a[1], sign)]
            } else {
                a
            }
        }
    }

    #[inline(always)]
    unsafe fn dots<W: Numbers<Self>, const N: usize, const M: usize, const J: usize>(
        numbers: &W,
        first: usize,
        x: &[*const i8; M],
        start: &[[__m256i; 2]; M],
    ) -> [[[__m256i; 2]; J]; M] {
        // SAFETY: see above.
        unsafe {
            let zero = _mm256_setzero_si256();
            let mut sums = [[[zero; 2]; J]; M];
            for m in 0..M {
                sums[m] = [start[m]; J];
            }
            let run = if VNNI {
                1
            } else {
                steps_in_16_bits(W::BITS).min(N)
            };
            for first in (first..first + N).step_by(run) {
                let mut short = [[[zero; 2]; J]; M];
                for step in first..first + run {
                    for j in 0..J {
                        let bytes = numbers.step(j, step);
                        for m in 0..M {
                            let four = x[m].add(4 * step).cast::<i32>().read_unaligned();
                            let four = _mm256_set1_epi32(four);
                            for h in 0..2 {
                                if VNNI {
                                    let sum = sums[m][j][h];
                                    sums[m][j][h] = _mm256_dpbusd_avx_epi32(sum, bytes[h], four);
                                } else {
                                    let pairs = pairs::<W, Self>(bytes[h], four);
                                    short[m][j][h] = if run == 1 {
                                        pairs
                                    } else {
                                        _mm256_add_epi16(short[m][j][h], pairs)
                                    };
                                }
                            }
                        }
                    }
                }
                if !VNNI {
                    let ones = _mm256_set1_epi16(1);
                    for m in 0..M {
                        for j in 0..J {
                            for h in 0..2 {
                                let wide = _mm256_madd_epi16(short[m][j][h], ones);
                                sums[m][j][h] = _mm256_add_epi32(sums[m][j][h], wide);
                            }
                        }
                    }
                }
            }
            sums
        }
    }
}

/// Products of bytes with int8 between -127 and 127, summed in pairs. Signed bytes give their sign to the other factor:
/// 128 * 127 * 2 still fits.
///
/// # Safety
/// The machine has AVX2.
#[inline(always)]
unsafe fn pairs<W: Numbers<L>, L: Lanes>(bytes: __m256i, x: __m256i) -> __m256i {
    // SAFETY: the caller's.
    unsafe {
        if W::BITS == 8 {
            _mm256_maddubs_epi16(_mm256_abs_epi8(bytes), _mm256_sign_epi8(x, bytes))
        } else {
            _mm256_maddubs_epi16(bytes, x)
        }
    }
}
