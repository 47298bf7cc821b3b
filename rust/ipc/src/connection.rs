//! One client's socket: bytes in become messages, messages become bytes out. Never blocks.
//!
//! Not here: which socket is ready (`server`).

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;

use octavo_core::frames::{FrameError, decode_inbound, encode_outbound};
use octavo_core::protocol::{Inbound, Outbound};
use thiserror::Error;

/// The longest frame that is taken from a client.
pub const MAX_FRAME_BYTES: usize = 256 << 20;
/// A client that leaves more than this unread is cut off.
pub const MAX_BUFFERED_BYTES: usize = 64 << 20;
/// An input buffer that has grown beyond this is given back once it is empty.
const MAX_IDLE_BYTES: usize = 1 << 20;

const PREFIX_BYTES: usize = 4;

/// Why a connection ends.
#[derive(Debug, Error)]
pub enum Closed {
    #[error("gone")]
    Gone,
    #[error("socket failed: {0}")]
    Io(io::Error),
    #[error("malformed frame: {0}")]
    Frame(#[from] FrameError),
    #[error("a frame of {0} bytes is over the limit of {MAX_FRAME_BYTES}")]
    TooLong(usize),
    #[error("{0} bytes wait unread, over the limit of {MAX_BUFFERED_BYTES}")]
    TooSlow(usize),
}

impl From<io::Error> for Closed {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => Self::Gone,
            _ => Self::Io(error),
        }
    }
}

#[derive(Debug)]
pub struct Connection {
    pub stream: UnixStream,
    /// Received bytes that are not a whole frame yet.
    input: Vec<u8>,
    /// Frames not sent yet; of the first one `num_sent` bytes are.
    output: VecDeque<Vec<u8>>,
    num_sent: usize,
    num_buffered: usize,
}

impl Connection {
    /// `stream` must be non-blocking.
    pub fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            input: Vec::new(),
            output: VecDeque::new(),
            num_sent: 0,
            num_buffered: 0,
        }
    }

    /// Takes what has arrived, at most a `scratch` full, and gives whole messages to `deliver`, in order.
    pub fn receive(
        &mut self,
        scratch: &mut [u8],
        mut deliver: impl FnMut(Inbound),
    ) -> Result<(), Closed> {
        match self.stream.read(scratch) {
            Ok(0) => return Err(Closed::Gone),
            Ok(count) => self.input.extend_from_slice(&scratch[..count]),
            Err(error) if is_retry(&error) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        let mut start = 0;
        while let Some(frame) = first_frame(&self.input[start..])? {
            match decode_inbound(frame)? {
                Inbound::Disconnected => return Err(Closed::Gone),
                message => deliver(message),
            }
            start += PREFIX_BYTES + frame.len();
        }
        self.input.drain(..start);
        if self.input.is_empty() && self.input.capacity() > MAX_IDLE_BYTES {
            self.input = Vec::new();
        }
        Ok(())
    }

    /// Sends a message, or as much of it as the socket takes; the rest waits for `flush`.
    pub fn send(&mut self, message: &Outbound) -> Result<(), Closed> {
        if self.num_buffered > MAX_BUFFERED_BYTES {
            return Err(Closed::TooSlow(self.num_buffered));
        }
        let body = encode_outbound(message);
        let mut frame = Vec::with_capacity(PREFIX_BYTES + body.len());
        frame.extend_from_slice(&(body.len() as u32).to_le_bytes());
        frame.extend_from_slice(&body);
        self.num_buffered += frame.len();
        self.output.push_back(frame);
        self.flush()
    }

    /// Something waits to be sent.
    pub fn has_output(&self) -> bool {
        !self.output.is_empty()
    }

    /// Sends what the socket takes.
    pub fn flush(&mut self) -> Result<(), Closed> {
        while let Some(frame) = self.output.front() {
            match self.stream.write(&frame[self.num_sent..]) {
                Ok(count) => {
                    self.num_sent += count;
                    self.num_buffered -= count;
                    if self.num_sent == frame.len() {
                        self.num_sent = 0;
                        self.output.pop_front();
                    }
                }
                Err(error) if is_retry(&error) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

fn is_retry(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// The body of the first frame, when all of it has arrived.
fn first_frame(bytes: &[u8]) -> Result<Option<&[u8]>, Closed> {
    let Some((prefix, rest)) = bytes.split_first_chunk::<PREFIX_BYTES>() else {
        return Ok(None);
    };
    let length = u32::from_le_bytes(*prefix) as usize;
    if length > MAX_FRAME_BYTES {
        return Err(Closed::TooLong(length));
    }
    Ok(rest.get(..length))
}
