//! One sequence's place in its grammar: it takes the sequence's tokens in and says what may follow.
//!
//! A guide may know tokens that are not committed yet (the next step's mask needs them), so an end is remembered with
//! the number of tokens it came at. Nothing in here panics: a fault of the parser ends this guide only.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use llguidance::Matcher;

use super::compiler::Compiled;
use super::spec::StartAfter;
use super::vocabulary::Vocabulary;
use crate::ids::TokenId;

/// Free text before the constraint begins.
#[derive(Clone, Debug)]
struct Gate {
    start_after: Arc<StartAfter>,
    /// The newest bytes or ids, no more than are needed to find the end.
    bytes: Vec<u8>,
    ids: Vec<TokenId>,
}

impl Gate {
    /// Takes a token in; whether the free text ends with it.
    fn opens_at(&mut self, id: TokenId, vocabulary: &Vocabulary) -> bool {
        match &*self.start_after {
            StartAfter::Text(text) => {
                let (needle, piece) = (text.as_bytes(), vocabulary.shown_bytes(id));
                self.bytes.extend_from_slice(piece);
                let found = self.bytes.windows(needle.len()).any(|part| part == needle);
                let keep = self.bytes.len().min(needle.len() - 1);
                self.bytes.drain(..self.bytes.len() - keep);
                found
            }
            StartAfter::Ids(ids) => {
                self.ids.push(id);
                if self.ids.len() > ids.len() {
                    self.ids.remove(0);
                }
                self.ids == *ids
            }
        }
    }
}

/// How a guide's sequence ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The grammar is complete after so many tokens and can't go on.
    Complete(usize),
    /// The parser gave up; why.
    Failed(String),
}

#[derive(Clone)]
pub struct Guide {
    compiled: Arc<Compiled>,
    matcher: Matcher,
    gate: Option<Gate>,
    /// Guides of one lane share the parser's caches, behind a lock.
    lane: usize,
    num_consumed: usize,
    pending: Vec<TokenId>,
    end: Option<End>,
}

impl std::fmt::Debug for Guide {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Guide({} tokens, {:?})",
            self.num_consumed + self.pending.len(),
            self.end
        )
    }
}

impl Guide {
    pub fn new(compiled: &Arc<Compiled>) -> Self {
        let (lane, matcher) = compiled.matcher();
        let gate = compiled.start_after.as_ref().map(|start_after| Gate {
            start_after: Arc::clone(start_after),
            bytes: Vec::new(),
            ids: Vec::new(),
        });
        Self {
            compiled: Arc::clone(compiled),
            matcher,
            gate,
            lane,
            num_consumed: 0,
            pending: Vec::new(),
            end: None,
        }
    }

    pub fn lane(&self) -> usize {
        self.lane
    }

    /// Whether offered tokens wait for `advance`.
    pub fn is_behind(&self) -> bool {
        !self.pending.is_empty() && self.end.is_none()
    }

    /// Shows the output tokens from number `start` on; those known already are skipped.
    pub fn offer(&mut self, start: usize, token_ids: impl Iterator<Item = TokenId>) {
        let known = self.num_consumed + self.pending.len();
        debug_assert!(start <= known, "a gap in the tokens of a guide");
        self.pending
            .extend(token_ids.skip(known.saturating_sub(start)));
    }

    /// Whether nothing may follow the first `num_output` tokens.
    pub fn is_complete_at(&self, num_output: u32) -> bool {
        matches!(self.end, Some(End::Complete(at)) if at == num_output as usize)
    }

    /// Why the parser gave up, if it did.
    pub fn failure(&self) -> Option<&str> {
        match &self.end {
            Some(End::Failed(reason)) => Some(reason),
            Some(End::Complete(_)) | None => None,
        }
    }

    /// Takes in the tokens offered.
    pub fn advance(&mut self) {
        for id in std::mem::take(&mut self.pending) {
            if self.end.is_some() {
                return;
            }
            self.num_consumed += 1;
            let taken = catch_unwind(AssertUnwindSafe(|| self.consume(id)));
            match taken {
                Ok(Ok(true)) => self.end = Some(End::Complete(self.num_consumed)),
                Ok(Ok(false)) => {}
                Ok(Err(message)) => self.fail(&message),
                Err(_) => self.fail("the parser panicked"),
            }
        }
    }

    /// Takes one token in; whether nothing may follow.
    fn consume(&mut self, id: TokenId) -> Result<bool, String> {
        if let Some(gate) = &mut self.gate {
            if gate.opens_at(id, &self.compiled.vocabulary) {
                self.gate = None;
            }
            return Ok(false);
        }
        self.matcher
            .consume_token(id)
            .map_err(|error| first_line(&error.to_string()))?;
        Ok(self.matcher.is_stopped())
    }

    /// Writes which tokens may follow: bit `i % 32` of word `i / 32` is token `i`. Bits past the vocabulary are 0, all
    /// bits are 1 where nothing is forbidden. The text does not end before its constraint has begun.
    pub fn fill(&mut self, mask: &mut [i32]) {
        self.advance();
        if self.gate.is_some() || self.end.is_some() {
            mask.fill(-1);
            if self.end.is_none() {
                for id in self.compiled.vocabulary.eos() {
                    mask[*id as usize / 32] &= !(1 << (id % 32));
                }
            }
            return;
        }
        let filled = catch_unwind(AssertUnwindSafe(|| self.matcher.compute_mask()));
        match filled {
            Ok(Ok(allowed)) => {
                let words = allowed.as_slice();
                let count = words.len().min(mask.len());
                for (target, word) in mask.iter_mut().zip(words) {
                    *target = word.cast_signed();
                }
                mask[count..].fill(0);
            }
            Ok(Err(error)) => {
                mask.fill(-1);
                self.fail(&first_line(&error.to_string()));
            }
            Err(_) => {
                mask.fill(-1);
                self.fail("the parser panicked");
            }
        }
    }

    /// Fills the first of `masks`, and one behind each token of a draft.
    pub fn fill_drafted<'a>(
        &mut self,
        masks: &mut impl Iterator<Item = &'a mut [i32]>,
        draft: &[TokenId],
    ) {
        if let Some(mask) = masks.next() {
            self.fill(mask);
        }
        if draft.is_empty() {
            return;
        }
        let mut probe = self.clone();
        for (id, mask) in draft.iter().zip(masks) {
            probe.pending.push(*id);
            probe.fill(mask);
        }
    }

    /// The text that must come next, in tokens as long as there are (the model may spell it otherwise); nothing while the
    /// text is free.
    pub fn forced(&self) -> Vec<TokenId> {
        debug_assert!(self.pending.is_empty(), "a draft behind unknown tokens");
        if self.gate.is_some() || self.end.is_some() {
            return Vec::new();
        }
        let mut probe = self.matcher.clone();
        let bytes = catch_unwind(AssertUnwindSafe(|| probe.compute_ff_bytes()));
        let bytes = bytes.unwrap_or_default();
        self.compiled.vocabulary.trie().greedy_tokenize(&bytes)
    }

    /// How many tokens of a draft may follow; none of them ends the text. The guide has taken in all tokens before.
    pub fn num_allowed(&self, draft: &[TokenId]) -> usize {
        debug_assert!(self.pending.is_empty(), "a draft behind unknown tokens");
        let mut probe = self.clone();
        let allowed = draft.iter().take_while(|id| {
            let is_early = probe.gate.is_some() && self.compiled.vocabulary.eos().contains(id);
            probe.pending.push(**id);
            probe.advance();
            !is_early && probe.end.is_none()
        });
        allowed.count()
    }

    fn fail(&mut self, reason: &str) {
        self.end = Some(End::Failed(format!(
            "structured_outputs: the grammar can't go on after {} tokens: {reason}",
            self.num_consumed
        )));
    }
}

/// Errors of the parser go on with its state.
fn first_line(message: &str) -> String {
    message.lines().next().unwrap_or_default().to_owned()
}
