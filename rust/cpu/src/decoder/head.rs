//! Logits of some tokens of the last step, a few rows at a time, and what is done with each run of them.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::MACS_PER_THREAD;
use super::description::Description;
use super::rows::{cap, rms_norm};
use super::weights::Weights;
use crate::activations::Activations;
use crate::matrix::{Input, Output};
use crate::pool::{Team, ThreadPool};
use crate::sampling::clean;
use crate::shared::Shared;

/// Logits that exist at a time. Every chunk of rows reads the head's weights again.
const MAX_LOGITS: usize = 1 << 22;

/// Buffers of the head.
#[derive(Default)]
pub struct Head {
    normed: Vec<f32>,
    logits: Vec<f32>,
    quants: Activations,
}

/// The first arguments of every call.
pub struct HeadCall<'a> {
    pub description: &'a Description,
    pub weights: &'a Weights,
    pub pool: &'a ThreadPool,
    /// `[tokens, hidden_size]` behind the last layer, of those that the step keeps.
    pub hidden: &'a [f32],
}

impl Head {
    /// Call `visit(i, logits)` for each of `runs` of kept tokens, from any thread, once, with `[tokens, vocab_size]` logits;
    /// they are clean (no NaN, no +inf) and may be used up.
    pub fn visit(
        &mut self,
        call: &HeadCall<'_>,
        runs: &[Range<usize>],
        visit: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) {
        let most = (MAX_LOGITS / call.description.vocab_size).max(1);
        let mut first = 0;
        while first < runs.len() {
            let mut num_tokens = runs[first].len();
            let mut end = first + 1;
            while end < runs.len() && num_tokens + runs[end].len() <= most {
                num_tokens += runs[end].len();
                end += 1;
            }
            self.run(call, &runs[first..end], &|index, logits| {
                visit(first + index, logits);
            });
            first = end;
        }
    }

    fn run(
        &mut self,
        call: &HeadCall<'_>,
        runs: &[Range<usize>],
        visit: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) {
        let tokens: Vec<usize> = runs.iter().cloned().flatten().collect();
        let mut ends = 0;
        let places: Vec<Range<usize>> = runs
            .iter()
            .map(|run| {
                ends += run.len();
                ends - run.len()..ends
            })
            .collect();
        let (description, head) = (call.description, call.weights.head());
        let (vocab, hidden) = (description.vocab_size, description.hidden_size);
        let is_integer = head.format().is_integer();
        self.normed.resize(tokens.len() * hidden, 0.0);
        self.logits.resize(tokens.len() * vocab, 0.0);
        self.quants
            .resize(if is_integer { tokens.len() } else { 0 }, hidden);
        let (normed, logits) = (Shared::new(&mut self.normed), Shared::new(&mut self.logits));
        let quants = is_integer.then_some(&self.quants);
        let next = AtomicUsize::new(0);
        let macs = tokens.len() * vocab * hidden;
        let num_threads = (macs / MACS_PER_THREAD).clamp(1, call.pool.num_threads());
        call.pool.run_on(num_threads, &|team: &Team<'_>| {
            for row in team.share(tokens.len(), 1) {
                let x = &call.hidden[tokens[row] * hidden..][..hidden];
                // SAFETY: each row is one thread's.
                let out = unsafe { normed.part_mut(row * hidden..(row + 1) * hidden) };
                rms_norm(x, &call.weights.final_norm, description.norm_eps, out);
            }
            team.barrier();
            // SAFETY: nobody writes to it any more.
            let x = unsafe { normed.part(0..normed.len()) };
            if let Some(quants) = quants {
                // SAFETY: each row is one thread's.
                unsafe { quants.fill_part(normed, team.share(tokens.len(), 1), 0..hidden) };
                team.barrier();
            }
            let input = Input {
                x,
                rows: tokens.len(),
                quantized: quants,
            };
            // SAFETY: threads write disjoint parts, which nobody reads before the barrier.
            unsafe { head.multiply(team, &input, &Output::dense(logits, vocab)) };
            team.barrier();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(place) = places.get(index) else {
                    break;
                };
                // SAFETY: each run is taken once, and runs have places of their own.
                let run_logits = unsafe { logits.part_mut(place.start * vocab..place.end * vocab) };
                if description.logit_cap > 0.0 {
                    cap(run_logits, description.logit_cap);
                }
                clean(run_logits);
                visit(index, run_logits);
            }
        });
    }
}
