//! CPU kernels over raw pointers, with runtime dispatch: paged attention and the KV write that goes before it.
//!
//! Callers give addresses and sizes; everything that can be checked is checked before anything is read through an index,
//! and wrong input is an error, never undefined behaviour. No tensors, no Python here.

// A kernel is generic over `Simd`, and only where it is inlined into a function compiled for those instructions does it
// become them; nothing less than `always` ensures that.
#![allow(clippy::inline_always)]
// Small matrices of registers are indexed by row and column.
#![allow(clippy::needless_range_loop)]

pub mod activations;
mod affinity;
pub mod attention;
mod checks;
mod chunks;
pub mod decoder;
pub mod element;
pub mod error;
mod formats;
pub mod isa;
pub mod kv_write;
pub mod limits;
mod lines;
pub mod matrix;
pub mod pool;
pub mod sampling;
mod scratch;
pub mod shared;
mod signal;
mod simd;

pub use activations::Activations;
pub use attention::{AttentionArgs, paged_attention};
pub use element::{CacheDtype, Dtype};
pub use error::KernelError;
pub use isa::Isa;
pub use kv_write::{WriteArgs, write_kv};
pub use matrix::format::Format;
pub use matrix::{Input, Matrix, Output};
pub use pool::{Team, ThreadPool};
pub use shared::Shared;
