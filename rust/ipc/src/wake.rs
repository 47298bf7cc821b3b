//! How other threads wake the IO thread out of `poll`: one byte through a socket pair, at most one under way.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The end that wakes; shared by all threads.
#[derive(Debug)]
pub struct Wake {
    writer: UnixStream,
    is_under_way: AtomicBool,
}

/// The end that is woken: readable after `Wake::wake`.
#[derive(Debug)]
pub struct Sleeper {
    pub reader: UnixStream,
    wake: Arc<Wake>,
}

/// Both ends.
pub fn pair() -> io::Result<(Arc<Wake>, Sleeper)> {
    let (writer, reader) = UnixStream::pair()?;
    writer.set_nonblocking(true)?;
    reader.set_nonblocking(true)?;
    let wake = Arc::new(Wake {
        writer,
        is_under_way: AtomicBool::new(false),
    });
    let sleeper = Sleeper {
        reader,
        wake: Arc::clone(&wake),
    };
    Ok((wake, sleeper))
}

impl Wake {
    /// Never blocks. What the caller wrote before is seen by the sleeper after `Sleeper::clear`.
    pub fn wake(&self) {
        if !self.is_under_way.swap(true, Ordering::AcqRel) {
            // The pair holds at most one byte and both ends live as long as `self` is asked: this can't fail for long;
            // a broken pair means that the IO thread has ended, which `Server` notices at close.
            let _ = (&self.writer).write(&[1]);
        }
    }
}

impl Sleeper {
    /// Takes the byte back; call this before looking for work.
    pub fn clear(&mut self) {
        let mut bytes = [0; 16];
        while matches!(self.reader.read(&mut bytes), Ok(count) if count > 0) {}
        // A swap, not a store: it must read what `wake` wrote last, so that the waker's work is seen from here on.
        self.wake.is_under_way.swap(false, Ordering::AcqRel);
    }
}
