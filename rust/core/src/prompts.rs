//! Divides what the decodes leave of a step between prompts (and recomputations, which are the same).
//!
//! The first in turn keeps at least half, so it goes on in every step and nobody starves. Out of the other half
//! shorter ones go before it, the shortest first, so that a short prompt does not wait behind a long one; prompts of
//! equal length don't slow each other down. What is left goes round in turn. A waiting sequence is admitted when its
//! tokens come, never before: it holds no slot in vain, and it may find a prefix in the cache that another one has
//! computed meanwhile. Under the priority policy nobody is overtaken by the less urgent.

use crate::ids::SeqIdx;
use crate::queue::QueueKey;
use crate::scheduler::Planner;

/// How many waiting sequences are looked at for a shorter prompt.
pub const LOOKAHEAD: usize = 32;

/// A sequence that may go before the first in turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Shorter {
    num_tokens: u32,
    key: QueueKey,
    seq: SeqIdx,
    is_waiting: bool,
}

impl Planner<'_> {
    /// Chunks for the running sequences `prefills` (in turn) and for newcomers.
    pub fn schedule_prompts(&mut self, mut prefills: Vec<SeqIdx>) {
        self.limit_prompts(&prefills);
        let key = |planner: &Self, seq: SeqIdx| planner.state.table.seq(seq).key;
        let first = prefills.first().map(|seq| key(self, *seq));
        if let Some((head, seq)) = self.state.queue.first()
            && first.is_none_or(|first| head < first)
            && self.try_admit(seq)
        {
            prefills.insert(0, seq);
        }
        let Some((first, rest)) = prefills.split_first() else {
            return;
        };
        let served = self.schedule_shorter(*first, rest);
        self.schedule_chunk(*first, u32::MAX);
        let mut rest = rest.iter().filter(|seq| !served.contains(seq)).peekable();
        while self.budget > 0 {
            let running = rest.peek().map(|seq| key(self, **seq));
            match self.state.queue.first() {
                Some((head, seq))
                    if running.is_none_or(|running| head < running) && self.try_admit(seq) =>
                {
                    self.schedule_chunk(seq, u32::MAX);
                }
                _ => match rest.next() {
                    Some(seq) => self.schedule_chunk(*seq, u32::MAX),
                    None => return,
                },
            }
        }
    }

    /// Cuts the budget so that a step with decode rows does not take too long.
    fn limit_prompts(&mut self, prefills: &[SeqIdx]) {
        let num_decodes = self.num_decodes();
        let may_start = self.can_admit() && !self.state.queue.is_empty();
        if num_decodes == 0 || (prefills.is_empty() && !may_start) {
            return;
        }
        let remaining = |seq: &SeqIdx| u64::from(self.state.table.seq(*seq).num_remaining());
        let pending =
            self.state.queue.load().num_tokens + prefills.iter().map(remaining).sum::<u64>();
        let max_itl_ms = self.state.config.max_itl_ms;
        let cost = &self.state.step_cost;
        let most = cost.max_prompt_tokens(num_decodes, pending, max_itl_ms);
        let sizes = &self.state.config.step_sizes;
        self.budget = self.budget.min(sizes.piece(num_decodes, most, pending));
    }

    /// Gives up to half of the budget to sequences that need less than `first`; who got some.
    fn schedule_shorter(&mut self, first: SeqIdx, rest: &[SeqIdx]) -> Vec<SeqIdx> {
        let mut spare = self.budget / 2;
        let mut served = Vec::new();
        if self.state.table.seq(first).num_remaining() <= self.budget - spare {
            return served; // nobody waits for it
        }
        for shorter in self.find_shorter(first, rest) {
            if spare == 0 {
                break;
            }
            if shorter.is_waiting && !self.try_admit(shorter.seq) {
                continue;
            }
            let before = self.budget;
            self.schedule_chunk(shorter.seq, spare);
            spare = spare.saturating_sub(before - self.budget);
            served.push(shorter.seq);
        }
        served
    }

    /// Those as urgent as `first` that need fewer tokens, the shortest first.
    fn find_shorter(&self, first: SeqIdx, rest: &[SeqIdx]) -> Vec<Shorter> {
        let table = &self.state.table;
        let (limit, priority) = (
            table.seq(first).num_remaining(),
            table.seq(first).key.priority,
        );
        let shorter = |seq: SeqIdx, is_waiting: bool| Shorter {
            num_tokens: table.seq(seq).num_remaining(),
            key: table.seq(seq).key,
            seq,
            is_waiting,
        };
        let running = rest.iter().map(|seq| shorter(*seq, false));
        let lookahead = if self.can_admit() { LOOKAHEAD } else { 0 };
        let waiting = self.state.queue.iter().take(lookahead);
        let mut found: Vec<Shorter> = running
            .chain(waiting.map(|(_, seq)| shorter(seq, true)))
            .filter(|other| other.num_tokens < limit && other.key.priority == priority)
            .collect();
        found.sort_unstable();
        found
    }
}
