//! Where a packed block keeps the numbers of 16 rows by 32 columns.
//!
//! Column c is step c / 4; a step's byte of row r and column c lies at 4 r + c % 4 of a vector of 64 bytes, so that the
//! vector is what byte products of four columns (maddubs, dpbusd) take. 8-bit numbers: 8 vectors, one a step. Fewer bits:
//! 4 vectors, step s in the low and step s + 4 in the high nibbles of vector s; then, for 5 bits, one vector whose bit s
//! is that of step s, or, for 6 bits, two vectors (steps 0 to 3, 4 to 7) with two bits a step.

use super::super::matrix::format::{Format, GROUP};

/// Bits of a format's numbers.
pub const fn bits(format: Format) -> usize {
    match format {
        Format::Q4_0 | Format::Q4_1 | Format::Q4K => 4,
        Format::Q5K => 5,
        Format::Q6K => 6,
        _ => 8,
    }
}

/// The low nibbles of four bytes.
const LOW: u32 = 0x0f0f_0f0f;

/// Bytes of a packed block.
pub const fn block_bytes(bits: usize) -> usize {
    bits * 32 * GROUP / 8
}

/// Store the numbers of row `lane` of the group (up to 32: the rest is zero). The block is zero there before.
pub fn put(bits: usize, block: &mut [u8], lane: usize, codes: &[u8]) {
    let mut padded = [0u8; 32];
    padded[..codes.len()].copy_from_slice(codes);
    // The four columns of a step at once.
    let words = padded.as_chunks::<4>().0;
    let step = |s: usize| u32::from_le_bytes(words[s]);
    let mut write = |vector: usize, four: u32| {
        block[64 * vector + 4 * lane..][..4].copy_from_slice(&four.to_le_bytes());
    };
    if bits == 8 {
        (0..8).for_each(|s| write(s, step(s)));
        return;
    }
    (0..4).for_each(|s| write(s, step(s) & LOW | (step(s + 4) & LOW) << 4));
    match bits {
        5 => write(
            4,
            (0..8).fold(0, |plane, s| plane | (step(s) >> 4 & LOW) << s),
        ),
        6 => (0..2).for_each(|half| {
            let plane = (0..4).fold(0, |plane, s| {
                plane | (step(4 * half + s) >> 4 & LOW) << (2 * s)
            });
            write(4 + half, plane);
        }),
        _ => (),
    }
}

/// The numbers of row `lane` of the group.
pub fn get(bits: usize, block: &[u8], lane: usize) -> [u8; 32] {
    std::array::from_fn(|column| {
        let (step, byte) = (column / 4, lane * 4 + column % 4);
        if bits == 8 {
            return block[step * 64 + byte];
        }
        let low = block[step % 4 * 64 + byte] >> (step / 4 * 4) & 15;
        let high = match bits {
            5 => block[256 + byte] >> step & 1,
            6 => block[256 + step / 4 * 64 + byte] >> (step % 4 * 2) & 3,
            _ => 0,
        };
        low | high << 4
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_is_found_again() {
        for bits in [4, 5, 6, 8] {
            let mut block = vec![0; block_bytes(bits)];
            let code = |lane: usize, column: usize| {
                ((lane * 37 + column * 11) % (1 << bits))
                    .try_into()
                    .unwrap()
            };
            let rows: Vec<[u8; 32]> = (0..GROUP)
                .map(|lane| std::array::from_fn(|column| code(lane, column)))
                .collect();
            for (lane, row) in rows.iter().enumerate() {
                put(bits, &mut block, lane, row);
            }
            for (lane, row) in rows.iter().enumerate() {
                assert_eq!(get(bits, &block, lane), *row);
            }
        }
    }
}
