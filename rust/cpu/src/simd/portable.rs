//! Eight lanes in plain Rust; the compiler vectorizes for the target's baseline.

use super::Simd;
use crate::element::{Bf16, Element, F16};

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
    const LANES: usize = 8;
    const TILE: usize = 1;

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
        ((a[0] + a[4]) + (a[1] + a[5])) + ((a[2] + a[6]) + (a[3] + a[7]))
    }

    #[inline(always)]
    unsafe fn greatest(a: V8) -> f32 {
        a.into_iter().fold(f32::NEG_INFINITY, f32::max)
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
}
