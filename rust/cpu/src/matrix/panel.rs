//! Integer weights of a tile's groups over some columns, unpacked: what is done to numbers and scales before they are
//! multiplied is done once for all rows that pass by, not once a tile. Fits the first-level cache.
//!
//! Per block of 32 columns: the numbers as bytes, `[8 steps][J vectors]`; their scales, f32 `[halves][J vectors]`; then, in
//! formats that have them, minima (`[J vectors]`; such formats have one half).

use std::marker::PhantomData;

use super::kind::{Kind, has_minima};
use super::packed::{Packed, Source};
use super::pass::Pass;
use super::product::Product;
use crate::scratch::with_scratch;
use crate::simd::{Numbers, STEPS, Simd};

/// f32 of a block's numbers of J vectors, and of the whole block.
const fn lengths<S: Simd, K: Kind, const J: usize>() -> (usize, usize) {
    let vector = J * S::LANES;
    let numbers = STEPS * vector;
    (
        numbers,
        numbers + (K::HALVES + has_minima::<K>() as usize) * vector,
    )
}

/// One block.
pub struct Panel<K, const J: usize> {
    start: *const f32,
    kind: PhantomData<K>,
}

impl<K: Kind, const J: usize> Panel<K, J> {
    /// Block `index` of those unpacked to `panel`.
    ///
    /// # Safety
    /// There are as many, of `S`'s vectors.
    #[inline(always)]
    pub unsafe fn new<S: Simd>(panel: *const f32, index: usize) -> Self {
        let (_, length) = const { lengths::<S, K, J>() };
        Self {
            // SAFETY: the caller's.
            start: unsafe { panel.add(index * length) },
            kind: PhantomData,
        }
    }
}

impl<S: Simd, K: Kind, const J: usize> Numbers<S> for Panel<K, J> {
    const BITS: usize = K::BITS;

    #[inline(always)]
    unsafe fn step(&self, vector: usize, step: usize) -> S::B {
        // SAFETY: one of the block's vectors.
        unsafe { S::load_bytes(self.start.add((step * J + vector) * S::LANES).cast()) }
    }

    #[inline(always)]
    fn steps(&self) -> Option<(*const u8, usize)> {
        Some((self.start.cast(), J * 4 * S::LANES))
    }
}

impl<S: Simd, K: Kind, const J: usize> Source<S> for Panel<K, J> {
    #[inline(always)]
    unsafe fn scale(&self, vector: usize, half: usize) -> S::V {
        let (numbers, _) = const { lengths::<S, K, J>() };
        // SAFETY: one of the block's vectors.
        unsafe { S::load(self.start.add(numbers + (half * J + vector) * S::LANES)) }
    }

    #[inline(always)]
    unsafe fn minimum(&self, vector: usize) -> S::V {
        let (numbers, _) = const { lengths::<S, K, J>() };
        // SAFETY: one of the block's vectors; minima lie behind the scales.
        unsafe { S::load(self.start.add(numbers + (J + vector) * S::LANES)) }
    }
}

/// Unpack the weights of a pass into this thread's panel.
///
/// # Safety
/// The pass is within the product, whose matrix has format `K`; the machine has `S`'s instructions.
#[inline(always)]
pub unsafe fn unpack<S: Simd, K: Kind>(product: &Product<'_>, pass: &Pass) -> *const f32 {
    // SAFETY: the caller's.
    unsafe {
        match (pass.is_wide, S::PARTS) {
            (false, 1) => unpack_vectors::<S, K, 1>(product, pass),
            (true, 1) | (_, 2) => unpack_vectors::<S, K, 2>(product, pass),
            _ => unpack_vectors::<S, K, 4>(product, pass),
        }
    }
}

/// # Safety
/// As `unpack`, for passes of J vectors.
#[inline(always)]
unsafe fn unpack_vectors<S: Simd, K: Kind, const J: usize>(
    product: &Product<'_>,
    pass: &Pass,
) -> *const f32 {
    let (numbers, length) = const { lengths::<S, K, J>() };
    let blocks = pass.columns.start / 32..pass.columns.end.div_ceil(32);
    let panel = with_scratch(|scratch| scratch.panel.take(blocks.len() * length));
    let mut target = panel;
    // SAFETY: the caller's; a pass has columns.
    let mut weights = unsafe { Packed::<S, K, J>::new(product, pass.group, blocks.start) };
    for block in blocks.clone() {
        // SAFETY: the caller's; the panel is that long.
        unsafe {
            if block > blocks.start {
                weights.advance();
            }
            for step in 0..STEPS {
                for j in 0..J {
                    let bytes = Numbers::<S>::step(&weights, j, step);
                    S::store_bytes(target.add((step * J + j) * S::LANES).cast(), bytes);
                }
            }
            for j in 0..J {
                let at = target.add(numbers + j * S::LANES);
                for half in 0..K::HALVES {
                    let scale = Source::<S>::scale(&weights, j, half);
                    S::store(at.add(half * J * S::LANES), scale);
                }
                if const { has_minima::<K>() } {
                    S::store(at.add(J * S::LANES), Source::<S>::minimum(&weights, j));
                }
            }
            target = target.add(length);
        }
    }
    panel
}
