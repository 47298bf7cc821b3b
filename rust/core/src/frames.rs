//! Messages between API and engine as bytes: a version byte, a kind byte, then the fields in the order given here.
//!
//! These are bodies; the u32 length prefix belongs to the socket (`octavo-ipc`). Any input is either a message or a
//! `FrameError`. Changing a field means raising `VERSION`.

use crate::ids::{RequestId, TenantId, TokenId};
use crate::media::MediaSpan;
use crate::protocol::{
    Abort, AddRequest, EngineStats, FinishReason, Inbound, Outbound, OutputFrame, Refusal,
    RefusalKind, SequenceOutput, TokenLogprobs,
};
pub use crate::wire::FrameError;
use crate::wire::{Reader, Wire, wire_enum, wire_struct};

/// The first byte of every frame.
pub const VERSION: u8 = 5;

const ADD: u8 = 1;
const ABORT: u8 = 2;
const CALL: u8 = 3;
const DISCONNECTED: u8 = 4;

const HELLO: u8 = 128;
const OUTPUT: u8 = 129;
const REPLY: u8 = 130;

impl Wire for RequestId {
    const MIN_BYTES: usize = 8;

    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
    }

    fn take(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        Ok(Self(u64::take(reader)?))
    }
}

impl Wire for TenantId {
    const MIN_BYTES: usize = 8;

    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
    }

    fn take(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        Ok(Self(u64::take(reader)?))
    }
}

wire_struct!(MediaSpan {
    start: u32,
    len: u32,
    digest: u128,
    is_whole: bool,
});

wire_struct!(AddRequest {
    request_id: RequestId,
    prompt_token_ids: Vec<TokenId>,
    n: u32,
    max_tokens: u32,
    min_tokens: u32,
    stop_token_ids: Vec<TokenId>,
    priority: i32,
    tenant: TenantId,
    weight: u32,
    cache_salt: Vec<u8>,
    deadline_s: f64,
    logprobs: i32,
    prompt_logprobs: i32,
    grammar: Vec<u8>,
    params: Vec<u8>,
    media: Vec<MediaSpan>,
    media_data: Vec<u8>,
});

wire_struct!(Abort {
    request_id: RequestId,
    index: Option<u32>,
});

wire_enum!(
    FinishReason,
    "a finish reason",
    [Stop, Length, Abort, Error]
);

wire_struct!(TokenLogprobs {
    rank: u32,
    entries: Vec<(TokenId, f32)>,
});

wire_struct!(SequenceOutput {
    request_id: RequestId,
    index: u32,
    token_ids: Vec<TokenId>,
    logprobs: Vec<TokenLogprobs>,
    finish: Option<FinishReason>,
    stop_token_id: Option<TokenId>,
    num_cached_tokens: Option<u32>,
    prompt_logprobs: Option<Vec<TokenLogprobs>>,
    queue_s: Option<f32>,
    error: Option<String>,
});

wire_enum!(
    RefusalKind,
    "a kind of refusal",
    [Invalid, QueueFull, Deadline, Draining]
);

wire_struct!(Refusal {
    request_id: RequestId,
    kind: RefusalKind,
    message: String,
    retry_after_s: f32,
});

wire_struct!(EngineStats {
    num_steps: u64,
    num_running: u32,
    num_waiting: u32,
    num_blocks: u32,
    num_free_blocks: u32,
    num_preemptions: u64,
    num_prompt_tokens: u64,
    num_output_tokens: u64,
    prefix_queried_tokens: u64,
    prefix_hit_tokens: u64,
    num_finished: u64,
    num_aborted: u64,
    num_refused: u64,
    num_drafts: u64,
    num_draft_tokens: u64,
    num_accepted_tokens: u64,
});

wire_struct!(OutputFrame {
    stats: EngineStats,
    outputs: Vec<SequenceOutput>,
    refusals: Vec<Refusal>,
});

/// A client's message as bytes.
pub fn encode_inbound(message: &Inbound) -> Vec<u8> {
    match message {
        Inbound::Add(request) => start(ADD, request),
        Inbound::Abort(abort) => start(ABORT, abort),
        Inbound::Call { call_id, body } => with_body(start(CALL, call_id), body),
        Inbound::Disconnected => vec![VERSION, DISCONNECTED],
    }
}

/// The client's message in these bytes.
pub fn decode_inbound(bytes: &[u8]) -> Result<Inbound, FrameError> {
    let (kind, mut reader) = open(bytes)?;
    let message = match kind {
        ADD => Inbound::Add(Wire::take(&mut reader)?),
        ABORT => Inbound::Abort(Wire::take(&mut reader)?),
        CALL => Inbound::Call {
            call_id: Wire::take(&mut reader)?,
            body: rest(&mut reader)?,
        },
        DISCONNECTED => Inbound::Disconnected,
        value => {
            return Err(FrameError::Tag {
                what: "the kind of a client's frame",
                value,
            });
        }
    };
    reader.finish()?;
    Ok(message)
}

/// The engine's message as bytes.
pub fn encode_outbound(message: &Outbound) -> Vec<u8> {
    match message {
        Outbound::Hello(body) => with_body(vec![VERSION, HELLO], body),
        Outbound::Output(frame) => start(OUTPUT, frame),
        Outbound::Reply { call_id, body } => with_body(start(REPLY, call_id), body),
    }
}

/// The engine's message in these bytes.
pub fn decode_outbound(bytes: &[u8]) -> Result<Outbound, FrameError> {
    let (kind, mut reader) = open(bytes)?;
    let message = match kind {
        HELLO => Outbound::Hello(rest(&mut reader)?),
        OUTPUT => Outbound::Output(Wire::take(&mut reader)?),
        REPLY => Outbound::Reply {
            call_id: Wire::take(&mut reader)?,
            body: rest(&mut reader)?,
        },
        value => {
            return Err(FrameError::Tag {
                what: "the kind of an engine's frame",
                value,
            });
        }
    };
    reader.finish()?;
    Ok(message)
}

fn start(kind: u8, value: &impl Wire) -> Vec<u8> {
    let mut out = vec![VERSION, kind];
    value.put(&mut out);
    out
}

fn with_body(mut out: Vec<u8>, body: &[u8]) -> Vec<u8> {
    out.extend_from_slice(body);
    out
}

fn open(bytes: &[u8]) -> Result<(u8, Reader<'_>), FrameError> {
    let mut reader = Reader::new(bytes);
    let version = u8::take(&mut reader)?;
    if version != VERSION {
        return Err(FrameError::Version {
            found: version,
            expected: VERSION,
        });
    }
    Ok((u8::take(&mut reader)?, reader))
}

fn rest(reader: &mut Reader<'_>) -> Result<Vec<u8>, FrameError> {
    let left = reader.left();
    Ok(reader.bytes(left)?.to_vec())
}
