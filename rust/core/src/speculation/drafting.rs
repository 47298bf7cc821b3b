//! One sequence's side of speculation: what can be drafted for it, and how often drafts were right.

use super::SpeculationConfig;
use super::ngram::NgramIndex;
use crate::ids::TokenId;

/// How much of what was seen counts after one more row.
const MEMORY: f64 = 0.8;
/// Comparisons that are thought to come out wrong, so that a few right ones are no certainty.
const DOUBT: f64 = 0.5;

#[derive(Debug)]
pub struct Drafting {
    index: Option<Box<NgramIndex>>,
    /// Drafted tokens in flight. Until it is known how many are right the sequence gets no rows.
    pub num_in_flight: u32,
    /// What a draft for the row in flight would have begun with.
    expected: Option<TokenId>,
    /// Drafted tokens that were right, and all that were compared; older ones count less.
    num_right: f64,
    num_compared: f64,
}

impl Default for Drafting {
    /// Before anything is seen, two of five tokens are thought to be right.
    fn default() -> Self {
        Self {
            index: None,
            num_in_flight: 0,
            expected: None,
            num_right: 1.0,
            num_compared: 2.0,
        }
    }
}

impl Drafting {
    /// Appends a draft of at most `num` tokens behind `len` known ones, leaving out the first `skip`.
    pub fn look_up(
        &mut self,
        config: &SpeculationConfig,
        len: usize,
        token: impl Fn(usize) -> TokenId,
        range: (usize, usize),
        draft: &mut Vec<TokenId>,
    ) {
        let new = || Box::new(NgramIndex::new(config.lookup_min, config.lookup_max));
        let index = self.index.get_or_insert_with(new);
        index.look_up(len, token, range, draft);
    }

    /// Share of drafted tokens that are right, as far as is known.
    pub fn rate(&self) -> f64 {
        self.num_right / (self.num_compared + DOUBT)
    }

    /// The row that was planned has no draft, but could have had one that begins with `first`.
    pub fn expect(&mut self, first: Option<TokenId>) {
        self.expected = first;
    }

    /// A row without a draft brought `token_id`.
    pub fn settle_plain(&mut self, token_id: TokenId) {
        if let Some(expected) = self.expected.take() {
            let is_right = expected == token_id;
            self.count(u32::from(is_right), u32::from(!is_right));
        }
    }

    /// Of the draft in flight the first `num_right` tokens were right.
    pub fn settle(&mut self, num_right: u32) {
        let num_drafted = std::mem::take(&mut self.num_in_flight);
        self.count(num_right, u32::from(num_right < num_drafted));
    }

    fn count(&mut self, num_right: u32, num_wrong: u32) {
        self.num_right = MEMORY * self.num_right + f64::from(num_right);
        self.num_compared = MEMORY * self.num_compared + f64::from(num_right + num_wrong);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_follows_what_is_seen() {
        let mut drafting = Drafting::default();
        assert!((drafting.rate() - 0.4).abs() < 1e-9);
        for _ in 0..3 {
            drafting.num_in_flight = 4;
            drafting.settle(4);
        }
        assert!(drafting.rate() > 0.85, "{}", drafting.rate());
        for _ in 0..10 {
            drafting.expect(Some(3));
            drafting.settle_plain(4);
        }
        assert!(drafting.rate() < 0.3, "{}", drafting.rate());
        let before = drafting.rate();
        drafting.settle_plain(4);
        assert!(
            (drafting.rate() - before).abs() < 1e-9,
            "nothing was expected"
        );
    }
}
