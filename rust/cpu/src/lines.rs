//! Memory that starts on a cache line and that threads may write in parts.

use std::cell::UnsafeCell;

/// A cache line.
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Bytes aligned to cache lines, zero at first.
#[derive(Default)]
pub struct Lines {
    lines: Vec<UnsafeCell<Line>>,
}

// SAFETY: the bytes are reached through `start` only, whose users say who writes what.
unsafe impl Sync for Lines {}

impl Lines {
    pub const EMPTY: Lines = Lines { lines: Vec::new() };

    pub fn zeroed(num_bytes: usize) -> Lines {
        let mut lines = Lines::default();
        lines.grow(num_bytes);
        lines
    }

    /// Have at least `num_bytes`; what is there stays.
    pub fn grow(&mut self, num_bytes: usize) {
        let count = num_bytes.div_ceil(64);
        if self.lines.len() < count {
            self.lines.reserve_exact(count - self.lines.len());
            large_pages(self.lines.spare_capacity_mut());
            self.lines
                .resize_with(count, || UnsafeCell::new(Line([0; 64])));
        }
    }

    /// The first byte, as the start of whatever lies there (aligned to 64 bytes).
    pub fn start<T>(&self) -> *mut T {
        self.lines.as_ptr().cast_mut().cast()
    }
}

/// Ask for large pages, before memory is touched: reading weights in turn misses fewer translations. A wish: elsewhere
/// than on Linux, or if the system has none, nothing happens.
pub fn large_pages<T>(memory: &mut [T]) {
    const PAGE: usize = 2 << 20;
    #[cfg(target_os = "linux")]
    {
        use rustix::mm::{Advice, madvise};
        let range = memory.as_mut_ptr_range();
        let start = range.start.cast::<u8>();
        let (skip, size) = (start.align_offset(PAGE), size_of_val(memory));
        if let Some(length) = size.checked_sub(skip).map(|rest| rest / PAGE * PAGE)
            && length > 0
        {
            // SAFETY: whole pages of memory that is ours; the advice changes no contents. Refusal leaves small pages.
            let _ = unsafe {
                madvise(
                    start.wrapping_add(skip).cast(),
                    length,
                    Advice::LinuxHugepage,
                )
            };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (memory, PAGE);
}
