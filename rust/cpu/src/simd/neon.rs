//! Four lanes with NEON; byte products widened, or with `sdot` where the machine has it.
//!
//! Conversions of f16 and `sdot` are written as instructions: the compiler's own functions for them are not stable.

#[allow(clippy::wildcard_imports)] // intrinsics carry their own prefix
use std::arch::aarch64::*;
use std::arch::asm;

use super::{GROUP, Numbers, Simd};

/// NEON; `dots` needs the dot product instructions if `DOT`.
#[derive(Clone, Copy)]
pub struct Quad<const DOT: bool>;

pub type Neon = Quad<false>;
pub type NeonDot = Quad<true>;

// SAFETY (all blocks below): `Simd`'s contract: the machine has the instructions, and pointers cover four elements.
impl<const DOT: bool> Simd for Quad<DOT> {
    type V = float32x4_t;
    type I = int32x4_t;
    type B = uint8x16_t;
    const LANES: usize = 4;
    const TILE: usize = 4;
    const INTEGER_TILES: [(usize, usize); 5] = [(4, 1); 5];
    const FLOAT_TILE: (usize, usize) = (6, 1);
    const BIAS: i32 = 0;

    #[inline(always)]
    unsafe fn splat(value: f32) -> float32x4_t {
        // SAFETY: see above.
        unsafe { vdupq_n_f32(value) }
    }

    #[inline(always)]
    unsafe fn load(source: *const f32) -> float32x4_t {
        // SAFETY: see above.
        unsafe { vld1q_f32(source) }
    }

    #[inline(always)]
    unsafe fn store(target: *mut f32, value: float32x4_t) {
        // SAFETY: see above.
        unsafe { vst1q_f32(target, value) }
    }

    #[inline(always)]
    unsafe fn load_bf16(source: *const u16) -> float32x4_t {
        // SAFETY: see above.
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(source))) }
    }

    #[inline(always)]
    unsafe fn store_bf16(target: *mut u16, value: float32x4_t) {
        // SAFETY: see above.
        unsafe {
            let bits = vreinterpretq_u32_f32(value);
            let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
            let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
            let is_number = vceqq_f32(value, value);
            let high = vbslq_u32(is_number, vshrq_n_u32::<16>(rounded), vdupq_n_u32(0x7fc0));
            vst1_u16(target, vmovn_u32(high));
        }
    }

    #[inline(always)]
    unsafe fn load_f16(source: *const u16) -> float32x4_t {
        // SAFETY: see above; the instruction touches no memory.
        unsafe {
            let half = vld1_u16(source);
            let wide: float32x4_t;
            asm!("fcvtl {0:v}.4s, {1:v}.4h", out(vreg) wide, in(vreg) half, options(pure, nomem, nostack, preserves_flags));
            wide
        }
    }

    #[inline(always)]
    unsafe fn store_f16(target: *mut u16, value: float32x4_t) {
        // SAFETY: see above; the instruction touches no memory.
        unsafe {
            let half: uint16x4_t;
            asm!("fcvtn {0:v}.4h, {1:v}.4s", out(vreg) half, in(vreg) value, options(pure, nomem, nostack, preserves_flags));
            vst1_u16(target, half);
        }
    }

    #[inline(always)]
    unsafe fn load_u8(source: *const u8) -> float32x4_t {
        // SAFETY: see above.
        unsafe {
            let four = u64::from(source.cast::<u32>().read_unaligned());
            let wide = vget_low_u16(vmovl_u8(vcreate_u8(four)));
            vcvtq_f32_u32(vmovl_u16(wide))
        }
    }

    #[inline(always)]
    unsafe fn load_i8(source: *const i8) -> float32x4_t {
        // SAFETY: see above.
        unsafe {
            let four = u64::from(source.cast::<u32>().read_unaligned());
            let wide = vget_low_s16(vmovl_s8(vcreate_s8(four)));
            vcvtq_f32_s32(vmovl_s16(wide))
        }
    }

    #[inline(always)]
    unsafe fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: see above.
        unsafe { vaddq_f32(a, b) }
    }

    #[inline(always)]
    unsafe fn sub(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: see above.
        unsafe { vsubq_f32(a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: see above.
        unsafe { vmulq_f32(a, b) }
    }

    #[inline(always)]
    unsafe fn div(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: see above.
        unsafe { vdivq_f32(a, b) }
    }

    #[inline(always)]
    unsafe fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        // SAFETY: see above.
        unsafe { vfmaq_f32(c, a, b) }
    }

    #[inline(always)]
    unsafe fn max(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: see above.
        unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
    }

    #[inline(always)]
    unsafe fn select_le(
        a: float32x4_t,
        b: float32x4_t,
        x: float32x4_t,
        y: float32x4_t,
    ) -> float32x4_t {
        // SAFETY: see above.
        unsafe { vbslq_f32(vcleq_f32(a, b), x, y) }
    }

    #[inline(always)]
    unsafe fn sum(a: float32x4_t) -> f32 {
        // SAFETY: see above.
        unsafe { vaddv_f32(vadd_f32(vget_low_f32(a), vget_high_f32(a))) }
    }

    #[inline(always)]
    unsafe fn greatest(a: float32x4_t) -> f32 {
        // SAFETY: see above.
        unsafe { vmaxnmvq_f32(a) }
    }

    #[inline(always)]
    unsafe fn transpose(rows: [float32x4_t; GROUP]) -> [float32x4_t; GROUP] {
        // SAFETY: see above.
        unsafe {
            let even = [vtrn1q_f32(rows[0], rows[1]), vtrn1q_f32(rows[2], rows[3])];
            let odd = [vtrn2q_f32(rows[0], rows[1]), vtrn2q_f32(rows[2], rows[3])];
            let mut columns = rows;
            for (column, pair) in [even, odd].into_iter().enumerate() {
                let [a, b] = pair.map(|rows| vreinterpretq_f64_f32(rows));
                columns[column] = vreinterpretq_f32_f64(vtrn1q_f64(a, b));
                columns[column + 2] = vreinterpretq_f32_f64(vtrn2q_f64(a, b));
            }
            columns
        }
    }

    #[inline(always)]
    unsafe fn round(a: float32x4_t) -> float32x4_t {
        // SAFETY: see above.
        unsafe { vrndnq_f32(a) }
    }

    #[inline(always)]
    unsafe fn scale_by_power(a: float32x4_t, n: float32x4_t) -> float32x4_t {
        // SAFETY: see above.
        unsafe {
            let exponent = vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127));
            vmulq_f32(a, vreinterpretq_f32_s32(vshlq_n_s32::<23>(exponent)))
        }
    }

    #[inline(always)]
    unsafe fn splat_i32(value: i32) -> int32x4_t {
        // SAFETY: see above.
        unsafe { vdupq_n_s32(value) }
    }

    #[inline(always)]
    unsafe fn add_i32(a: int32x4_t, b: int32x4_t) -> int32x4_t {
        // SAFETY: see above.
        unsafe { vaddq_s32(a, b) }
    }

    #[inline(always)]
    unsafe fn max_i32(a: int32x4_t, b: int32x4_t) -> int32x4_t {
        // SAFETY: see above.
        unsafe { vmaxq_s32(a, b) }
    }

    #[inline(always)]
    unsafe fn sum_i32(a: int32x4_t) -> i32 {
        // SAFETY: see above.
        unsafe { vaddvq_s32(a) }
    }

    #[inline(always)]
    unsafe fn greatest_i32(a: int32x4_t) -> i32 {
        // SAFETY: see above.
        unsafe { vmaxvq_s32(a) }
    }

    #[inline(always)]
    unsafe fn magnitude(a: float32x4_t) -> int32x4_t {
        // SAFETY: see above.
        unsafe { vandq_s32(vreinterpretq_s32_f32(a), vdupq_n_s32(0x7fff_ffff)) }
    }

    #[inline(always)]
    unsafe fn to_float(a: int32x4_t) -> float32x4_t {
        // SAFETY: see above.
        unsafe { vcvtq_f32_s32(a) }
    }

    #[inline(always)]
    unsafe fn to_i32(a: float32x4_t) -> int32x4_t {
        // SAFETY: see above.
        unsafe { vcvtnq_s32_f32(a) }
    }

    #[inline(always)]
    unsafe fn store_i8(target: *mut i8, a: int32x4_t) {
        // SAFETY: see above.
        unsafe {
            let words = vmovn_s32(a);
            let bytes = vmovn_s16(vcombine_s16(words, words));
            let four = vget_lane_u32::<0>(vreinterpret_u32_s8(bytes));
            target.cast::<u32>().write_unaligned(four);
        }
    }

    #[inline(always)]
    unsafe fn load_bytes(source: *const u8) -> uint8x16_t {
        // SAFETY: see above.
        unsafe { vld1q_u8(source) }
    }

    #[inline(always)]
    unsafe fn store_bytes(target: *mut u8, value: uint8x16_t) {
        // SAFETY: see above.
        unsafe { vst1q_u8(target, value) }
    }

    #[inline(always)]
    unsafe fn splat_bytes(value: u8) -> uint8x16_t {
        // SAFETY: see above.
        unsafe { vdupq_n_u8(value) }
    }

    #[inline(always)]
    unsafe fn xor(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t {
        // SAFETY: see above.
        unsafe { veorq_u8(a, b) }
    }

    #[inline(always)]
    unsafe fn and(a: uint8x16_t, mask: uint8x16_t) -> uint8x16_t {
        // SAFETY: see above.
        unsafe { vandq_u8(a, mask) }
    }

    #[inline(always)]
    unsafe fn and_not(a: uint8x16_t, mask: uint8x16_t) -> uint8x16_t {
        // SAFETY: see above.
        unsafe { vbicq_u8(a, mask) }
    }

    #[inline(always)]
    unsafe fn shift_right<const BITS: i32>(a: uint8x16_t) -> uint8x16_t {
        // SAFETY: see above.
        unsafe { vshrq_n_u8::<BITS>(a) }
    }

    #[inline(always)]
    unsafe fn bias(a: uint8x16_t) -> uint8x16_t {
        a
    }

    #[inline(always)]
    unsafe fn dots<W: Numbers<Self>, const N: usize, const M: usize, const J: usize>(
        numbers: &W,
        first: usize,
        x: &[*const i8; M],
        start: [int32x4_t; M],
    ) -> [[int32x4_t; J]; M] {
        // SAFETY: see above.
        unsafe {
            let mut sums = [[start[0]; J]; M];
            for m in 1..M {
                sums[m] = [start[m]; J];
            }
            for step in first..first + N {
                let mut bytes = [vdupq_n_s8(0); J];
                for j in 0..J {
                    // Fewer than eight bits are no negative numbers.
                    bytes[j] = vreinterpretq_s8_u8(numbers.step(j, step));
                }
                for m in 0..M {
                    let four = x[m].add(4 * step).cast::<i32>().read_unaligned();
                    let four = vreinterpretq_s8_s32(vdupq_n_s32(four));
                    for j in 0..J {
                        sums[m][j] = if DOT {
                            dot(sums[m][j], bytes[j], four)
                        } else {
                            widened_dot(sums[m][j], bytes[j], four)
                        };
                    }
                }
            }
            sums
        }
    }
}

/// sum + the products of four bytes a lane.
///
/// # Safety
/// The machine has the dot product instructions.
#[inline(always)]
unsafe fn dot(sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    let mut sum = sum;
    // SAFETY: the caller's; the instruction touches no memory.
    unsafe {
        asm!("sdot {0:v}.4s, {1:v}.16b, {2:v}.16b", inlateout(vreg) sum, in(vreg) a, in(vreg) b, options(pure, nomem, nostack, preserves_flags));
    }
    sum
}

/// The same with products in 16 bits: two of int8 with int8 between -127 and 127 fit.
///
/// # Safety
/// The machine has NEON.
#[inline(always)]
unsafe fn widened_dot(sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: the caller's.
    unsafe {
        let low = vmull_s8(vget_low_s8(a), vget_low_s8(b));
        vpadalq_s16(sum, vpaddq_s16(low, vmull_high_s8(a, b)))
    }
}
