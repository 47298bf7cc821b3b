//! Uniform numbers from a counter: Philox 4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as
//! 1, 2, 3", section 4.3). A number depends on its seed, index, position and column alone, as in
//! `octavo.kernels.reference.uniform`.

/// What the numbers of one token depend on.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    pub seed: i64,
    /// Which of a request's sequences.
    pub index: u32,
    /// That the token takes in its sequence.
    pub position: u32,
}

impl Stream {
    /// Number `column`, in [0, 1), of 53 bits.
    pub fn uniform(&self, column: u32) -> f64 {
        let seed = self.seed as u64;
        let words = philox(
            [self.position, self.index, column, 0],
            [seed as u32, (seed >> 32) as u32],
        );
        let bits = (u64::from(words[0]) << 21) + u64::from(words[1] >> 11);
        bits as f64 * f64::EPSILON / 2.0
    }
}

/// Ten rounds over a 128-bit counter and a 64-bit key.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let first = u64::from(counter[0]) * 0xD251_1F53;
        let second = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [
            (second >> 32) as u32 ^ counter[1] ^ key[0],
            second as u32,
            (first >> 32) as u32 ^ counter[3] ^ key[1],
            first as u32,
        ];
        key = [
            key[0].wrapping_add(0x9E37_79B9),
            key[1].wrapping_add(0xBB67_AE85),
        ];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the authors' Random123 (`kat_vectors`, philox4x32-10).
    #[test]
    fn known_answers() {
        assert_eq!(
            philox([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
    }

    #[test]
    fn numbers_are_in_the_unit_interval_and_differ() {
        let stream = Stream {
            seed: -1,
            index: 3,
            position: 7,
        };
        let numbers: Vec<f64> = (0..1000).map(|column| stream.uniform(column)).collect();
        assert!(numbers.iter().all(|u| (0.0..1.0).contains(u)));
        let mean = numbers.iter().sum::<f64>() / 1000.0;
        assert!((mean - 0.5).abs() < 0.05, "{mean}");
    }
}
