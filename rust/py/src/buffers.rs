//! Host buffers that Python shares with the engine: the only place of the control plane that follows a pointer.
//!
//! A buffer is checked once, when it is registered (int32, C-contiguous, writable, exact size, no overlap with another
//! one), and its owner is kept alive through the buffer protocol, which also forbids resizing it.

use std::ops::Range;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// One int32 buffer.
pub struct IntBuffer {
    buffer: PyBuffer<i32>,
}

impl IntBuffer {
    /// `what` names the buffer in messages. Errors: `ValueError` on a wrong type, shape or size.
    pub fn new(object: &Bound<'_, PyAny>, num_ints: u32, what: &str) -> PyResult<Self> {
        let buffer = PyBuffer::<i32>::get(object).map_err(|error| {
            PyValueError::new_err(format!("{what}: not an int32 buffer ({error})"))
        })?;
        let problem = if buffer.readonly() {
            Some("is read-only".to_owned())
        } else if !buffer.is_c_contiguous() {
            Some("is not contiguous".to_owned())
        } else if buffer.item_count() != num_ints as usize {
            Some(format!(
                "has {} ints, {num_ints} are needed",
                buffer.item_count()
            ))
        } else {
            None
        };
        match problem {
            Some(problem) => Err(PyValueError::new_err(format!("{what} {problem}"))),
            None => Ok(Self { buffer }),
        }
    }

    fn addresses(&self) -> Range<usize> {
        let start = self.buffer.buf_ptr() as usize;
        start..start + self.buffer.len_bytes()
    }

    /// What the runner left in the buffer.
    pub fn ints(&self) -> &[i32] {
        // SAFETY: `new` checked alignment, type, contiguity and size; the buffer protocol keeps the memory in place
        // while `self.buffer` lives. By the runner's contract nobody writes to an output arena between `result` and
        // the step that commits it.
        unsafe {
            std::slice::from_raw_parts(self.buffer.buf_ptr().cast(), self.buffer.item_count())
        }
    }

    /// The buffer, to be filled.
    pub fn ints_mut(&mut self) -> &mut [i32] {
        // SAFETY: as in `ints`; the buffer is writable and overlaps no other registered one, and by the runner's
        // contract nobody reads a step arena while the step that fills it runs.
        unsafe {
            std::slice::from_raw_parts_mut(self.buffer.buf_ptr().cast(), self.buffer.item_count())
        }
    }
}

/// Bytes that nobody changes while they are read, such as a mapped file's.
pub struct ByteBuffer {
    buffer: PyBuffer<u8>,
}

impl ByteBuffer {
    /// `what` names the buffer in messages. Errors: `ValueError` when it is not of contiguous bytes.
    pub fn new(object: &Bound<'_, PyAny>, what: &str) -> PyResult<Self> {
        let buffer = PyBuffer::<u8>::get(object)
            .map_err(|error| PyValueError::new_err(format!("{what}: not bytes ({error})")))?;
        if buffer.is_c_contiguous() {
            Ok(Self { buffer })
        } else {
            Err(PyValueError::new_err(format!("{what} is not contiguous")))
        }
    }

    pub fn bytes(&self) -> &[u8] {
        if self.buffer.len_bytes() == 0 {
            return &[];
        }
        // SAFETY: `new` checked type and contiguity; the buffer protocol keeps the memory in place while `self.buffer`
        // lives, and by the caller's contract nobody writes to it.
        unsafe { std::slice::from_raw_parts(self.buffer.buf_ptr().cast(), self.buffer.len_bytes()) }
    }
}

/// `ValueError` when two buffers share memory.
pub fn check_disjoint(buffers: &[IntBuffer]) -> PyResult<()> {
    let mut ranges: Vec<Range<usize>> = buffers.iter().map(IntBuffer::addresses).collect();
    ranges.sort_by_key(|range| range.start);
    match ranges.windows(2).find(|pair| pair[0].end > pair[1].start) {
        Some(_) => Err(PyValueError::new_err("two of the buffers share memory")),
        None => Ok(()),
    }
}
