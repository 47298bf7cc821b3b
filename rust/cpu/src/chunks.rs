//! Memory of weights, in large chunks: so small matrices too lie in large pages, and one row's products, which read them in
//! turn, neither miss translations nor have the processor's own prefetching end every 4 KiB.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::lines::large_pages;

/// Bytes of a chunk: what is not used of a process's last one is not touched. In debug builds each piece has a chunk of its
/// own, so that `AddressSanitizer` and Miri see where it ends.
const CHUNK_BYTES: usize = if cfg!(debug_assertions) { 0 } else { 8 << 20 };
const LARGE_PAGE: usize = 2 << 20;
const LINE: usize = 64;

/// The chunk of which pieces are given away, and how much of it is.
static NEWEST: Mutex<Newest> = Mutex::new(Newest {
    chunk: Weak::new(),
    used: 0,
});

struct Newest {
    chunk: Weak<Chunk>,
    used: usize,
}

/// Memory that is freed with the last of its pieces, zero at first. The system zeroes it where it is first written, by the
/// thread that packs a matrix there.
struct Chunk {
    /// Aligned.
    start: NonNull<u8>,
    allocated: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a chunk is an address; the bytes are reached through pieces, which do not overlap.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl Chunk {
    fn new(num_bytes: usize) -> Arc<Chunk> {
        let align = if num_bytes < LARGE_PAGE {
            LINE
        } else {
            LARGE_PAGE
        };
        // Aligned here: an allocator that is asked for as much would zero all of it itself.
        let layout = Layout::from_size_align(num_bytes + align, size_of::<u128>());
        let layout = layout.unwrap_or_else(|_| panic!("{num_bytes} bytes of weights"));
        // SAFETY: the size is not zero.
        let Some(allocated) = NonNull::new(unsafe { alloc_zeroed(layout) }) else {
            handle_alloc_error(layout)
        };
        // SAFETY: less than `align` bytes further, which were asked for in addition.
        let start = unsafe { allocated.add(allocated.align_offset(align)) };
        // SAFETY: the chunk was just allocated, and zero.
        large_pages(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), num_bytes) });
        Arc::new(Chunk {
            start,
            allocated,
            layout,
        })
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: allocated so, and nobody has a piece of it any more.
        unsafe { dealloc(self.allocated.as_ptr(), self.layout) };
    }
}

/// Bytes aligned to cache lines, zero at first.
pub struct Piece {
    chunk: Arc<Chunk>,
    at: usize,
    num_bytes: usize,
}

impl Piece {
    pub fn zeroed(num_bytes: usize) -> Piece {
        let newest = NEWEST.lock();
        let place = newest
            .unwrap_or_else(PoisonError::into_inner)
            .place(num_bytes, CHUNK_BYTES);
        Piece::at(place, num_bytes)
    }

    /// At a place that was given for as many bytes; nothing was there before.
    fn at((chunk, at): (Arc<Chunk>, usize), num_bytes: usize) -> Piece {
        let num_bytes = num_bytes.next_multiple_of(LINE);
        Piece {
            chunk,
            at,
            num_bytes,
        }
    }

    pub fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    /// The first byte, as the start of whatever lies there (aligned to 64 bytes).
    pub fn start<T>(&self) -> *const T {
        // SAFETY: the piece is within its chunk.
        unsafe { self.chunk.start.as_ptr().add(self.at) }
            .cast_const()
            .cast()
    }

    pub fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: initialized bytes that are this piece's alone, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start::<u8>().cast_mut(), self.num_bytes) }
    }
}

impl Newest {
    /// A place in the newest chunk, or in a new one of `chunk_bytes` if it has not enough left. Large pieces have their own.
    fn place(&mut self, num_bytes: usize, chunk_bytes: usize) -> (Arc<Chunk>, usize) {
        let num_bytes = num_bytes.next_multiple_of(LINE);
        let is_large = num_bytes > chunk_bytes / 2;
        let (chunk, at) = match self.chunk.upgrade() {
            _ if is_large => (Chunk::new(num_bytes), 0),
            Some(chunk) if self.used + num_bytes <= chunk_bytes => (chunk, self.used),
            _ => (Chunk::new(chunk_bytes), 0),
        };
        if !is_large {
            self.chunk = Arc::downgrade(&chunk);
            self.used = at + num_bytes;
        }
        (chunk, at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_aligned_zero_and_apart_and_chunks_go_with_the_last() {
        let mut newest = Newest {
            chunk: Weak::new(),
            used: 0,
        };
        let sizes = [100, 0, 64, 700, 300, 5000, 1, 512, 640];
        let mut give = |size| Piece::at(newest.place(size, 1024), size);
        let mut pieces: Vec<Piece> = sizes.into_iter().map(&mut give).collect();
        for (i, (piece, size)) in pieces.iter_mut().zip(sizes).enumerate() {
            assert!(piece.num_bytes() >= size && piece.start::<u8>().addr().is_multiple_of(64));
            assert!(piece.as_mut().iter().all(|&byte| byte == 0));
            piece.as_mut().fill(u8::try_from(i + 1).unwrap());
        }
        for (i, piece) in pieces.iter_mut().enumerate() {
            let written = u8::try_from(i + 1).unwrap();
            assert!(piece.as_mut().iter().all(|&byte| byte == written));
        }
        assert!(Arc::ptr_eq(&pieces[0].chunk, &pieces[4].chunk));
        let chunk = Arc::downgrade(&pieces[0].chunk);
        pieces.retain(|piece| !std::ptr::eq(Arc::as_ptr(&piece.chunk), chunk.as_ptr()));
        assert!(chunk.upgrade().is_none());
        // What is written where pieces were is zero again in a later one.
        drop(pieces);
        let mut later = Piece::at(newest.place(1000, 1024), 1000);
        assert!(later.as_mut().iter().all(|&byte| byte == 0));
    }
}
