//! Lengthens the decode rows of a step by drafts. Steps with prompts have none: they are bound by arithmetic, where a
//! drafted token costs as much as any.

use super::SpeculationConfig;
use super::lengths::{Offer, choose_lengths, least_chance};
use crate::ids::TokenId;
use crate::plan::Row;
use crate::scheduler::Planner;

/// A decode row and what could be drafted for it: `tokens` of all offers follow each other.
struct Candidate {
    row: Row,
    start: usize,
    offer: Offer,
}

impl Planner<'_> {
    /// Looks up drafts for the decode rows, and makes drafted rows of those for which they pay.
    pub fn schedule_drafts(&mut self) {
        let Some(config) = self.state.config.speculation else {
            return;
        };
        let num_rows = self.num_decodes();
        if num_rows == 0 || self.budget == 0 || self.has_prompts() {
            return;
        }
        let price = if config.is_measured {
            match self.state.step_cost.draft_price(num_rows) {
                Some(price) if least_chance(&price, num_rows) < 1.0 => Some(price),
                _ => return,
            }
        } else {
            None
        };
        let mut tokens = Vec::new();
        let mut candidates = Vec::with_capacity(num_rows as usize);
        for row in std::mem::take(&mut self.decodes) {
            let start = tokens.len();
            let rate = self.offer(&config, &row, &mut tokens);
            let num_tokens = (tokens.len() - start) as u32;
            let offer = Offer { num_tokens, rate };
            candidates.push(Candidate { row, start, offer });
        }
        let offers: Vec<Offer> = candidates.iter().map(|c| c.offer).collect();
        let lengths = match price {
            Some(price) => choose_lengths(&offers, &price, num_rows, self.state.config.depth - 1),
            None => offers.iter().map(|offer| offer.num_tokens).collect(),
        };
        for (candidate, length) in candidates.into_iter().zip(lengths) {
            let offered = &tokens[candidate.start..][..candidate.offer.num_tokens as usize];
            self.place(candidate.row, offered, length);
        }
    }

    /// Appends what could be drafted for a row to `tokens`: what its grammar forces, else what came before. The
    /// sequence's rate of right ones.
    fn offer(&mut self, config: &SpeculationConfig, row: &Row, tokens: &mut Vec<TokenId>) -> f64 {
        let sequence = self.state.table.seq_mut(row.seq);
        let num_output = sequence.output.len() as u32 + sequence.num_pending;
        let most = config
            .num_tokens
            .min(sequence.limits.max_output - num_output);
        // Tokens that are sampled, but not known here, are guessed too.
        let num_unknown = sequence.num_pending - 1;
        if most == 0 || (num_unknown > 0 && sequence.guide.is_some()) {
            return 0.0;
        }
        let start = tokens.len();
        if let Some(guide) = &sequence.guide {
            tokens.extend(guide.forced().into_iter().take(most as usize));
        }
        if tokens.len() == start {
            let mut drafting = std::mem::take(&mut sequence.drafting);
            drafting.look_up(
                config,
                sequence.num_known() as usize,
                |at| sequence.token(at as u32),
                (num_unknown as usize, most as usize),
                tokens,
            );
            sequence.drafting = drafting;
        }
        let offered = &tokens[start..];
        let stop = offered.iter().position(|id| sequence.names_stop(*id));
        let mut length = stop.unwrap_or(offered.len());
        if let Some(guide) = &sequence.guide {
            length = length.min(guide.num_allowed(offered));
        }
        tokens.truncate(start + length);
        sequence.drafting.rate()
    }

    /// Puts a decode row back, with the first `length` of the `offered` tokens as far as blocks and budget go.
    fn place(&mut self, mut row: Row, offered: &[TokenId], length: u32) {
        let length = self.make_place(&row, length.min(self.budget));
        let sequence = self.state.table.seq_mut(row.seq);
        if length == 0 {
            let is_known = sequence.num_pending == 1;
            sequence
                .drafting
                .expect(offered.first().copied().filter(|_| is_known));
            self.decodes.push(row);
            return;
        }
        sequence.drafting.num_in_flight = length;
        sequence.drafting.expect(None);
        row.num_drafted = length;
        row.len += length;
        self.budget -= length;
        self.drafts.extend(&offered[..length as usize]);
        self.drafted.push(row);
        self.state.stats.num_drafts += 1;
        self.state.stats.num_draft_tokens += u64::from(length);
    }

    /// Blocks for `length` more tokens of a row, or for as many as there are: a draft takes nothing from anybody, and
    /// leaves a block for every sequence that runs.
    fn make_place(&mut self, row: &Row, length: u32) -> u32 {
        let reserve = (self.state.running.len() * self.state.config.groups.len()) as u32;
        let most = self.state.cache.num_free().saturating_sub(reserve);
        let start = row.start + row.len;
        let fit = self.reach(row.seq, start + length, most);
        fit - start
    }
}
