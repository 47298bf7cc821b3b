//! Where the packed form keeps scales and minima: per group, in the order in which the kernels read them.
//!
//! `Int8`: f32 `[16]`. `Q8_0`, `Q4_0`: f16 `[blocks][16]`. `Q4_1`: f16 `[blocks][2 (scale, minimum)][16]`. `Q4_K`, `Q5_K`, per 256
//! columns: f16 `[2 (d, -dmin)][16]`, u8 `[8 blocks][2 (scale, minimum)][16]`. `Q6_K`, per 256: f16 d `[16]`, i8 `[16 half
//! blocks][16]`.

use super::gguf::k_scale;
use crate::element::{Element, F16};
use crate::matrix::format::{Format, GROUP};

/// Bytes of 16 f16.
const HALVES: usize = 2 * GROUP;

/// Store the scales of source block number `index` of row `lane` in the group's `plane`.
pub fn put(format: Format, plane: &mut [u8], lane: usize, index: usize, block: &[u8]) {
    let mut half = |at: usize, source: &[u8]| {
        plane[at + 2 * lane..][..2].copy_from_slice(&source[..2]);
    };
    match format {
        Format::Q8_0 | Format::Q4_0 => half(index * HALVES, block),
        Format::Q4_1 => {
            half(index * 2 * HALVES, block);
            half((index * 2 + 1) * HALVES, &block[2..]);
        }
        Format::Q4K | Format::Q5K => {
            half(index * 320, block);
            half(index * 320 + HALVES, &[block[2], block[3] ^ 0x80]);
            for i in 0..8 {
                let (scale, minimum) = k_scale(&block[4..16], i);
                let at = index * 320 + 2 * HALVES + i * 2 * GROUP + lane;
                plane[at] = scale;
                plane[at + GROUP] = minimum;
            }
        }
        Format::Q6K => {
            half(index * 288, &block[208..]);
            for (i, &scale) in block[192..208].iter().enumerate() {
                plane[index * 288 + HALVES + i * GROUP + lane] = scale;
            }
        }
        Format::Int8 | Format::F32 | Format::Bf16 | Format::F16 => (),
    }
}

/// What a number less `zero` is multiplied by, and what is added then, for 16 columns: half `half` of block `block` of row
/// `lane`.
pub fn get(format: Format, plane: &[u8], lane: usize, block: usize, half: usize) -> (f32, f32) {
    let f16 = |at: usize| {
        let at = at + 2 * lane;
        F16(u16::from_le_bytes([plane[at], plane[at + 1]])).to_f32()
    };
    match format {
        Format::Int8 => {
            let bytes = [0, 1, 2, 3].map(|i| plane[4 * lane + i]);
            (f32::from_le_bytes(bytes), 0.0)
        }
        Format::Q8_0 | Format::Q4_0 => (f16(block * HALVES), 0.0),
        Format::Q4_1 => (f16(block * 2 * HALVES), f16((block * 2 + 1) * HALVES)),
        Format::Q4K | Format::Q5K => {
            let start = block / 8 * 320;
            let at = start + 2 * HALVES + block % 8 * 2 * GROUP + lane;
            let (scale, minimum) = (f32::from(plane[at]), f32::from(plane[at + GROUP]));
            (f16(start) * scale, f16(start + HALVES) * minimum)
        }
        Format::Q6K => {
            let start = block / 8 * 288;
            let at = start + HALVES + (block % 8 * 2 + half) * GROUP + lane;
            (f16(start) * f32::from(plane[at].cast_signed()), 0.0)
        }
        Format::F32 | Format::Bf16 | Format::F16 => (1.0, 0.0),
    }
}

/// What is taken from a number before it is scaled.
pub const fn zero(format: Format) -> i32 {
    match format {
        Format::Q4_0 => 8,
        Format::Q6K => 32,
        _ => 0,
    }
}
