//! What drafted tokens cost: how much longer steps of decodes take with them, by the number of rows.
//!
//! A line is fitted to the last few steps with drafts, as to those with prompts (`prompt_cost`). The time without drafts
//! is measured in between, and where drafts did not pay they are tried again now and then.

use std::collections::VecDeque;

use crate::prompt_cost::{Line, Sample, fit, push};
use crate::step_cost::{NUM_SIZES, size_of};

/// Steps with drafts that are remembered of each size.
const WINDOW: usize = 16;
/// After so many steps with drafts one goes without.
const MAX_DRAFTED: u32 = 32;
/// After so many steps without drafts the price is asked again.
const MAX_PLAIN: u32 = 64;
/// Until it is measured, a drafted token costs such a share of what a row costs.
const ASSUMED_SHARE: f64 = 0.3;
/// Most drafted tokens of a step of which nothing is known; else twice of what was measured.
const FIRST_TOKENS: u32 = 4;

/// What a step would pay for drafts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DraftPrice {
    /// Of the step without them.
    pub plain_ms: f64,
    /// With any.
    pub fixed_ms: f64,
    pub ms_per_token: f64,
    pub max_tokens: u32,
}

#[derive(Debug, Default)]
struct Size {
    samples: VecDeque<Sample>,
    line: Line,
    /// Steps since the last one of the other kind.
    num_drafted: u32,
    num_plain: u32,
}

/// Times of steps with drafts, by rows.
#[derive(Debug, Default)]
pub struct DraftCosts {
    sizes: [Size; NUM_SIZES],
}

impl DraftCosts {
    /// A step of `num_rows` decodes had no drafts.
    pub fn record_plain(&mut self, num_rows: u32) {
        let size = &mut self.sizes[size_of(num_rows)];
        size.num_drafted = 0;
        size.num_plain += 1;
    }

    /// A step of `num_rows` decodes took `extra_ms` longer with `num_tokens` drafted tokens.
    pub fn record(&mut self, num_rows: u32, num_tokens: u32, extra_ms: f64) {
        let size = &mut self.sizes[size_of(num_rows)];
        size.num_drafted += 1;
        size.num_plain = 0;
        let sample = Sample {
            num_tokens,
            extra_ms: extra_ms.max(0.0),
        };
        push(&mut size.samples, sample, WINDOW);
        size.line = fit(&size.samples, |small, large| small < large);
    }

    /// Drafts of a step of `num_rows` decodes, which takes `plain_ms` without. `None`: it has none.
    pub fn price(&self, num_rows: u32, plain_ms: f64) -> Option<DraftPrice> {
        let at = size_of(num_rows);
        let size = &self.sizes[at];
        if size.num_drafted >= MAX_DRAFTED {
            return None;
        }
        let largest = size.samples.iter().map(|sample| sample.num_tokens).max();
        let is_old = size.num_plain >= MAX_PLAIN;
        let smaller = self.sizes[..=at].iter().rev();
        let mut nearest = smaller.chain(&self.sizes[at + 1..]);
        let known = nearest.find(|size| !size.samples.is_empty());
        let line = known.filter(|_| !is_old).map_or(
            Line {
                fixed_ms: 0.0,
                ms_per_token: ASSUMED_SHARE * plain_ms / f64::from(num_rows),
                is_guess: true,
            },
            |size| size.line,
        );
        let max_tokens = match largest {
            Some(largest) if !is_old => 2 * largest.max(FIRST_TOKENS),
            _ => FIRST_TOKENS,
        };
        Some(DraftPrice {
            plain_ms,
            fixed_ms: line.fixed_ms,
            ms_per_token: line.ms_per_token,
            max_tokens,
        })
    }
}
