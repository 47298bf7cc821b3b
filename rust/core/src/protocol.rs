//! What travels between the API and the engine: plain data, no behaviour. `frames` turns it into bytes.

use crate::ids::{RequestId, TenantId, TokenId};
use crate::media::MediaSpan;

/// One request for `n` completions of one prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct AddRequest {
    pub request_id: RequestId,
    pub prompt_token_ids: Vec<TokenId>,
    /// Number of sequences sampled from the prompt.
    pub n: u32,
    pub max_tokens: u32,
    /// No stop id ends the sequence before this many tokens (the sampler masks them; the scheduler also checks).
    pub min_tokens: u32,
    /// Ids that end a sequence; EOS ids of the model are among them unless the request ignores EOS.
    pub stop_token_ids: Vec<TokenId>,
    /// Lower runs first under the priority policy; ignored under FCFS.
    pub priority: i32,
    /// Requests of one tenant wait in order of arrival, tenants take turns.
    pub tenant: TenantId,
    /// The tenant's share beside other tenants, in thousandths.
    pub weight: u32,
    /// Part of every block hash: requests share prefixes only within one salt.
    pub cache_salt: Vec<u8>,
    /// Seconds from arrival after which a still waiting request is refused; 0 = none.
    pub deadline_s: f64,
    /// Number of top logprobs per output token; -1 = none asked for.
    pub logprobs: i32,
    /// Number of top logprobs per prompt token; -1 = none asked for.
    pub prompt_logprobs: i32,
    /// The constraint on the output (`grammar::spec`); empty = none.
    pub grammar: Vec<u8>,
    /// Sampling parameters for the worker, opaque here (JSON of `octavo.sampling_params.SamplingParams`).
    pub params: Vec<u8>,
    /// Images of the prompt, in order.
    pub media: Vec<MediaSpan>,
    /// What the worker needs of them, opaque here; empty without images.
    pub media_data: Vec<u8>,
}

/// Stop one sequence of a request, or all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abort {
    pub request_id: RequestId,
    /// `None` = the whole request.
    pub index: Option<u32>,
}

/// Anything that a client sends to the engine.
#[derive(Clone, Debug, PartialEq)]
pub enum Inbound {
    Add(AddRequest),
    Abort(Abort),
    /// A call answered by the engine's Python side between two steps (JSON): stats, reset of the prefix cache, ping.
    Call {
        call_id: u64,
        body: Vec<u8>,
    },
    /// The connection is gone: every request of the client ends.
    Disconnected,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FinishReason {
    /// A stop id or EOS (`SequenceOutput::stop_token_id` says which).
    Stop = 1,
    /// `max_tokens` or the context length.
    Length = 2,
    Abort = 3,
    /// The engine could not go on with this one; `SequenceOutput::error` says why.
    Error = 4,
}

/// Logprobs of one token: the token itself first, then the top ones in descending order.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// 1 = the most probable token of the vocabulary.
    pub rank: u32,
    /// (token, log probability); the first entry is the token itself.
    pub entries: Vec<(TokenId, f32)>,
}

/// What one sequence gained in one step.
#[derive(Clone, Debug, PartialEq)]
pub struct SequenceOutput {
    pub request_id: RequestId,
    /// Which of the request's `n` sequences.
    pub index: u32,
    pub token_ids: Vec<TokenId>,
    /// One entry a token when the request asked for logprobs, else empty.
    pub logprobs: Vec<TokenLogprobs>,
    pub finish: Option<FinishReason>,
    pub stop_token_id: Option<TokenId>,
    /// Prompt tokens that came from the prefix cache; sent with the first output of a sequence.
    pub num_cached_tokens: Option<u32>,
    /// Sent once, with the first output of sequence 0, when asked for: entry i belongs to prompt token i + 1.
    pub prompt_logprobs: Option<Vec<TokenLogprobs>>,
    /// Seconds the request waited in the queue before its first step; sent with the first output.
    pub queue_s: Option<f32>,
    /// Why a sequence ended with `FinishReason::Error`.
    pub error: Option<String>,
}

/// Why a request was refused before it ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RefusalKind {
    /// The client's mistake (400).
    Invalid = 1,
    /// The queue is full (429, with Retry-After).
    QueueFull = 2,
    /// The deadline passed in the queue (503).
    Deadline = 3,
    /// The engine is draining (503).
    Draining = 4,
}

/// A request that did not run.
#[derive(Clone, Debug, PartialEq)]
pub struct Refusal {
    pub request_id: RequestId,
    pub kind: RefusalKind,
    pub message: String,
    pub retry_after_s: f32,
}

/// Counters and gauges of the engine; every frame carries the newest.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineStats {
    pub num_steps: u64,
    pub num_running: u32,
    pub num_waiting: u32,
    pub num_blocks: u32,
    /// Blocks that hold nothing or only unreferenced cached content.
    pub num_free_blocks: u32,
    pub num_preemptions: u64,
    pub num_prompt_tokens: u64,
    pub num_output_tokens: u64,
    pub prefix_queried_tokens: u64,
    pub prefix_hit_tokens: u64,
    pub num_finished: u64,
    pub num_aborted: u64,
    pub num_refused: u64,
    /// Rows with drafts, their drafted tokens, and those of them that were right.
    pub num_drafts: u64,
    pub num_draft_tokens: u64,
    pub num_accepted_tokens: u64,
}

/// What the engine sends to one client after a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OutputFrame {
    pub stats: EngineStats,
    pub outputs: Vec<SequenceOutput>,
    pub refusals: Vec<Refusal>,
}

/// Anything that the engine sends to a client.
#[derive(Clone, Debug, PartialEq)]
pub enum Outbound {
    /// First on every connection: facts of the model (JSON).
    Hello(Vec<u8>),
    Output(OutputFrame),
    /// The answer to a `Call` (JSON).
    Reply {
        call_id: u64,
        body: Vec<u8>,
    },
}
