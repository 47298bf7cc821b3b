//! The blocks of GGUF files: which bits of a block are which number.

use crate::matrix::format::Format;

/// The numbers of a block in column order, as unsigned bits (int8 as its byte).
pub fn codes(format: Format, block: &[u8], codes: &mut [u8; 256]) {
    match format {
        Format::Int8 => codes[..block.len()].copy_from_slice(block),
        Format::Q8_0 => codes[..32].copy_from_slice(&block[2..34]),
        Format::Q4_0 => nibbles(&block[2..18], codes),
        Format::Q4_1 => nibbles(&block[4..20], codes),
        Format::Q4K => {
            (0..4).for_each(|i| nibbles(&block[16 + 32 * i..][..32], &mut codes[64 * i..]));
        }
        Format::Q5K => q5k(block, codes),
        Format::Q6K => q6k(block, codes),
        Format::F32 | Format::Bf16 | Format::F16 => unreachable!("floats have no codes"),
    }
}

/// Low nibbles, then high ones.
fn nibbles(bytes: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(bytes.len());
    for (i, byte) in bytes.iter().enumerate() {
        low[i] = byte & 15;
        high[i] = byte >> 4;
    }
}

/// Fifth bits in 32 bytes: bit b of byte i belongs to number i of block b.
fn q5k(block: &[u8], codes: &mut [u8; 256]) {
    for i in 0..4 {
        nibbles(&block[48 + 32 * i..][..32], &mut codes[64 * i..]);
    }
    for (column, code) in codes.iter_mut().enumerate() {
        *code |= (block[16 + column % 32] >> (column / 32) & 1) << 4;
    }
}

/// Two halves of 128 numbers: 64 bytes of nibbles, and 32 bytes of pairs of bits for four runs of 32.
fn q6k(block: &[u8], codes: &mut [u8; 256]) {
    for (half, codes) in codes.chunks_exact_mut(128).enumerate() {
        nibbles(&block[64 * half..][..64], codes);
        for (column, code) in codes.iter_mut().enumerate() {
            let pairs = block[128 + 32 * half + column % 32];
            *code |= (pairs >> (column / 32 * 2) & 3) << 4;
        }
    }
}

/// Scale and minimum (6 bits each) of block `index` of eight, from the 12 bytes that `Q4_K` and `Q5_K` pack them in.
pub fn k_scale(packed: &[u8], index: usize) -> (u8, u8) {
    if index < 4 {
        return (packed[index] & 63, packed[index + 4] & 63);
    }
    let low = packed[index + 4];
    (
        low & 15 | packed[index - 4] >> 6 << 4,
        low >> 4 | packed[index] >> 6 << 4,
    )
}
