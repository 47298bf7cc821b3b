//! Unix-socket frames between API and engine processes.
//!
//! `Server` lives in the engine process: one IO thread moves frames between the sockets of any number of clients and
//! the mailbox. A frame on the socket is a u32 length (little-endian), then that many bytes (`octavo_core::frames`).
//! Not here: what frames mean, and the clients (Python, asyncio).
#![deny(unsafe_code)]

mod connection;
mod server;
mod wake;

pub use connection::{MAX_BUFFERED_BYTES, MAX_FRAME_BYTES};
pub use server::Server;
