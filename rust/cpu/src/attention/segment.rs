//! The order in which attention adds up, which makes a result the same to the last bit however its keys and queries were
//! shared out: alone or in a batch, a prompt whole or in chunks, one thread or many.
//!
//! Positions are cut into segments, these into chunks (scratch.rs), wherever a row begins. Softmax runs online over a
//! segment's chunks, and segments are absorbed one by one, by the thread that computed them or from partial results. What
//! a query may not see adds exactly nothing.

use std::ops::Range;

use crate::scratch::CHUNK;
use crate::simd::Simd;

/// Positions of a segment: whole chunks.
pub const SEGMENT: usize = 4 * CHUNK;

/// What softmax knows of some keys, per lane: outputs beside it are weighted by 2^(score - greatest).
#[derive(Clone, Copy)]
pub struct Seen<S: Simd> {
    pub greatest: S::V,
    /// Of the weights.
    pub sum: S::V,
}

impl<S: Simd> Seen<S> {
    /// Of no keys.
    ///
    /// # Safety
    /// The machine has `S`'s instructions.
    #[inline(always)]
    pub unsafe fn nothing() -> Self {
        // SAFETY: the caller's.
        unsafe {
            Self {
                greatest: S::splat(f32::MIN),
                sum: S::splat(0.0),
            }
        }
    }

    /// Take over the next segment's; what the outputs so far, and the segment's, are to be multiplied by (`add`).
    ///
    /// # Safety
    /// The machine has `S`'s instructions.
    #[inline(always)]
    pub unsafe fn absorb(&mut self, next: Self) -> (S::V, S::V) {
        // SAFETY: the caller's.
        unsafe {
            let top = S::max(self.greatest, next.greatest);
            let before = S::exp2(S::sub(self.greatest, top));
            let behind = S::exp2(S::sub(next.greatest, top));
            self.sum = add::<S>(self.sum, next.sum, (before, behind));
            self.greatest = top;
            (before, behind)
        }
    }
}

/// a * factors.0 + b * factors.1, rounded three times.
///
/// # Safety
/// The machine has `S`'s instructions.
#[inline(always)]
pub unsafe fn add<S: Simd>(a: S::V, b: S::V, factors: (S::V, S::V)) -> S::V {
    // SAFETY: the caller's.
    unsafe { S::add(S::mul(a, factors.0), S::mul(b, factors.1)) }
}

/// The segments of some positions.
pub fn segments(low: usize, high: usize) -> impl Iterator<Item = Range<usize>> {
    pieces(low, high, SEGMENT)
}

/// The chunks of some positions of a segment.
#[inline(always)]
pub fn chunks(positions: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    pieces(positions.start, positions.end, CHUNK)
}

/// `low..high` cut at the multiples of `size`.
#[inline(always)]
fn pieces(low: usize, high: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (low / size..high.div_ceil(size))
        .map(move |index| low.max(index * size)..high.min((index + 1) * size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_cut_at_multiples() {
        let found: Vec<_> = segments(300, 800).collect();
        assert_eq!(found, [300..512, 512..768, 768..800]);
        assert!(segments(256, 257).eq(std::iter::once(256..257)));
        assert_eq!(chunks(300..330).collect::<Vec<_>>(), [300..320, 320..330]);
    }
}
