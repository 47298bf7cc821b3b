//! From a row of logits to a token: the features of `octavo.sampling`, with the same meaning, order and draws, one row at
//! a time. No unsafe code.

mod logprobs;
mod slot;
mod uniform;
mod weights;

pub use logprobs::gather;
pub use slot::{Params, SlotSampling, clean};
