//! Eight lanes with AVX2, FMA and F16C; byte products with maddubs, or with VNNI where AVX2 machines have it.

use std::arch::asm;
#[allow(clippy::wildcard_imports)] // intrinsics carry their own prefix
use std::arch::x86_64::*;

use super::{GROUP, Numbers, Simd};

/// AVX2 + FMA + F16C; `dots` needs AVX-VNNI if `VNNI`.
#[derive(Clone, Copy)]
pub struct Ymm<const VNNI: bool>;

pub type Avx2 = Ymm<false>;
pub type AvxVnni = Ymm<true>;

/// Steps whose products of unsigned numbers and int8 can be summed in 16 bits.
const fn steps_in_16_bits(bits: usize) -> usize {
    match bits {
        4 => 8,
        5 => 4,
        6 => 2,
        _ => 1,
    }
}

// SAFETY (all blocks below): `Simd`'s contract: the machine has the instructions, and pointers cover eight elements.
impl<const VNNI: bool> Simd for Ymm<VNNI> {
    type V = __m256;
    type I = __m256i;
    type B = __m256i;
    const LANES: usize = 8;
    const TILE: usize = 2;
    const FLOAT_TILE: (usize, usize) = (6, 1);
    const BIAS: i32 = if VNNI { 128 } else { 0 };
    const INTEGER_TILES: [(usize, usize); 5] = if VNNI {
        [(6, 1); 5]
    } else {
        [(6, 1), (6, 1), (6, 1), (6, 1), (4, 1)]
    };

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn load(source: *const f32) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_loadu_ps(source) }
    }

    #[inline(always)]
    unsafe fn store(target: *mut f32, value: __m256) {
        // SAFETY: see above.
        unsafe { _mm256_storeu_ps(target, value) }
    }

    #[inline(always)]
    unsafe fn load_bf16(source: *const u16) -> __m256 {
        // SAFETY: see above.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(source.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    unsafe fn store_bf16(target: *mut u16, value: __m256) {
        // SAFETY: see above.
        unsafe {
            let bits = _mm256_castps_si256(value);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(value, value));
            let high = _mm256_blendv_epi8(
                _mm256_srli_epi32::<16>(rounded),
                _mm256_set1_epi32(0x7fc0),
                nan,
            );
            let packed = _mm256_packus_epi32(high, high);
            let ordered = _mm256_permute4x64_epi64::<0b00_00_10_00>(packed);
            _mm_storeu_si128(target.cast(), _mm256_castsi256_si128(ordered));
        }
    }

    #[inline(always)]
    unsafe fn load_f16(source: *const u16) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(source.cast())) }
    }

    #[inline(always)]
    unsafe fn store_f16(target: *mut u16, value: __m256) {
        // SAFETY: see above.
        unsafe {
            let half = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(value);
            _mm_storeu_si128(target.cast(), half);
        }
    }

    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_add_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_sub_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn div(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_div_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_max_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn select_le(a: __m256, b: __m256, x: __m256, y: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_blendv_ps(y, x, _mm256_cmp_ps::<_CMP_LE_OQ>(a, b)) }
    }

    #[inline(always)]
    unsafe fn sum(a: __m256) -> f32 {
        // SAFETY: see above.
        unsafe {
            let four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }

    #[inline(always)]
    unsafe fn greatest(a: __m256) -> f32 {
        // SAFETY: see above.
        unsafe {
            let four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
    }

    #[inline(always)]
    unsafe fn transpose(rows: [__m256; GROUP]) -> [__m256; GROUP] {
        // SAFETY: see above.
        unsafe {
            let (first, last) = (quarters(rows, 0), quarters(rows, 4));
            let mut columns = rows;
            for c in 0..4 {
                columns[c] = _mm256_permute2f128_ps::<0x20>(first[c], last[c]);
                columns[c + 4] = _mm256_permute2f128_ps::<0x31>(first[c], last[c]);
            }
            columns
        }
    }

    #[inline(always)]
    unsafe fn round(a: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }

    #[inline(always)]
    unsafe fn scale_by_power(a: __m256, n: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe {
            let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent)))
        }
    }

    #[inline(always)]
    unsafe fn load_u8(source: *const u8) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(source.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_i8(source: *const i8) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(source.cast()))) }
    }

    #[inline(always)]
    unsafe fn splat_i32(value: i32) -> __m256i {
        // SAFETY: see above.
        unsafe { _mm256_set1_epi32(value) }
    }

    #[inline(always)]
    unsafe fn add_i32(a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: see above.
        unsafe { _mm256_add_epi32(a, b) }
    }

    #[inline(always)]
    unsafe fn max_i32(a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: see above.
        unsafe { _mm256_max_epi32(a, b) }
    }

    #[inline(always)]
    unsafe fn sum_i32(a: __m256i) -> i32 {
        // SAFETY: see above.
        unsafe {
            let half = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256::<1>(a));
            let half = _mm_add_epi32(half, _mm_shuffle_epi32::<0b01_00_11_10>(half));
            let whole = _mm_add_epi32(half, _mm_shuffle_epi32::<0b10_11_00_01>(half));
            _mm_cvtsi128_si32(whole)
        }
    }

    #[inline(always)]
    unsafe fn greatest_i32(a: __m256i) -> i32 {
        // SAFETY: see above.
        unsafe {
            let half = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256::<1>(a));
            let half = _mm_max_epi32(half, _mm_shuffle_epi32::<0b01_00_11_10>(half));
            let whole = _mm_max_epi32(half, _mm_shuffle_epi32::<0b10_11_00_01>(half));
            _mm_cvtsi128_si32(whole)
        }
    }

    #[inline(always)]
    unsafe fn magnitude(a: __m256) -> __m256i {
        // SAFETY: see above.
        unsafe { _mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0x7fff_ffff)) }
    }

    #[inline(always)]
    unsafe fn to_float(a: __m256i) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_cvtepi32_ps(a) }
    }

    #[inline(always)]
    unsafe fn to_i32(a: __m256) -> __m256i {
        // SAFETY: see above.
        unsafe { _mm256_cvtps_epi32(a) }
    }

    #[inline(always)]
    unsafe fn store_i8(target: *mut i8, a: __m256i) {
        // SAFETY: see above.
        unsafe {
            let low = _mm256_castsi256_si128(a);
            let words = _mm_packs_epi32(low, _mm256_extracti128_si256::<1>(a));
            _mm_storel_epi64(target.cast(), _mm_packs_epi16(words, words));
        }
    }

    #[inline(always)]
    unsafe fn load_bytes(source: *const u8) -> __m256i {
        // SAFETY: see above.
        unsafe { opaque(_mm256_loadu_si256(source.cast())) }
    }

    #[inline(always)]
    unsafe fn store_bytes(target: *mut u8, value: __m256i) {
        // SAFETY: see above.
        unsafe { _mm256_storeu_si256(target.cast(), value) }
    }

    #[inline(always)]
    unsafe fn splat_bytes(value: u8) -> __m256i {
        // SAFETY: see above.
        unsafe { opaque(_mm256_set1_epi8(value.cast_signed())) }
    }

    #[inline(always)]
    unsafe fn xor(a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: see above.
        unsafe { _mm256_xor_si256(a, b) }
    }

    #[inline(always)]
    unsafe fn and(a: __m256i, mask: __m256i) -> __m256i {
        // SAFETY: see above.
        unsafe { _mm256_and_si256(a, mask) }
    }

    #[inline(always)]
    unsafe fn and_not(a: __m256i, mask: __m256i) -> __m256i {
        // SAFETY: see above.
        unsafe { _mm256_andnot_si256(mask, a) }
    }

    #[inline(always)]
    unsafe fn shift_right<const BITS: i32>(a: __m256i) -> __m256i {
        // SAFETY: see above.
        unsafe { _mm256_srli_epi16::<BITS>(a) }
    }

    #[inline(always)]
    unsafe fn bias(a: __m256i) -> __m256i {
        // SAFETY: see above.
        unsafe {
            if VNNI {
                _mm256_xor_si256(a, _mm256_set1_epi8(-128))
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
        start: [__m256i; M],
    ) -> [[__m256i; J]; M] {
        // SAFETY: see above.
        unsafe {
            if VNNI {
                dots_vnni::<W, Self, N, M, J>(numbers, first, x, start)
            } else {
                dots_maddubs::<W, Self, N, M, J>(numbers, first, x, start)
            }
        }
    }
}

/// The same, of which the compiler knows no origin: it keeps such bytes in a register where it would load them again for
/// each use. These machines have 16 registers and load two vectors a cycle, which is what one row's products wait for.
///
/// # Safety
/// The machine has AVX2.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn opaque(bytes: __m256i) -> __m256i {
    let mut bytes = bytes;
    // SAFETY: no instruction.
    unsafe {
        asm!("/* {} */", inout(ymm_reg) bytes, options(pure, nomem, nostack, preserves_flags));
    };
    bytes
}

/// Rows `first..first + 4`, transposed within each quarter of 128 bits.
///
/// # Safety
/// The machine has AVX2.
#[inline(always)]
unsafe fn quarters(rows: [__m256; GROUP], first: usize) -> [__m256; 4] {
    // SAFETY: the caller's.
    unsafe {
        let [a, b, c, d] = [0, 1, 2, 3].map(|i| rows[first + i]);
        let (ab, cd) = (_mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(c, d));
        let (ab_high, cd_high) = (_mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(c, d));
        [
            _mm256_shuffle_ps::<0x44>(ab, cd),
            _mm256_shuffle_ps::<0xee>(ab, cd),
            _mm256_shuffle_ps::<0x44>(ab_high, cd_high),
            _mm256_shuffle_ps::<0xee>(ab_high, cd_high),
        ]
    }
}

/// Four columns of a row of the input, for every lane.
///
/// # Safety
/// Four bytes are readable; the machine has AVX2.
#[inline(always)]
unsafe fn four(x: *const i8) -> __m256i {
    // SAFETY: the caller's.
    unsafe { _mm256_set1_epi32(x.cast::<i32>().read_unaligned()) }
}

/// The step that is `index`th in the best order.
#[inline(always)]
fn ordered<W: Numbers<S>, S: Simd>(index: usize) -> usize {
    match W::ORDER {
        Some(order) => order[index],
        None => index,
    }
}

/// `$step` for each of N steps, unrolled here: where steps differ, the compiler leaves a loop with branches.
macro_rules! unrolled {
    ($n:ident, $index:ident => $step:block) => { unrolled!($n, $index => $step; 0, 1, 2, 3, 4, 5, 6, 7) };
    ($n:ident, $index:ident => $step:block; $($value:literal),*) => {
        $(if $value < $n {
            let $index: usize = $value;
            $step
        })*
    };
}

/// # Safety
/// As `Simd::dots`; the machine has AVX-VNNI.
#[inline(always)]
unsafe fn dots_vnni<
    W: Numbers<S>,
    S: Simd<B = __m256i>,
    const N: usize,
    const M: usize,
    const J: usize,
>(
    numbers: &W,
    first: usize,
    x: &[*const i8; M],
    start: [__m256i; M],
) -> [[__m256i; J]; M] {
    // SAFETY: the caller's.
    unsafe {
        let mut sums = [[start[0]; J]; M];
        for m in 1..M {
            sums[m] = [start[m]; J];
        }
        if M > 1 && W::BITS != 6 {
            for index in 0..N {
                add_vnni::<W, S, M, J>(numbers, first + index, x, &mut sums);
            }
        } else {
            unrolled!(N, index => { add_vnni::<W, S, M, J>(numbers, first + index, x, &mut sums) });
        }
        sums
    }
}

/// Add a step's products, the `index`th in the best order.
///
/// # Safety
/// As `dots_vnni`.
#[inline(always)]
unsafe fn add_vnni<W: Numbers<S>, S: Simd<B = __m256i>, const M: usize, const J: usize>(
    numbers: &W,
    index: usize,
    x: &[*const i8; M],
    sums: &mut [[__m256i; J]; M],
) {
    // SAFETY: the caller's.
    unsafe {
        let step = ordered::<W, S>(index);
        let mut bytes = [_mm256_setzero_si256(); J];
        for j in 0..J {
            bytes[j] = numbers.step(j, step);
        }
        for m in 0..M {
            let four = four(x[m].add(4 * step));
            for j in 0..J {
                sums[m][j] = _mm256_dpbusd_avx_epi32(sums[m][j], bytes[j], four);
            }
        }
    }
}

/// Pairs of products are summed in 16 bits for as many steps as surely fit, then in 32.
///
/// # Safety
/// As `Simd::dots`.
#[inline(always)]
unsafe fn dots_maddubs<
    W: Numbers<S>,
    S: Simd<B = __m256i>,
    const N: usize,
    const M: usize,
    const J: usize,
>(
    numbers: &W,
    first: usize,
    x: &[*const i8; M],
    start: [__m256i; M],
) -> [[__m256i; J]; M] {
    // SAFETY: the caller's.
    unsafe {
        let run = const { steps_in_16_bits(W::BITS) };
        let mut sums = [[start[0]; J]; M];
        for m in 1..M {
            sums[m] = [start[m]; J];
        }
        let mut short = [[_mm256_setzero_si256(); J]; M];
        if M > 1 && run >= N {
            for index in 0..N {
                add_maddubs::<W, S, M, J>(numbers, first + index, x, &mut short);
            }
            widen(&mut short, &mut sums);
        } else {
            unrolled!(N, index => {
                add_maddubs::<W, S, M, J>(numbers, first + index, x, &mut short);
                if (index + 1).is_multiple_of(run) || index + 1 == N {
                    widen(&mut short, &mut sums);
                }
            });
        }
        sums
    }
}

/// Add a step's products, the `index`th in the best order, in 16 bits.
///
/// # Safety
/// As `dots_maddubs`.
#[inline(always)]
unsafe fn add_maddubs<W: Numbers<S>, S: Simd<B = __m256i>, const M: usize, const J: usize>(
    numbers: &W,
    index: usize,
    x: &[*const i8; M],
    short: &mut [[__m256i; J]; M],
) {
    // SAFETY: the caller's.
    unsafe {
        let step = ordered::<W, S>(index);
        let mut bytes = [_mm256_setzero_si256(); J];
        for j in 0..J {
            bytes[j] = numbers.step(j, step);
        }
        for m in 0..M {
            let four = four(x[m].add(4 * step));
            for j in 0..J {
                let pairs = if W::BITS == 8 {
                    signed_pairs(bytes[j], four)
                } else {
                    _mm256_maddubs_epi16(bytes[j], four)
                };
                short[m][j] = _mm256_add_epi16(short[m][j], pairs);
            }
        }
    }
}

/// Add what was summed in 16 bits, which are zero then.
///
/// # Safety
/// The machine has AVX2.
#[inline(always)]
unsafe fn widen<const M: usize, const J: usize>(
    short: &mut [[__m256i; J]; M],
    sums: &mut [[__m256i; J]; M],
) {
    // SAFETY: the caller's.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        for m in 0..M {
            for j in 0..J {
                let wide = _mm256_madd_epi16(short[m][j], ones);
                sums[m][j] = _mm256_add_epi32(sums[m][j], wide);
                short[m][j] = _mm256_setzero_si256();
            }
        }
    }
}

/// Products of int8 with int8 between -127 and 127, summed in pairs. The first give their sign to the second:
/// 128 * 127 * 2 still fits.
///
/// # Safety
/// The machine has AVX2.
#[inline(always)]
unsafe fn signed_pairs(bytes: __m256i, x: __m256i) -> __m256i {
    // SAFETY: the caller's.
    unsafe { _mm256_maddubs_epi16(_mm256_abs_epi8(bytes), _mm256_sign_epi8(x, bytes)) }
}
