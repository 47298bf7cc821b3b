//! Eight lanes in plain Rust; the compiler vectorizes for the target's baseline.

use super::{GROUP, Numbers, Simd};
use crate::element::{Bf16, Element, F16, Rounded};

/// Any machine.
#[derive(Clone, Copy)]
pub struct Portable;

type V8 = [f32; 8];

#[inline(always)]
fn map2(a: V8, b: V8, f: impl Fn(f32, f32) -> f32) -> V8 {
    std::array::from_fn(|i| f(a[i], b[i]))
}

impl Simd for Portable {
    type V = V8;
    type I = [i32; 8];
    type B = [u8; 32];
    const LANES: usize = 8;
    const TILE: usize = 1;
    const FLOAT_TILE: (usize, usize) = (2, 1);
    const BIAS: i32 = 0;
    const INTEGER_TILES: [(usize, usize); 5] = [(2, 1); 5];

    #[inline(always)]
    unsafe fn splat(value: f32) -> V8 {
        [value; 8]
    }

    #[inline(always)]
    unsafe fn load(source: *const f32) -> V8 {
        // SAFETY: the caller's; unaligned reads are asked for.
        unsafe { source.cast::<V8>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(target: *mut f32, value: V8) {
        // SAFETY: the caller's; an unaligned write is asked for.
        unsafe { target.cast::<V8>().write_unaligned(value) }
    }

    #[inline(always)]
    unsafe fn load_bf16(source: *const u16) -> V8 {
        // SAFETY: the caller's.
        let bits = unsafe { source.cast::<[u16; 8]>().read_unaligned() };
        bits.map(|b| Bf16(b).to_f32())
    }

    #[inline(always)]
    unsafe fn store_bf16(target: *mut u16, value: V8) {
        // SAFETY: the caller's.
        unsafe {
            target
                .cast::<[u16; 8]>()
                .write_unaligned(value.map(|x| Bf16::from_f32(x).0));
        }
    }

    #[inline(always)]
    unsafe fn load_f16(source: *const u16) -> V8 {
        // SAFETY: the caller's.
        let bits = unsafe { source.cast::<[u16; 8]>().read_unaligned() };
        bits.map(|b| F16(b).to_f32())
    }

    #[inline(always)]
    unsafe fn store_f16(target: *mut u16, value: V8) {
        // SAFETY: the caller's.
        unsafe {
            target
                .cast::<[u16; 8]>()
                .write_unaligned(value.map(|x| F16::from_f32(x).0));
        }
    }

    #[inline(always)]
    unsafe fn add(a: V8, b: V8) -> V8 {
        map2(a, b, |x, y| x + y)
    }

    #[inline(always)]
    unsafe fn sub(a: V8, b: V8) -> V8 {
        map2(a, b, |x, y| x - y)
    }

    #[inline(always)]
    unsafe fn mul(a: V8, b: V8) -> V8 {
        map2(a, b, |x, y| x * y)
    }

    #[inline(always)]
    unsafe fn div(a: V8, b: V8) -> V8 {
        map2(a, b, |x, y| x / y)
    }

    #[inline(always)]
    unsafe fn fma(a: V8, b: V8, c: V8) -> V8 {
        // Not mul_add: without the instruction that is a library call.
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }

    #[inline(always)]
    unsafe fn max(a: V8, b: V8) -> V8 {
        map2(a, b, |x, y| if x > y { x } else { y })
    }

    #[inline(always)]
    unsafe fn select_le(a: V8, b: V8, x: V8, y: V8) -> V8 {
        std::array::from_fn(|i| if a[i] <= b[i] { x[i] } else { y[i] })
    }

    #[inline(always)]
    unsafe fn sum(a: V8) -> f32 {
        ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))
    }

    #[inline(always)]
    unsafe fn greatest(a: V8) -> f32 {
        a.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }

    #[inline(always)]
    unsafe fn transpose(rows: [V8; GROUP]) -> [V8; GROUP] {
        std::array::from_fn(|column| std::array::from_fn(|row| rows[row][column % 8]))
    }

    #[inline(always)]
    unsafe fn round(a: V8) -> V8 {
        // Adding and taking away 1.5 * 2^23 rounds to nearest even where |a| < 2^22; exp2's arguments are below 2^7.
        a.map(|x| (x + 12_582_912.0) - 12_582_912.0)
    }

    #[inline(always)]
    unsafe fn scale_by_power(a: V8, n: V8) -> V8 {
        map2(a, n, |x, n| {
            x * f32::from_bits(((n as i32 + 127) << 23) as u32)
        })
    }

    #[inline(always)]
    unsafe fn load_u8(source: *const u8) -> V8 {
        // SAFETY: the caller's.
        unsafe { source.cast::<[u8; 8]>().read_unaligned() }.map(f32::from)
    }

    #[inline(always)]
    unsafe fn load_i8(source: *const i8) -> V8 {
        // SAFETY: the caller's.
        unsafe { source.cast::<[i8; 8]>().read_unaligned() }.map(f32::from)
    }

    #[inline(always)]
    unsafe fn splat_i32(value: i32) -> [i32; 8] {
        [value; 8]
    }

    #[inline(always)]
    unsafe fn add_i32(a: [i32; 8], b: [i32; 8]) -> [i32; 8] {
        std::array::from_fn(|i| a[i].wrapping_add(b[i]))
    }

    #[inline(always)]
    unsafe fn max_i32(a: [i32; 8], b: [i32; 8]) -> [i32; 8] {
        std::array::from_fn(|i| a[i].max(b[i]))
    }

    #[inline(always)]
    unsafe fn sum_i32(a: [i32; 8]) -> i32 {
        a.into_iter().fold(0, i32::wrapping_add)
    }

    #[inline(always)]
    unsafe fn greatest_i32(a: [i32; 8]) -> i32 {
        a.into_iter().fold(i32::MIN, i32::max)
    }

    #[inline(always)]
    unsafe fn magnitude(a: V8) -> [i32; 8] {
        a.map(|a| (a.to_bits() & 0x7fff_ffff).cast_signed())
    }

    #[inline(always)]
    unsafe fn to_float(a: [i32; 8]) -> V8 {
        a.map(|a| a as f32)
    }

    #[inline(always)]
    unsafe fn to_i32(a: V8) -> [i32; 8] {
        // SAFETY: of any numbers.
        unsafe { Self::round(a) }.map(|a| a as i32)
    }

    #[inline(always)]
    unsafe fn store_i8(target: *mut i8, a: [i32; 8]) {
        // SAFETY: the caller's.
        unsafe { target.cast::<[i8; 8]>().write_unaligned(a.map(|a| a as i8)) }
    }

    #[inline(always)]
    unsafe fn load_bytes(source: *const u8) -> [u8; 32] {
        // SAFETY: the caller's.
        unsafe { source.cast::<[u8; 32]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store_bytes(target: *mut u8, value: [u8; 32]) {
        // SAFETY: the caller's.
        unsafe { target.cast::<[u8; 32]>().write_unaligned(value) }
    }

    #[inline(always)]
    unsafe fn splat_bytes(value: u8) -> [u8; 32] {
        [value; 32]
    }

    #[inline(always)]
    unsafe fn xor(a: [u8; 32], b: [u8; 32]) -> [u8; 32] {
        std::array::from_fn(|i| a[i] ^ b[i])
    }

    #[inline(always)]
    unsafe fn and(a: [u8; 32], mask: [u8; 32]) -> [u8; 32] {
        std::array::from_fn(|i| a[i] & mask[i])
    }

    #[inline(always)]
    unsafe fn and_not(a: [u8; 32], mask: [u8; 32]) -> [u8; 32] {
        std::array::from_fn(|i| a[i] & !mask[i])
    }

    #[inline(always)]
    unsafe fn shift_right<const BITS: i32>(a: [u8; 32]) -> [u8; 32] {
        a.map(|a| a >> BITS)
    }

    #[inline(always)]
    unsafe fn bias(a: [u8; 32]) -> [u8; 32] {
        a
    }

    #[inline(always)]
    unsafe fn dots<W: Numbers<Self>, const N: usize, const M: usize, const J: usize>(
        numbers: &W,
        first: usize,
        x: &[*const i8; M],
        start: [[i32; 8]; M],
    ) -> [[[i32; 8]; J]; M] {
        let mut sums = [[start[0]; J]; M];
        for m in 1..M {
            sums[m] = [start[m]; J];
        }
        for step in first..first + N {
            for j in 0..J {
                // SAFETY: the caller's.
                let bytes = unsafe { numbers.step(j, step) };
                let wide = bytes.map(|byte| {
                    if W::BITS == 8 {
                        i16::from(byte.cast_signed())
                    } else {
                        i16::from(byte)
                    }
                });
                for m in 0..M {
                    // SAFETY: the caller's.
                    let four = unsafe { x[m].add(4 * step).cast::<[i8; 4]>().read_unaligned() };
                    let four = four.map(i16::from);
                    for lane in 0..8 {
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
