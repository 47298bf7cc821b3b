//! What the control plane tells its caller when it can't go on. Requests that are refused: `queue`, `intake`.

use thiserror::Error;

/// A value of `CoreConfig` is impossible; the message names it.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{0}")]
pub struct ConfigError(pub String);

/// The runner and the control plane disagree; the engine can't go on.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum StepError {
    #[error("step: a result was given, but no step is in flight")]
    NothingInFlight,
    #[error("step: {0} steps are in flight, the most that depth {0} allows; commit one first")]
    TooDeep(usize),
    #[error("masks: {0}")]
    BadMasks(String),
    #[error("step {step}, row {row}: {message}")]
    BadOutput {
        step: u64,
        row: usize,
        message: String,
    },
}
