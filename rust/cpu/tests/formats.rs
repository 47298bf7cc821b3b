//! Half-precision conversions, over every bit pattern.

use octavo_cpu::element::{Bf16, Element, F16, Rounded};

/// IEEE binary16 from its definition.
fn half(bits: u16) -> f64 {
    let (sign, exponent, fraction) = (
        bits >> 15,
        i32::from(bits >> 10 & 31),
        f64::from(bits & 1023),
    );
    let magnitude = match exponent {
        0 => fraction * 2f64.powi(-24),
        31 if fraction == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (1.0 + fraction / 1024.0) * 2f64.powi(exponent - 15),
    };
    if sign == 1 { -magnitude } else { magnitude }
}

#[test]
fn every_half_widens_and_comes_back() {
    for bits in 0..=u16::MAX {
        let (want, got) = (half(bits), F16(bits).to_f32());
        assert!(
            f64::from(got).to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()),
            "{bits:#x}"
        );
        if !want.is_nan() {
            assert_eq!(F16::from_f32(got).0, bits);
        }
        let bf = Bf16(bits).to_f32();
        if !bf.is_nan() {
            assert_eq!(Bf16::from_f32(bf).0, bits);
        }
    }
    assert!(F16::from_f32(f32::NAN).to_f32().is_nan());
    assert!(
        Bf16::from_f32(f32::from_bits(0x7fff_ffff))
            .to_f32()
            .is_nan()
    );
}

#[test]
fn between_two_halves_the_nearer_is_taken_and_ties_go_to_even() {
    for bits in 0..0x7c00u16 {
        // Above the greatest half the next step would be 65536.
        let (low, high) = (
            half(bits),
            if bits == 0x7bff {
                65536.0
            } else {
                half(bits + 1)
            },
        );
        let middle = f64::midpoint(low, high);
        let even = if bits % 2 == 0 { bits } else { bits + 1 };
        assert_eq!(F16::from_f32(middle as f32).0, even, "{bits:#x}");
        assert_eq!(
            F16::from_f32((middle as f32).next_down()).0,
            bits,
            "{bits:#x}"
        );
        assert_eq!(
            F16::from_f32((middle as f32).next_up()).0,
            bits + 1,
            "{bits:#x}"
        );
        assert_eq!(
            F16::from_f32(-(middle as f32)).0,
            even | 0x8000,
            "{bits:#x}"
        );
    }
}

#[test]
fn bf16_rounds_to_nearest_even() {
    assert_eq!(Bf16::from_f32(f32::from_bits(0x3f80_8000)).0, 0x3f80);
    assert_eq!(Bf16::from_f32(f32::from_bits(0x3f81_8000)).0, 0x3f82);
    assert_eq!(Bf16::from_f32(f32::from_bits(0x3f80_8001)).0, 0x3f81);
    assert_eq!(Bf16::from_f32(f32::MAX).0, 0x7f80);
}
