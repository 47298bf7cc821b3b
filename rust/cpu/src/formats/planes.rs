//! Where a packed block keeps the numbers of 16 rows by 32 columns.
//!
//! Column c is step c / 4; a step's byte of row r and column c lies at 4 r + c % 4 of a vector of 64 bytes, so that the
//! vector is what byte products of four columns (maddubs, dpbusd) take. 8-bit numbers: 8 vectors, one a step. 4 bits: 4
//! vectors, step s in the low and step s + 4 in the high nibbles of vector s. 5 and 6 bits: a vector has a step's numbers
//! in its low bits, and above them some bits of a step that has no vector of its own, so that most steps take one
//! operation (`PIECES`).

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

/// Bits of a step that lie above those of another: `count` bits from `from` on, at `at` of the vector.
pub struct Piece {
    pub step: usize,
    pub vector: usize,
    pub from: usize,
    pub count: usize,
    pub at: usize,
}

const fn piece(step: usize, vector: usize, from: usize, count: usize, at: usize) -> Piece {
    Piece {
        step,
        vector,
        from,
        count,
        at,
    }
}

/// 5 bits: vectors 0 to 4 are steps 0 to 4.
const FIVE: [Piece; 7] = [
    piece(5, 0, 0, 3, 5),
    piece(5, 1, 3, 2, 6),
    piece(6, 2, 0, 3, 5),
    piece(6, 1, 3, 1, 5),
    piece(6, 3, 4, 1, 5),
    piece(7, 4, 0, 3, 5),
    piece(7, 3, 3, 2, 6),
];
/// 6 bits: vectors 0 to 2 are steps 0 to 2, vectors 3 to 5 steps 4 to 6.
const SIX: [Piece; 6] = [
    piece(3, 0, 0, 2, 6),
    piece(3, 1, 2, 2, 6),
    piece(3, 2, 4, 2, 6),
    piece(7, 3, 0, 2, 6),
    piece(7, 4, 2, 2, 6),
    piece(7, 5, 4, 2, 6),
];

/// Of 5- or 6-bit numbers.
const fn pieces(bits: usize) -> &'static [Piece] {
    if bits == 5 { &FIVE } else { &SIX }
}

/// The vector whose low bits a step's numbers are, if there is one.
pub const fn own_vector(bits: usize, step: usize) -> Option<usize> {
    match (bits, step) {
        (5, 0..=4) | (6, 0..=2) => Some(step),
        (6, 4..=6) => Some(step - 1),
        _ => None,
    }
}

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
    let each = |mask: usize| u32::from_ne_bytes([mask as u8; 4]);
    let mut vectors = [0; 6];
    for s in 0..8 {
        if let Some(vector) = own_vector(bits, s) {
            vectors[vector] |= step(s) & each((1 << bits) - 1);
        }
    }
    for piece in pieces(bits) {
        let some = step(piece.step) >> piece.from & each((1 << piece.count) - 1);
        vectors[piece.vector] |= some << piece.at;
    }
    (0..bits).for_each(|vector| write(vector, vectors[vector]));
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
        if let Some(vector) = own_vector(bits, step) {
            return block[vector * 64 + byte] & ((1 << bits) - 1);
        }
        pieces(bits)
            .iter()
            .filter(|piece| piece.step == step)
            .fold(0, |number, piece| {
                let some = block[piece.vector * 64 + byte] >> piece.at & ((1 << piece.count) - 1);
                number | some << piece.from
            })
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
