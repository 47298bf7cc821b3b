//! Speculation: tokens are guessed (by what followed the newest ones before, or because a grammar forces them), computed
//! in one row behind the newest token, and kept as far as sampling agrees.
//!
//! A drafted token is accepted when it is the very token that is sampled at its position, with the sequence's own random
//! numbers: outputs are those of an engine without drafts, whoever guesses. A draft is data of the plan (`plan::Row`,
//! the arena's `num_drafted`); the runner samples behind each of a row's drafted tokens until it disagrees.
//! Not here: sampling and comparing (the runner), taking results in (`commit`).

mod cost;
mod drafting;
mod lengths;
mod ngram;
mod plan;

pub use cost::{DraftCosts, DraftPrice};
pub use drafting::Drafting;

use crate::errors::ConfigError;

/// How drafts are made, and how long they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpeculationConfig {
    /// Most drafted tokens of a row.
    pub num_tokens: u32,
    /// So many of the newest tokens must have come before, one after another.
    pub lookup_min: u32,
    /// Of several places that one with the longest match is taken, up to this length.
    pub lookup_max: u32,
    /// Drafts only where they pay, by what steps take and how often drafts were right; else wherever there is one.
    pub is_measured: bool,
}

impl SpeculationConfig {
    /// Every range that the rest relies on.
    pub fn validate(&self) -> Result<(), ConfigError> {
        const MOST: u32 = 64;
        for (name, value, low) in [
            ("num_speculative_tokens", self.num_tokens, 1),
            ("prompt_lookup_min", self.lookup_min, 1),
            ("prompt_lookup_max", self.lookup_max, self.lookup_min),
        ] {
            if value < low || value > MOST {
                return Err(ConfigError(format!(
                    "{name}: {value} is not within {low} and {MOST}"
                )));
            }
        }
        Ok(())
    }
}
