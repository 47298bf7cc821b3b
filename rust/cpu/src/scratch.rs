//! Working memory of one thread: grown when a larger call comes, never per call.

use std::cell::RefCell;

/// Keys that both kernels handle at once.
pub const CHUNK: usize = 64;
/// (query, head) pairs of one work item at most.
pub const MAX_ROWS: usize = 64;

/// A cache line, so that buffers start on one.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// A growable f32 buffer aligned to cache lines.
#[derive(Default)]
pub struct Floats(Vec<Line>);

impl Floats {
    /// At least `count` floats, contents unspecified but initialized.
    pub fn take(&mut self, count: usize) -> *mut f32 {
        let lines = count.div_ceil(16);
        if self.0.len() < lines {
            self.0.resize(lines, Line([0.0; 16]));
        }
        self.0.as_mut_ptr().cast()
    }
}

impl Floats {
    /// Where the floats that were taken last are, for threads that write distinct parts.
    pub fn start(&self) -> *mut f32 {
        self.0.as_ptr().cast_mut().cast()
    }
}

/// Buffers of one thread; what they hold is said by the kernels.
#[derive(Default)]
pub struct Scratch {
    pub query: Floats,
    pub out: Floats,
    /// Of the segments before.
    pub total: Floats,
    pub score: Floats,
    pub key: Floats,
    pub value: Floats,
    pub state: Floats,
    pub line: Floats,
    pub panel: Floats,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Run with this thread's buffers.
pub fn with_scratch<R>(f: impl FnOnce(&mut Scratch) -> R) -> R {
    SCRATCH.with_borrow_mut(f)
}
