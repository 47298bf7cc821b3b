//! Octavo's control plane: requests, queue, blocks, prefix hashes, scheduler, tokenizer, detokenizer, frames.
//!
//! No Python, no device code. `Core::step` is the whole boundary of the engine loop: it commits the result of the
//! oldest step in flight and plans the next one. Everything else turns bytes into requests and outputs into bytes.
#![forbid(unsafe_code)]

pub mod frames;
pub mod ids;
pub mod mailbox;
pub mod protocol;
pub mod wire;
