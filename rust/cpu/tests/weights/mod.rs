//! Random weights of every format, and the rounding of activations, written for the tests alone.

use octavo_cpu::Format;

/// A small generator (splitmix64), so that a case is its seed.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Between -1 and 1.
    pub fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / f32::from(1u16 << 15) / 256.0 - 1.0
    }
}

/// Places of f16 numbers within a block.
fn halves(format: Format) -> &'static [usize] {
    match format {
        Format::Q8_0 | Format::Q4_0 => &[0],
        Format::Q4_1 | Format::Q4K | Format::Q5K => &[0, 2],
        Format::Q6K => &[208],
        _ => &[],
    }
}

/// Bytes of a random weight `[n, k]`: any bits where numbers are integers, floats of a usual size.
pub fn bytes(format: Format, n: usize, k: usize, numbers: &mut Numbers) -> Vec<u8> {
    let count = n * format.row_bytes(k).expect("k is whole blocks");
    match format {
        Format::F32 => (0..n * k)
            .flat_map(|_| numbers.float().to_le_bytes())
            .collect(),
        Format::Bf16 => (0..n * k)
            .flat_map(|_| numbers.float().to_le_bytes()[2..].to_vec())
            .collect(),
        Format::F16 => (0..n * k)
            .flat_map(|_| half(numbers).to_le_bytes())
            .collect(),
        _ => {
            let mut bytes: Vec<u8> = (0..count).map(|_| numbers.next() as u8).collect();
            for block in bytes.chunks_exact_mut(format.block().1) {
                for &at in halves(format) {
                    block[at..at + 2].copy_from_slice(&half(numbers).to_le_bytes());
                }
            }
            bytes
        }
    }
}

/// Bits of an f16 of either sign between 2^-14 and 2.
fn half(numbers: &mut Numbers) -> u16 {
    (numbers.next() as u16 & 0x83ff) | ((1 + numbers.next() as u16 % 15) << 10)
}

/// Rows of k numbers as blocks of 32 int8 with a scale would have them.
pub fn rounded(x: &[f32], k: usize) -> Vec<f64> {
    let rows = x.chunks_exact(k);
    let blocks = rows.flat_map(|row| row.chunks(32));
    blocks
        .flat_map(|block| {
            let scale = block.iter().fold(0.0f32, |most, x| most.max(x.abs())) / 127.0;
            let round =
                move |x: &f32| f64::from((x * (1.0 / scale)).round_ties_even()) * f64::from(scale);
            block
                .iter()
                .map(move |x| if scale > 0.0 { round(x) } else { 0.0 })
                .collect::<Vec<_>>()
        })
        .collect()
}

/// Error beside the size of the row that the number is from.
pub fn relative(value: f64, wanted: f64, row: &[f64]) -> f64 {
    let size = (row.iter().map(|v| v * v).sum::<f64>() / row.len() as f64).sqrt();
    (value - wanted).abs() / (size + wanted.abs() + 1e-9)
}
