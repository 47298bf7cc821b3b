//! Frames: every message comes back from its bytes, and no bytes make the decoder panic.

use octavo_core::frames::{
    FrameError, VERSION, decode_inbound, decode_outbound, encode_inbound, encode_outbound,
};
use octavo_core::ids::{RequestId, TenantId};
use octavo_core::media::MediaSpan;
use octavo_core::protocol::{
    Abort, AddRequest, EngineStats, FinishReason, Inbound, Outbound, OutputFrame, Refusal,
    RefusalKind, SequenceOutput, TokenLogprobs,
};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

fn media_span() -> impl Strategy<Value = MediaSpan> {
    let fields = (any::<u32>(), any::<u32>(), any::<u128>(), any::<bool>());
    fields.prop_map(|(start, len, digest, is_whole)| MediaSpan {
        start,
        len,
        digest,
        is_whole,
    })
}

fn add_request() -> impl Strategy<Value = AddRequest> {
    let lists = (
        vec(any::<u32>(), 0..50),
        vec(any::<u32>(), 0..4),
        vec(any::<u8>(), 0..9),
        vec(any::<u8>(), 0..99),
        vec(media_span(), 0..4),
    );
    let counts = (any::<u64>(), any::<u32>(), any::<u32>(), any::<u32>());
    let numbers = (any::<i32>(), -1e9..1e9, any::<i32>(), any::<i32>());
    (lists, counts, numbers).prop_map(|(lists, counts, numbers)| AddRequest {
        request_id: RequestId(counts.0),
        prompt_token_ids: lists.0,
        n: counts.1,
        max_tokens: counts.2,
        min_tokens: counts.3,
        stop_token_ids: lists.1,
        priority: numbers.0,
        tenant: TenantId(counts.0 ^ 7),
        weight: counts.1 ^ 5,
        cache_salt: lists.2,
        deadline_s: numbers.1,
        logprobs: numbers.2,
        prompt_logprobs: numbers.3,
        grammar: lists.3.iter().rev().copied().collect(),
        media: lists.4,
        media_data: lists.3.clone(),
        params: lists.3,
    })
}

fn inbound() -> impl Strategy<Value = Inbound> {
    prop_oneof![
        add_request().prop_map(Inbound::Add),
        (any::<u64>(), any::<Option<u32>>()).prop_map(|(id, index)| Inbound::Abort(Abort {
            request_id: RequestId(id),
            index
        })),
        (any::<u64>(), vec(any::<u8>(), 0..60))
            .prop_map(|(call_id, body)| Inbound::Call { call_id, body }),
        Just(Inbound::Disconnected),
    ]
}

fn token_logprobs() -> impl Strategy<Value = TokenLogprobs> {
    (any::<u32>(), vec((any::<u32>(), -100f32..0f32), 0..5))
        .prop_map(|(rank, entries)| TokenLogprobs { rank, entries })
}

fn finish() -> impl Strategy<Value = FinishReason> {
    proptest::sample::select(vec![
        FinishReason::Stop,
        FinishReason::Length,
        FinishReason::Abort,
        FinishReason::Error,
    ])
}

fn sequence_output() -> impl Strategy<Value = SequenceOutput> {
    let ends = (
        option::of(finish()),
        any::<Option<u32>>(),
        any::<Option<u32>>(),
        option::of(0f32..9f32),
    );
    let logprobs = (
        vec(token_logprobs(), 0..4),
        option::of(vec(token_logprobs(), 0..4)),
    );
    (
        any::<u64>(),
        any::<u32>(),
        vec(any::<u32>(), 0..6),
        logprobs,
        ends,
    )
        .prop_map(
            |(id, index, token_ids, (logprobs, prompt_logprobs), ends)| SequenceOutput {
                request_id: RequestId(id),
                index,
                token_ids,
                logprobs,
                finish: ends.0,
                stop_token_id: ends.1,
                error: ends.0.map(|finish| format!("{finish:?}")),
                num_cached_tokens: ends.2,
                prompt_logprobs,
                queue_s: ends.3,
            },
        )
}

fn refusal() -> impl Strategy<Value = Refusal> {
    let kinds = vec![
        RefusalKind::Invalid,
        RefusalKind::QueueFull,
        RefusalKind::Deadline,
        RefusalKind::Draining,
    ];
    (
        any::<u64>(),
        proptest::sample::select(kinds),
        any::<String>(),
        0f32..60f32,
    )
        .prop_map(|(id, kind, message, retry_after_s)| Refusal {
            request_id: RequestId(id),
            kind,
            message,
            retry_after_s,
        })
}

fn stats() -> impl Strategy<Value = EngineStats> {
    (any::<[u32; 4]>(), any::<[u64; 12]>()).prop_map(|(gauges, counters)| EngineStats {
        num_steps: counters[0],
        num_running: gauges[0],
        num_waiting: gauges[1],
        num_blocks: gauges[2],
        num_free_blocks: gauges[3],
        num_preemptions: counters[1],
        num_prompt_tokens: counters[2],
        num_output_tokens: counters[3],
        prefix_queried_tokens: counters[4],
        prefix_hit_tokens: counters[5],
        num_finished: counters[6],
        num_aborted: counters[7],
        num_refused: counters[8],
        num_drafts: counters[9],
        num_draft_tokens: counters[10],
        num_accepted_tokens: counters[11],
    })
}

fn outbound() -> impl Strategy<Value = Outbound> {
    let output = (stats(), vec(sequence_output(), 0..6), vec(refusal(), 0..3));
    prop_oneof![
        vec(any::<u8>(), 0..60).prop_map(Outbound::Hello),
        output.prop_map(|(stats, outputs, refusals)| Outbound::Output(OutputFrame {
            stats,
            outputs,
            refusals
        })),
        (any::<u64>(), vec(any::<u8>(), 0..60))
            .prop_map(|(call_id, body)| Outbound::Reply { call_id, body }),
    ]
}

proptest! {
    #[test]
    fn inbound_comes_back(message in inbound()) {
        prop_assert_eq!(decode_inbound(&encode_inbound(&message)), Ok(message));
    }

    #[test]
    fn outbound_comes_back(message in outbound()) {
        prop_assert_eq!(decode_outbound(&encode_outbound(&message)), Ok(message));
    }

    #[test]
    fn arbitrary_bytes_never_panic(kind in any::<u8>(), body in vec(any::<u8>(), 0..300)) {
        let mut bytes = vec![VERSION, kind];
        bytes.extend(body);
        for start in [0, 1, 2] {
            let _ = decode_inbound(&bytes[start..]);
            let _ = decode_outbound(&bytes[start..]);
        }
    }

    #[test]
    fn damaged_frames_never_panic(message in outbound(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut bytes = encode_outbound(&message);
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let _ = decode_outbound(&bytes);
    }

    #[test]
    fn cut_requests_are_refused(request in add_request(), at in any::<prop::sample::Index>()) {
        let bytes = encode_inbound(&Inbound::Add(request));
        let cut = &bytes[..at.index(bytes.len())];
        let is_truncated = matches!(decode_inbound(cut), Err(FrameError::Truncated { .. }));
        prop_assert!(is_truncated);
    }
}

#[test]
fn a_huge_count_reserves_nothing() {
    let mut bytes = vec![VERSION, 1];
    bytes.extend(7u64.to_le_bytes());
    bytes.extend(u32::MAX.to_le_bytes());
    assert_eq!(
        decode_inbound(&bytes),
        Err(FrameError::Truncated {
            offset: 14,
            wanted: 4 * u32::MAX as usize,
            left: 0
        })
    );
}

#[test]
fn strangers_are_told_why() {
    assert_eq!(
        decode_inbound(&[VERSION + 1, 1]),
        Err(FrameError::Version {
            found: VERSION + 1,
            expected: VERSION
        })
    );
    let mut trailing = encode_inbound(&Inbound::Disconnected);
    trailing.push(0);
    assert_eq!(decode_inbound(&trailing), Err(FrameError::TrailingBytes(1)));
    assert!(matches!(
        decode_inbound(&[VERSION, 99]),
        Err(FrameError::Tag { value: 99, .. })
    ));
}
