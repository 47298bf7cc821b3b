//! A device and an engine loop for tests: KV blocks hold what was really written to them, so a row that reads a wrong,
//! stale or foreign position is noticed at once, and a token depends on every token before it.

#![allow(dead_code, clippy::unwrap_used)]

pub mod device;
pub mod engine;
pub mod oracle;
