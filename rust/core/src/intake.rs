//! Turns what clients send into requests, or into refusals.

use std::sync::Arc;
use std::time::Instant;

use crate::ids::{ClientId, RequestId, RequestIdx, SeqIdx};
use crate::media::{self, MAX_MEDIA_BYTES};
use crate::protocol::{Abort, AddRequest, FinishReason, RefusalKind};
use crate::queue::{Newcomer, QueueKey, deadline_after};
use crate::queue_load::RequestSize;
use crate::request::{Constraint, Request};
use crate::sequence::{Limits, Sequence, State};
use crate::state::EngineState;
use crate::tenants::Payer;

/// Most sequences of one request.
pub const MAX_N: u32 = 1024;

/// Why a request does not run.
struct Reason {
    kind: RefusalKind,
    message: String,
    retry_after_s: f32,
}

impl Reason {
    fn invalid(message: String) -> Self {
        Self {
            kind: RefusalKind::Invalid,
            message,
            retry_after_s: 0.0,
        }
    }
}

impl EngineState {
    pub fn add(&mut self, client: ClientId, request: AddRequest, now: Instant) {
        let request_id = request.request_id;
        let checked = self.check_request(client, &request);
        match checked.and_then(|()| self.constraint(&request, now)) {
            Ok(constraint) => self.enqueue(client, request, constraint, now),
            Err(reason) => self.refuse(client, request_id, reason),
        }
    }

    /// The request's grammar, as far as it is known now.
    fn constraint(&mut self, request: &AddRequest, now: Instant) -> Result<Constraint, Reason> {
        if request.grammar.is_empty() {
            return Ok(Constraint::Free);
        }
        let Some(grammars) = &mut self.grammars else {
            let message = "structured_outputs: this model has no tokenizer";
            return Err(Reason::invalid(message.into()));
        };
        let key: Arc<[u8]> = request.grammar.as_slice().into();
        match grammars.request(&key, now) {
            None => Ok(Constraint::Awaited(key)),
            Some(Ok(compiled)) => Ok(Constraint::Grammar(compiled)),
            Some(Err(error)) => Err(Reason::invalid(error.0)),
        }
    }

    /// Requests whose grammar is ready take their turns; those whose grammar is bad are refused.
    pub fn settle_grammars(&mut self, now: Instant) {
        let Some(grammars) = &mut self.grammars else {
            return;
        };
        for (grammar, outcome) in grammars.take_done(now) {
            let held: Vec<_> = self.queue.held().collect();
            for (key, seq) in held {
                let sequence = self.table.seq(seq);
                let (client, request_id, index) =
                    (sequence.client, sequence.request_id, sequence.request);
                let request = self.table.request_mut(index);
                if !matches!(&request.constraint, Constraint::Awaited(other) if *other == grammar) {
                    continue;
                }
                match &outcome {
                    Ok(compiled) => {
                        request.constraint = Constraint::Grammar(Arc::clone(compiled));
                        self.queue.release(key);
                    }
                    Err(error) => {
                        self.drop_request(index);
                        self.refuse(client, request_id, Reason::invalid(error.0.clone()));
                    }
                }
            }
        }
    }

    fn refuse(&mut self, client: ClientId, request_id: RequestId, reason: Reason) {
        self.stats.num_refused += 1;
        self.outputs.refuse(
            client,
            request_id,
            reason.kind,
            reason.message,
            reason.retry_after_s,
        );
    }

    fn check_request(&self, client: ClientId, request: &AddRequest) -> Result<(), Reason> {
        if let Some(message) = self.invalid(client, request) {
            return Err(Reason::invalid(message));
        }
        if self.is_draining {
            return Err(Reason {
                kind: RefusalKind::Draining,
                message: "the engine is shutting down and takes no new requests".into(),
                retry_after_s: 5.0,
            });
        }
        self.check_media_room(request)?;
        self.queue
            .check_room(request.tenant, RequestSize::of(request))
            .map_err(|full| Reason {
                kind: RefusalKind::QueueFull,
                message: full.message,
                retry_after_s: full.retry_after_s,
            })
    }

    /// Images take memory from their arrival to the end of their request.
    fn check_media_room(&self, request: &AddRequest) -> Result<(), Reason> {
        let wanted = request.media_data.len() as u64;
        if wanted == 0 || self.media_bytes + wanted <= MAX_MEDIA_BYTES {
            return Ok(());
        }
        Err(Reason {
            kind: RefusalKind::QueueFull,
            message: format!(
                "the images of requests in flight take {} MiB: try again later",
                self.media_bytes >> 20
            ),
            retry_after_s: 1.0,
        })
    }

    /// What is wrong with a request, if anything is.
    fn invalid(&self, client: ClientId, request: &AddRequest) -> Option<String> {
        let config = &self.config;
        let num_tokens = request.prompt_token_ids.len() as u64;
        let beyond = |ids: &[u32]| ids.iter().copied().find(|id| *id >= config.vocab_size);
        let most = i64::from(config.max_logprobs);
        if num_tokens == 0 {
            return Some("the prompt is empty".into());
        }
        if num_tokens >= u64::from(config.max_model_len) {
            return Some(format!(
                "the prompt has {num_tokens} tokens; with --max-model-len {} it may have at most {}",
                config.max_model_len,
                config.max_model_len - 1
            ));
        }
        if num_tokens > u64::from(config.num_positions()) {
            return Some(format!(
                "the prompt has {num_tokens} tokens; the KV cache holds {} ({} blocks of {}): raise --num-gpu-blocks-override or --kv-cache-memory-bytes",
                config.num_positions(),
                config.num_blocks - 1,
                config.block_size
            ));
        }
        if let Some(id) = beyond(&request.prompt_token_ids) {
            return Some(format!(
                "prompt token id {id} is not in the vocabulary of {}",
                config.vocab_size
            ));
        }
        if request.n == 0 || request.n > MAX_N {
            return Some(format!("n: {} is not within 1 and {MAX_N}", request.n));
        }
        if request.max_tokens == 0 {
            return Some("max_tokens: must be at least 1".into());
        }
        for (name, value) in [
            ("logprobs", request.logprobs),
            ("prompt_logprobs", request.prompt_logprobs),
        ] {
            if i64::from(value) > most {
                return Some(format!(
                    "{name}: {value} is more than this engine gives, {most}"
                ));
            }
        }
        let max_row = config.max_num_batched_tokens;
        if let Some(message) = media::problem(&request.media, num_tokens as u32, max_row) {
            return Some(message);
        }
        let duplicate = self.table.find(client, request.request_id).is_some();
        duplicate.then(|| format!("request id {} is in use", request.request_id.0))
    }

    fn enqueue(
        &mut self,
        client: ClientId,
        request: AddRequest,
        constraint: Constraint,
        now: Instant,
    ) {
        let must_wait = matches!(constraint, Constraint::Awaited(_));
        self.media_bytes += request.media_data.len() as u64;
        let arrival = self.num_arrivals;
        self.num_arrivals += 1;
        let size = RequestSize::of(&request);
        let max_output = request
            .max_tokens
            .min(self.config.max_sequence_len() - size.num_tokens);
        let payer = Payer {
            tenant: request.tenant,
            weight: request.weight,
        };
        let bill = self.queue.charge(payer, size, request.n, max_output);
        let index = self.table.add_request(Request {
            client,
            request_id: request.request_id,
            params: request.params.into(),
            constraint,
            root: self.cache.root(&request.cache_salt),
            media: request.media.into(),
            media_data: request.media_data.into(),
            arrival: now,
            started: None,
            num_cached_tokens: 0,
            prompt_logprobs: request.prompt_logprobs,
            sequences: vec![None; request.n as usize],
            num_live: 0,
            bill,
            num_output: 0,
        });
        let mut stop_token_ids = request.stop_token_ids;
        stop_token_ids.sort_unstable();
        let limits = Limits {
            max_output,
            min_output: request.min_tokens,
            stop_token_ids: stop_token_ids.into(),
            logprobs: request.logprobs.max(-1),
        };
        let prompt: Arc<[u32]> = request.prompt_token_ids.into();
        for nth in 0..request.n {
            let is_first = nth == 0;
            let key = QueueKey::new(self.config.policy, request.priority, bill.tag, arrival, nth);
            let id = (index, client, request.request_id);
            let mut sequence = Sequence::new(id, key, Arc::clone(&prompt), limits.clone());
            if !is_first {
                self.table.add_sequence(sequence);
                continue;
            }
            sequence.state = State::Waiting;
            sequence.leads = request.n > 1;
            sequence.prompt_logprobs = (request.prompt_logprobs >= 0).then(Vec::new);
            let seq = self.table.add_sequence(sequence);
            let newcomer = Newcomer {
                size,
                tenant: request.tenant,
                deadline: deadline_after(now, request.deadline_s),
            };
            if must_wait {
                self.queue.hold_new(key, seq, newcomer);
            } else {
                self.queue.push_new(key, seq, newcomer);
            }
        }
    }

    pub fn abort(&mut self, client: ClientId, abort: Abort) {
        let Some(request) = self.table.find(client, abort.request_id) else {
            return;
        };
        let sequences = &self.table.request(request).sequences;
        let ending: Vec<SeqIdx> = match abort.index {
            None => sequences.iter().rev().flatten().copied().collect(),
            Some(index) => sequences
                .get(index as usize)
                .copied()
                .flatten()
                .into_iter()
                .collect(),
        };
        self.end_all(&ending);
    }

    /// The client's connection is gone, and with it every request of it.
    pub fn disconnect(&mut self, client: ClientId) {
        for request in self.table.requests_of(client) {
            let sequences = self.table.request(request).sequences.clone();
            let ending: Vec<SeqIdx> = sequences.into_iter().rev().flatten().collect();
            self.end_all(&ending);
        }
        self.outputs.forget_client(client);
    }

    fn end_all(&mut self, ending: &[SeqIdx]) {
        for seq in ending {
            let sequence = self.table.seq(*seq);
            self.outputs.push_end(
                sequence.client,
                sequence.request_id,
                sequence.key.index,
                FinishReason::Abort,
            );
            self.stats.num_aborted += 1;
            self.end(*seq);
        }
        self.drop_ended();
    }

    /// Refuses requests that waited beyond their deadline.
    pub fn refuse_expired(&mut self, now: Instant) {
        while let Some(seq) = self.queue.expired(now) {
            let sequence = self.table.seq(seq);
            let (client, request_id, request) =
                (sequence.client, sequence.request_id, sequence.request);
            self.drop_request(request);
            let reason = Reason {
                kind: RefusalKind::Deadline,
                message: "the request waited longer than its deadline".into(),
                retry_after_s: 1.0,
            };
            self.refuse(client, request_id, reason);
        }
    }

    /// Ends every sequence of a request that has not started, without a word.
    fn drop_request(&mut self, request: RequestIdx) {
        let sequences = self.table.request(request).sequences.clone();
        for seq in sequences.into_iter().rev().flatten() {
            self.end(seq);
        }
    }
}
