//! Sixteen lanes with AVX-512 (F, BW, VL, DQ); byte products with VNNI, or with AMX's tiles where rows are many.

#[allow(clippy::wildcard_imports)] // intrinsics carry their own prefix
use std::arch::x86_64::*;

use super::amx;
use super::avx2::Avx2;
use super::{GROUP, Numbers, Simd};

/// AVX-512 F, BW, VL, DQ; `dots` needs VNNI too, and AMX if `TILES`.
#[derive(Clone, Copy)]
pub struct Zmm<const TILES: bool>;

pub type Avx512 = Zmm<false>;
pub type Amx = Zmm<true>;

// SAFETY (all blocks below): `Simd`'s contract: the machine has the instructions, and pointers cover sixteen elements.
impl<const TILES: bool> Simd for Zmm<TILES> {
    type V = __m512;
    type I = __m512i;
    type B = __m512i;
    const LANES: usize = 16;
    const TILE: usize = 4;
    const FLOAT_TILE: (usize, usize) = (12, 2);
    const BIAS: i32 = 128;
    const INTEGER_TILES: [(usize, usize); 5] = [if TILES {
        (amx::ROWS, amx::VECTORS)
    } else {
        (6, 2)
    }; 5];
    const PANEL_ROWS: usize = if TILES { amx::ROWS } else { usize::MAX };

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
        unsafe {
            let high = _mm512_extractf32x8_ps::<1>(a);
            Avx2::sum(_mm256_add_ps(_mm512_castps512_ps256(a), high))
        }
    }

    #[inline(always)]
    unsafe fn greatest(a: __m512) -> f32 {
        // SAFETY: see above.
        unsafe { _mm512_reduce_max_ps(a) }
    }

    #[inline(always)]
    unsafe fn transpose(rows: [__m512; GROUP]) -> [__m512; GROUP] {
        // SAFETY: see above.
        unsafe {
            // Not a closure, which would not be compiled for the instructions.
            let fours = [
                quarters(rows, 0),
                quarters(rows, 4),
                quarters(rows, 8),
                quarters(rows, 12),
            ];
            let mut columns = rows;
            for c in 0..4 {
                let (a, b) = (fours[0][c], fours[1][c]);
                let (x, y) = (fours[2][c], fours[3][c]);
                let (even, odd) = (even_quarters(a, b), odd_quarters(a, b));
                let (even_low, odd_low) = (even_quarters(x, y), odd_quarters(x, y));
                columns[c] = even_quarters(even, even_low);
                columns[c + 4] = even_quarters(odd, odd_low);
                columns[c + 8] = odd_quarters(even, even_low);
                columns[c + 12] = odd_quarters(odd, odd_low);
            }
            columns
        }
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
    unsafe fn splat_bytes(value: u8) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_set1_epi8(value.cast_signed()) }
    }

    #[inline(always)]
    unsafe fn xor(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_xor_si512(a, b) }
    }

    #[inline(always)]
    unsafe fn and(a: __m512i, mask: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_and_si512(a, mask) }
    }

    #[inline(always)]
    unsafe fn and_not(a: __m512i, mask: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_andnot_si512(mask, a) }
    }

    #[inline(always)]
    unsafe fn shift_right<const BITS: i32>(a: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_srl_epi16(a, _mm_cvtsi32_si128(BITS)) }
    }

    #[inline(always)]
    unsafe fn bias(a: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_xor_si512(a, _mm512_set1_epi8(-128)) }
    }

    unsafe fn begin() {
        if TILES {
            // SAFETY: see above.
            unsafe { amx::begin() };
        }
    }

    unsafe fn end() {
        if TILES {
            // SAFETY: see above.
            unsafe { amx::end() };
        }
    }

    #[inline(always)]
    unsafe fn dots<W: Numbers<Self>, const N: usize, const M: usize, const J: usize>(
        numbers: &W,
        first: usize,
        x: &[*const i8; M],
        start: [__m512i; M],
    ) -> [[__m512i; J]; M] {
        // SAFETY: see above; whoever has panels has called `begin`.
        unsafe {
            if TILES
                && M == amx::ROWS
                && J == amx::VECTORS
                && let Some((steps, stride)) = numbers.steps()
            {
                dots_tiles::<N, M, J>(steps.add(first * stride), stride, first, x, start)
            } else {
                dots_vnni::<W, Self, N, M, J>(numbers, first, x, start)
            }
        }
    }
}

/// # Safety
/// As `Simd::dots`; the machine has VNNI.
#[inline(always)]
unsafe fn dots_vnni<
    W: Numbers<S>,
    S: Simd<B = __m512i>,
    const N: usize,
    const M: usize,
    const J: usize,
>(
    numbers: &W,
    first: usize,
    x: &[*const i8; M],
    start: [__m512i; M],
) -> [[__m512i; J]; M] {
    // SAFETY: the caller's.
    unsafe {
        let mut sums = [[start[0]; J]; M];
        for m in 1..M {
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

/// # Safety
/// As `amx::multiply`, of `amx::ROWS` rows and `amx::VECTORS` vectors from step `first` on.
#[inline(always)]
unsafe fn dots_tiles<const N: usize, const M: usize, const J: usize>(
    steps: *const u8,
    stride: usize,
    first: usize,
    x: &[*const i8; M],
    start: [__m512i; M],
) -> [[__m512i; J]; M] {
    let mut tile = amx::Sums([[[0; 16]; amx::VECTORS]; amx::ROWS]);
    // SAFETY: the caller's.
    unsafe {
        let x_stride = x[1].offset_from(x[0]);
        amx::multiply::<N>(x[0].add(4 * first), x_stride, steps, stride, &mut tile);
        let mut sums = [[start[0]; J]; M];
        for m in 0..M {
            for j in 0..J {
                let sum = _mm512_load_si512(tile.0[m][j].as_ptr().cast());
                sums[m][j] = _mm512_add_epi32(start[m], sum);
            }
        }
        sums
    }
}

/// Rows `first..first + 4`, transposed within each quarter of 128 bits.
///
/// # Safety
/// The machine has AVX-512.
#[inline(always)]
unsafe fn quarters(rows: [__m512; GROUP], first: usize) -> [__m512; 4] {
    // SAFETY: the caller's.
    unsafe {
        let [a, b, c, d] = [0, 1, 2, 3].map(|i| rows[first + i]);
        let (ab, cd) = (_mm512_unpacklo_ps(a, b), _mm512_unpacklo_ps(c, d));
        let (ab_high, cd_high) = (_mm512_unpackhi_ps(a, b), _mm512_unpackhi_ps(c, d));
        [
            _mm512_shuffle_ps::<0x44>(ab, cd),
            _mm512_shuffle_ps::<0xee>(ab, cd),
            _mm512_shuffle_ps::<0x44>(ab_high, cd_high),
            _mm512_shuffle_ps::<0xee>(ab_high, cd_high),
        ]
    }
}

/// Quarters 0 and 2 of a, then of b.
///
/// # Safety
/// The machine has AVX-512.
#[inline(always)]
unsafe fn even_quarters(a: __m512, b: __m512) -> __m512 {
    // SAFETY: the caller's.
    unsafe { _mm512_shuffle_f32x4::<0x88>(a, b) }
}

/// Quarters 1 and 3 of a, then of b.
///
/// # Safety
/// The machine has AVX-512.
#[inline(always)]
unsafe fn odd_quarters(a: __m512, b: __m512) -> __m512 {
    // SAFETY: the caller's.
    unsafe { _mm512_shuffle_f32x4::<0xdd>(a, b) }
}
