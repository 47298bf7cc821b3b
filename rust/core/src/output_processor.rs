//! Engine frames become text: detokenization and stop strings for all sequences of a client, one call a frame.
//!
//! Lives in the API process. Not here: bytes (`frames`) and Python objects (octavo-py).

use std::collections::HashMap;
use std::sync::Arc;

use crate::detokenizer::Detokenizer;
use crate::ids::{RequestId, TokenId};
use crate::pieces::Pieces;
use crate::protocol::{FinishReason, OutputFrame, SequenceOutput, TokenLogprobs};
use crate::stop::{StopMatcher, StopSet};

/// What a request wants of its text.
#[derive(Clone, Debug)]
pub struct TextOptions {
    pub stop: Vec<String>,
    /// A stop string that is complete before this many tokens doesn't count.
    pub min_tokens: u32,
    pub include_stop_str_in_output: bool,
    pub skip_special_tokens: bool,
    pub detokenize: bool,
}

/// What ended a sequence, where the finish reason alone doesn't say it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopReason {
    Token(TokenId),
    Text(String),
}

/// What one sequence gained. Text may lag behind ids; the last delta flushes it.
#[derive(Clone, Debug, PartialEq)]
pub struct Delta {
    pub request_id: RequestId,
    pub index: u32,
    pub text: String,
    pub token_ids: Vec<TokenId>,
    pub logprobs: Option<Vec<TokenLogprobs>>,
    pub prompt_logprobs: Option<Vec<TokenLogprobs>>,
    pub finish_reason: Option<FinishReason>,
    /// None for EOS and for every reason but `Stop`.
    pub stop_reason: Option<StopReason>,
    pub num_cached_tokens: Option<u32>,
    pub queue_s: Option<f32>,
    /// A stop string ended the sequence and the engine does not know yet.
    pub must_abort: bool,
}

/// The requests of one client.
#[derive(Debug)]
pub struct OutputProcessor {
    pieces: Option<Arc<Pieces>>,
    eos_token_ids: Vec<TokenId>,
    requests: HashMap<RequestId, Request>,
}

#[derive(Debug)]
struct Request {
    /// None once a sequence has ended.
    sequences: Vec<Option<Sequence>>,
}

/// One sequence under way.
#[derive(Clone, Debug)]
struct Sequence {
    /// None: ids only.
    detokenizer: Option<Detokenizer>,
    /// None: no stop strings.
    matcher: Option<StopMatcher>,
    /// The text of a stop token is shown.
    shows_stop_token: bool,
    /// Tokens to come before stop strings count.
    num_before_stop: usize,
}

impl OutputProcessor {
    /// Without `pieces` (a model without a tokenizer) all text is empty.
    pub fn new(pieces: Option<Arc<Pieces>>, eos_token_ids: Vec<TokenId>) -> Self {
        Self {
            pieces,
            eos_token_ids,
            requests: HashMap::new(),
        }
    }

    /// Gets ready for the `n` sequences of a request, whose text goes on where `prompt` ends.
    pub fn add(&mut self, id: RequestId, n: u32, prompt: &[TokenId], options: TextOptions) {
        let pieces = self.pieces.as_deref().filter(|_| options.detokenize);
        let stops = StopSet::new(options.stop);
        let has_matcher = pieces.is_some() && !stops.is_empty();
        let matcher = has_matcher
            .then(|| StopMatcher::new(Arc::new(stops), options.include_stop_str_in_output));
        let sequence = Sequence {
            detokenizer: pieces
                .map(|pieces| Detokenizer::after(pieces, prompt, options.skip_special_tokens)),
            matcher,
            shows_stop_token: options.include_stop_str_in_output,
            num_before_stop: (options.min_tokens as usize).saturating_sub(1),
        };
        let sequences = vec![Some(sequence); n as usize];
        self.requests.insert(id, Request { sequences });
    }

    /// Forgets a request; its later outputs are dropped.
    pub fn remove(&mut self, id: RequestId) {
        self.requests.remove(&id);
    }

    /// Requests that have sequences under way.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Turns the outputs of a frame into deltas, in order. Outputs of unknown requests and ended sequences are dropped;
    /// a request is forgotten when its last sequence ends or when it is refused.
    pub fn process(&mut self, frame: &mut OutputFrame) -> Vec<Delta> {
        for refusal in &frame.refusals {
            self.requests.remove(&refusal.request_id);
        }
        frame
            .outputs
            .drain(..)
            .filter_map(|output| self.process_output(output))
            .collect()
    }

    fn process_output(&mut self, output: SequenceOutput) -> Option<Delta> {
        let id = output.request_id;
        let request = self.requests.get_mut(&id)?;
        let slot = request.sequences.get_mut(output.index as usize)?;
        let delta = slot
            .as_mut()?
            .extend(output, self.pieces.as_deref(), &self.eos_token_ids);
        if delta.finish_reason.is_some() {
            *slot = None;
            if request.sequences.iter().all(Option::is_none) {
                self.requests.remove(&id);
            }
        }
        Some(delta)
    }
}

impl Sequence {
    fn extend(
        &mut self,
        output: SequenceOutput,
        pieces: Option<&Pieces>,
        eos_token_ids: &[TokenId],
    ) -> Delta {
        let (text, stop) = self.show(&output, pieces);
        let mut delta = Delta {
            request_id: output.request_id,
            index: output.index,
            text,
            token_ids: output.token_ids,
            logprobs: Some(output.logprobs).filter(|logprobs| !logprobs.is_empty()),
            prompt_logprobs: output.prompt_logprobs,
            finish_reason: output.finish,
            stop_reason: None,
            num_cached_tokens: output.num_cached_tokens,
            queue_s: output.queue_s,
            must_abort: false,
        };
        if let Some((num_tokens, stop)) = stop {
            delta.token_ids.truncate(num_tokens);
            if let Some(logprobs) = &mut delta.logprobs {
                logprobs.truncate(num_tokens);
            }
            delta.must_abort = output.finish.is_none();
            delta.finish_reason = Some(FinishReason::Stop);
            delta.stop_reason = Some(StopReason::Text(stop));
        } else if output.finish == Some(FinishReason::Stop) {
            let stop_id = output
                .stop_token_id
                .filter(|id| !eos_token_ids.contains(id));
            delta.stop_reason = stop_id.map(StopReason::Token);
        } else {
            delta.stop_reason = output.error.map(StopReason::Text);
        }
        delta
    }

    /// The new text, and the stop string that ended it with the number of tokens up to there.
    fn show(
        &mut self,
        output: &SequenceOutput,
        pieces: Option<&Pieces>,
    ) -> (String, Option<(usize, String)>) {
        let mut text = String::new();
        let (Some(detokenizer), Some(pieces)) = (&mut self.detokenizer, pieces) else {
            return (text, None);
        };
        let mut token_ids = output.token_ids.as_slice();
        if let Some((last, others)) = token_ids.split_last()
            && output.stop_token_id == Some(*last)
            && !self.shows_stop_token
        {
            token_ids = others;
        }
        let Some(matcher) = &mut self.matcher else {
            for id in token_ids {
                detokenizer.push(pieces, *id, &mut text);
            }
            if output.finish.is_some() {
                detokenizer.finish(pieces, &mut text);
            }
            return (text, None);
        };
        let mut new = String::new();
        for (at, id) in token_ids.iter().enumerate() {
            new.clear();
            detokenizer.push(pieces, *id, &mut new);
            let may_stop = at >= self.num_before_stop;
            if let Some(stop) = matcher.push(&new, may_stop, &mut text) {
                return (text, Some((at + 1, stop.to_owned())));
            }
        }
        let num_tokens = output.token_ids.len();
        if output.finish.is_some() {
            new.clear();
            detokenizer.finish(pieces, &mut new);
            let may_stop = num_tokens > self.num_before_stop;
            if let Some(stop) = matcher.push(&new, may_stop, &mut text) {
                return (text, Some((num_tokens, stop.to_owned())));
            }
            matcher.finish(&mut text);
        }
        self.num_before_stop = self.num_before_stop.saturating_sub(num_tokens);
        (text, None)
    }
}
