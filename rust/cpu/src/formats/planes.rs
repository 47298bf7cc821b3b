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

/// Bytes of a packed block.
pub const fn block_bytes(bits: usize) -> usize {
    bits * 32 * GROUP / 8
}

/// Store the numbers of row `lane` of the group.
pub fn put(bits: usize, block: &mut [u8], lane: usize, codes: &[u8]) {
    for (column, &code) in codes.iter().enumerate() {
        let (step, byte) = (column / 4, lane * 4 + column % 4);
        if bits == 8 {
            block[step * 64 + byte] = code;
            continue;
        }
        block[step % 4 * 64 + byte] |= (code & 15) << (step / 4 * 4);
        let high = code >> 4;
        match bits {
            5 => block[256 + byte] |= high << step,
            6 => block[256 + step / 4 * 64 + byte] |= high << (step % 4 * 2),
            _ => (),
        }
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
