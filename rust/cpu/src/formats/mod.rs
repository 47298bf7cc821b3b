//! Weights in blocks of small integers: what GGUF's blocks hold, and where the packed form keeps it.

pub mod gguf;
pub mod planes;
pub mod scales;
