//! A slice that several threads of a region read and write, each its own part.

use std::marker::PhantomData;
use std::ops::Range;

/// A mutable slice lent to all threads of a region. Who writes what, and the barriers between, is the callers' promise.
pub struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    _lent: PhantomData<&'a mut [T]>,
}

impl<T> Clone for Shared<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Shared<'_, T> {}

// SAFETY: it only hands out parts, and whoever takes one promises that no other thread's part clashes with it.
unsafe impl<T: Send> Send for Shared<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub fn new(slice: &'a mut [T]) -> Shared<'a, T> {
        Shared {
            start: slice.as_mut_ptr(),
            len: slice.len(),
            _lent: PhantomData,
        }
    }

    /// A slice that is read alone: whoever takes a part to write breaks `part_mut`'s promise.
    pub fn reading(slice: &'a [T]) -> Shared<'a, T> {
        Shared {
            start: slice.as_ptr().cast_mut(),
            len: slice.len(),
            _lent: PhantomData,
        }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn check(&self, range: &Range<usize>) {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "{range:?} of {} elements",
            self.len
        );
    }

    /// A part to read.
    ///
    /// # Safety
    /// No thread writes to it while the result lives.
    ///
    /// # Panics
    /// The range is not within the slice.
    pub unsafe fn part(&self, range: Range<usize>) -> &'a [T] {
        self.check(&range);
        // SAFETY: in bounds; the caller's promise.
        unsafe { std::slice::from_raw_parts(self.start.add(range.start), range.len()) }
    }

    /// A part to write.
    ///
    /// # Safety
    /// No thread reads or writes it otherwise while the result lives.
    ///
    /// # Panics
    /// The range is not within the slice.
    #[allow(clippy::mut_from_ref)] // that is what it is for
    pub unsafe fn part_mut(&self, range: Range<usize>) -> &'a mut [T] {
        self.check(&range);
        // SAFETY: in bounds; the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }

    /// The address of element `index`, for kernels that write through it.
    ///
    /// # Panics
    /// The index is not within the slice.
    pub fn address(&self, index: usize) -> *mut T {
        self.check(&(index..self.len));
        // SAFETY: in bounds.
        unsafe { self.start.add(index) }
    }
}
