//! Where a packed block keeps the numbers of 16 rows by 32 columns.
//!
//! Column c is step c / 4; a step's byte of row r and column c lies at 4 r + c % 4 of a vector of 64 bytes, so that the
//! vector is what byte products of four columns (maddubs, dpbusd) take. 8-bit numbers: 8 vectors, one a step. 4 bits: 4
//! vectors, step s in the low and step s + 4 in the high nibbles of vector s. 5 and 6 bits: a vector has a step's numbers
//! in its low bits, so that most steps take one operation, and above them (`high`) bits of steps that have no vector of
//! their own. 6 bits, in each half: steps 0 to 2, and two bits of step 3 above each. 5 bits: steps 0 to 4, and above them
//! what the sums modulo 2 of `five` make of steps 5 to 7: they need no mask but that of the low bits.

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
    if bits == 4 {
        (0..4).for_each(|s| write(s, step(s) & LOW | (step(s + 4) & LOW) << 4));
        return;
    }
    if bits == 6 {
        for half in 0..2 {
            let last = step(4 * half + 3);
            for i in 0..3 {
                let two = last >> (2 * i) & each(3);
                write(3 * half + i, step(4 * half + i) | two << 6);
            }
        }
        return;
    }
    let [fifth, sixth, seventh] = [5, 6, 7].map(step);
    let first = sixth >> 3 & each(1) | (fifth >> 3 & each(3)) << 1;
    let third = (sixth >> 4 ^ fifth >> 3) & each(1) | (seventh >> 3 & each(3)) << 1;
    let zeroth = (fifth ^ first << 2) & each(7);
    let fourth = (seventh ^ third << 2) & each(7);
    let high = [zeroth, first, sixth & each(7), third, fourth];
    (0..5).for_each(|s| write(s, step(s) | high[s] << 5));
}

/// As much in each of four bytes.
const fn each(mask: u8) -> u32 {
    u32::from_ne_bytes([mask; 4])
}

/// The numbers of row `lane` of the group.
pub fn get(bits: usize, block: &[u8], lane: usize) -> [u8; 32] {
    std::array::from_fn(|column| {
        let (step, byte) = (column / 4, lane * 4 + column % 4);
        match bits {
            8 => return block[step * 64 + byte],
            4 => return block[step % 4 * 64 + byte] >> (step / 4 * 4) & 15,
            _ => (),
        }
        let vector = |index: usize| block[64 * index + byte];
        let high = |index: usize| vector(index) >> bits;
        match (bits, step) {
            (5, 5) => high(0) ^ high(1) << 2,
            (5, 6) => (high(2) ^ high(1) << 3 ^ high(3) << 4) & 31,
            (5, 7) => high(4) ^ high(3) << 2,
            (5, _) => vector(step) & 31,
            (_, 3 | 7) => {
                let first = step / 4 * 3;
                high(first) | high(first + 1) << 2 | high(first + 2) << 4
            }
            _ => vector(step - step / 4) & 63,
        }
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
