//! Small functions over rows of f32: norms, rotations, activations. Plain loops, which the compiler makes vectors of, as
//! wide as the machine has them; never fused multiply-adds, so that every machine gets the same bits.

use super::description::{Activation, Rope};
use crate::isa::Isa;
use crate::simd::{Simd, by_isa};

const LANES: usize = 8;

/// Sum of squares, in eight lanes. In f64: a model's few massive activations would swallow the squares of the others.
#[inline(always)]
fn sum_of_squares(x: &[f32]) -> f64 {
    let square = |x: &f32| f64::from(*x) * f64::from(*x);
    let mut lanes = [0.0f64; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest: f64 = chunks.remainder().iter().map(square).sum();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += square(x);
        }
    }
    lanes.iter().sum::<f64>() + rest
}

by_isa! {
    fn norm[](x: &[f32], gain: &[f32], eps: f32, out: &mut [f32]) -> () = floats (rms_norm_of)
}
by_isa! {
    fn gate[](activation: Activation, gate: &mut [f32], up: &[f32]) -> () = floats (gated_of)
}

/// x / rms(x) * gain into `out`.
pub fn rms_norm(x: &[f32], gain: &[f32], eps: f32, out: &mut [f32]) {
    // SAFETY: the best instructions are the machine's.
    unsafe { norm(Isa::best())(x, gain, eps, out) }
}

/// act(gate) * up into `gate`.
pub fn gated(activation: Activation, gate_row: &mut [f32], up: &[f32]) {
    // SAFETY: as above.
    unsafe { gate(Isa::best())(activation, gate_row, up) }
}

/// # Safety
/// None: as `by_isa` has it.
#[inline(always)]
unsafe fn rms_norm_of<S: Simd>(x: &[f32], gain: &[f32], eps: f32, out: &mut [f32]) {
    let factor = inverse_rms(x, eps);
    for ((out, x), gain) in out.iter_mut().zip(x).zip(gain) {
        *out = x * factor * gain;
    }
}

/// `sum` += x / rms(x) * gain.
pub fn add_rms_norm(x: &[f32], gain: &[f32], eps: f32, sum: &mut [f32]) {
    let factor = inverse_rms(x, eps);
    for ((sum, x), gain) in sum.iter_mut().zip(x).zip(gain) {
        *sum += x * factor * gain;
    }
}

/// The same in place.
pub fn rms_norm_in_place(x: &mut [f32], gain: &[f32], eps: f32) {
    let factor = inverse_rms(x, eps);
    for (x, gain) in x.iter_mut().zip(gain) {
        *x *= factor * gain;
    }
}

#[inline(always)]
fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    (1.0 / (sum_of_squares(x) / x.len() as f64 + f64::from(eps)).sqrt()) as f32
}

/// Cosines, then sines, of a position.
pub fn cos_sin(rope: &Rope, position: usize, out: &mut [f32]) {
    let (cosines, sines) = out.split_at_mut(rope.frequencies.len());
    for ((frequency, cosine), sine) in rope.frequencies.iter().zip(cosines).zip(sines) {
        let angle = position as f32 * frequency;
        *cosine = angle.cos() * rope.factor;
        *sine = angle.sin() * rope.factor;
    }
}

/// Rotate the first dimensions of one head: pair i is (i, i + half).
pub fn rotate(head: &mut [f32], cos_sin: &[f32]) {
    let half = cos_sin.len() / 2;
    let (cosines, sines) = cos_sin.split_at(half);
    let (first, rest) = head.split_at_mut(half);
    for (((x, y), cosine), sine) in first.iter_mut().zip(rest).zip(cosines).zip(sines) {
        (*x, *y) = (*x * cosine - *y * sine, *y * cosine + *x * sine);
    }
}

/// # Safety
/// As `rms_norm_of`.
#[inline(always)]
unsafe fn gated_of<S: Simd>(activation: Activation, gate: &mut [f32], up: &[f32]) {
    let pairs = gate.iter_mut().zip(up);
    match activation {
        Activation::Silu => pairs.for_each(|(g, u)| *g = *g / (1.0 + exp(-*g)) * u),
        Activation::Gelu => {
            pairs.for_each(|(g, u)| {
                *g = 0.5 * *g * (1.0 + erf(*g * std::f32::consts::FRAC_1_SQRT_2)) * u;
            });
        }
        Activation::GeluTanh => pairs.for_each(|(g, u)| {
            let inner = (2.0 / std::f32::consts::PI).sqrt() * (*g + 0.044_715 * *g * *g * *g);
            *g = 0.5 * *g * (1.0 + tanh(inner)) * u;
        }),
        Activation::Relu => pairs.for_each(|(g, u)| *g = g.max(0.0) * u),
    }
}

/// cap * tanh(x / cap).
pub fn cap(x: &mut [f32], cap: f32) {
    for x in x {
        *x = cap * (*x / cap).tanh();
    }
}

/// e^x without branches, relative error below 3e-7.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let scaled = (x * std::f32::consts::LOG2_E).clamp(-126.0, 127.0);
    // Adding 1.5 * 2^23 rounds to an integer, which the low bits then hold.
    let shifted = scaled + 12_582_912.0;
    let fraction = scaled - (shifted - 12_582_912.0);
    let mut p = 1.525_273_4e-5f32;
    for c in [
        1.540_353e-4,
        1.333_355_8e-3,
        9.618_129e-3,
        5.550_411e-2,
        2.402_265e-1,
        std::f32::consts::LN_2,
        1.0,
    ] {
        p = p * fraction + c;
    }
    f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23))
}

#[inline(always)]
fn tanh(x: f32) -> f32 {
    1.0 - 2.0 / (exp(2.0 * x.clamp(-15.0, 15.0)) + 1.0)
}

/// The error function by Abramowitz and Stegun 7.1.26 in f64, absolute error below 1.5e-7.
#[inline(always)]
fn erf(x: f32) -> f32 {
    let z = f64::from(x.abs());
    let t = 1.0 / (1.0 + 0.327_591_1 * z);
    let p = ((((1.061_405_429 * t - 1.453_152_027) * t + 1.421_413_741) * t - 0.284_496_736) * t
        + 0.254_829_592)
        * t;
    ((1.0 - p * (-z * z).exp()) as f32).copysign(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_exact_to_a_few_bits() {
        for i in -8700..=8700 {
            let x = i as f32 / 100.0;
            let exact = f64::from(x).exp();
            assert!(
                (f64::from(exp(x)) / exact - 1.0).abs() < 4e-6,
                "{x}: {} {exact}",
                exp(x)
            );
        }
        assert!(exp(-1000.0) < 1e-37);
    }

    #[test]
    fn activations_have_their_values() {
        let cases = [
            (Activation::Silu, 1.0, 0.731_058_6),
            (Activation::Silu, -30.0, -2.807e-12),
            (Activation::Gelu, 1.0, 0.841_344_7),
            (Activation::GeluTanh, 1.0, 0.841_192),
            (Activation::Relu, -1.0, 0.0),
        ];
        for (activation, x, expected) in cases {
            let mut gate = [x];
            gated(activation, &mut gate, &[2.0]);
            assert!((gate[0] - 2.0 * expected).abs() < 1e-6, "{activation:?}");
        }
    }

    #[test]
    fn rotation_keeps_lengths_and_leaves_the_rest() {
        let rope = Rope {
            frequencies: vec![1.0, 0.1],
            factor: 1.0,
        };
        let mut table = [0.0; 4];
        cos_sin(&rope, 3, &mut table);
        let mut head = [1.0, 2.0, 0.5, -1.0, 7.0];
        rotate(&mut head, &table);
        assert!((head[0] - (3f32.cos() - 0.5 * 3f32.sin())).abs() < 1e-6);
        assert!((head[1].hypot(head[3]) - 5f32.sqrt()).abs() < 1e-6);
        assert_eq!(head[4].to_bits(), 7f32.to_bits());
    }
}
