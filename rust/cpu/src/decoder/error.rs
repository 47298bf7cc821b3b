//! What a decoder refuses.

use crate::error::KernelError;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecoderError {
    #[error("{0}")]
    Description(String),
    #[error("{0}")]
    Weights(String),
    /// A step that breaks the runner's contract.
    #[error("step: {0}")]
    Step(String),
    #[error(transparent)]
    Kernel(#[from] KernelError),
}
