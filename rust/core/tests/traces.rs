//! Random traces through the whole control plane over a device that notices every wrong read.

mod simulator;

use std::time::Duration;

use octavo_core::config::{CoreConfig, Policy};
use octavo_core::groups::Keep;
use octavo_core::ids::TenantId;
use octavo_core::media::{MediaSpan, OutputBytes};
use octavo_core::protocol::{AddRequest, FinishReason, RefusalKind, SequenceOutput};
use octavo_core::speculation::SpeculationConfig;
use proptest::prelude::*;
use simulator::engine::{Engine, config, request};
use simulator::oracle::expected;

#[derive(Clone, Debug)]
enum Event {
    Add(Box<AddRequest>),
    /// Of the nth request so far.
    Abort(prop::sample::Index, Option<u32>),
    Steps(u8),
}

/// One group of full attention, as most models; or several groups of any kind.
fn groups() -> impl Strategy<Value = Vec<Keep>> {
    let keep = prop_oneof![
        1 => Just(Keep::All),
        2 => (1_u32..20).prop_map(Keep::Window),
        1 => (1_u32..20).prop_map(Keep::Chunk),
        1 => Just(Keep::State),
    ];
    prop_oneof![Just(vec![Keep::All]), prop::collection::vec(keep, 1..4)]
}

fn configs() -> impl Strategy<Value = CoreConfig> {
    (
        (1_u32..6, 3_u32..40, 1_u32..7, 1_u32..40, 8_u32..48),
        (any::<bool>(), any::<bool>(), 0_u32..6, 1_u32..5),
        prop_oneof![Just(Some(0.0)), Just(None), (0.0..50.0).prop_map(Some)],
        prop::option::of(speculation()),
        groups(),
        prop::option::of((1_u64..9, 4_u64..30)),
    )
        .prop_map(
            |(
                (block_size, num_blocks, seqs, budget, len),
                (caching, by_priority, threshold, depth),
                max_itl_ms,
                speculation,
                groups,
                output_bytes,
            )| CoreConfig {
                output_bytes: output_bytes
                    .map(|(of_token, of_block)| OutputBytes { of_token, of_block }),
                speculation: speculation.filter(|_| !groups.contains(&Keep::State)),
                block_size,
                num_blocks: num_blocks.max(1 + groups.len() as u32),
                groups,
                max_num_seqs: seqs,
                max_num_batched_tokens: budget,
                max_model_len: len,
                enable_prefix_caching: caching,
                policy: if by_priority {
                    Policy::Priority
                } else {
                    Policy::Fcfs
                },
                long_prefill_token_threshold: threshold,
                depth,
                max_itl_ms,
                ..config()
            },
        )
}

fn speculation() -> impl Strategy<Value = SpeculationConfig> {
    (1_u32..9, 1_u32..4, 0_u32..4, any::<bool>()).prop_map(
        |(num_tokens, min, more, is_measured)| SpeculationConfig {
            num_tokens,
            lookup_min: min,
            lookup_max: min + more,
            is_measured,
        },
    )
}

/// One of a few images, if the prompt has room for it.
fn shown(image: u32, start: u32, num_tokens: u32) -> Vec<MediaSpan> {
    let span = MediaSpan {
        start,
        len: 2 * image,
        digest: u128::from(image),
        is_whole: false,
    };
    let is_there = image > 0 && span.end() <= num_tokens;
    if is_there { vec![span] } else { vec![] }
}

/// Prompts share prefixes: a cut of one of two base sequences, and a short tail.
fn requests() -> impl Strategy<Value = AddRequest> {
    (
        (
            any::<bool>(),
            0_usize..24,
            prop::collection::vec(0_u32..50, 0..4),
        ),
        (
            1_u32..4,
            1_u32..20,
            0_u32..6,
            prop::collection::vec(0_u32..50, 0..12),
        ),
        (-2_i32..3, any::<bool>(), -1_i32..3, -1_i32..2),
        (0_u32..6, 0_u32..12),
    )
        .prop_map(
            |(
                (base, cut, tail),
                (n, max_tokens, min_tokens, stop),
                (priority, salted, logprobs, prompt_logprobs),
                (image, start),
            )| {
                let mut prompt: Vec<u32> = (0..cut as u32)
                    .map(|i| (i * 7 + u32::from(base)) % 50)
                    .collect();
                prompt.extend(tail);
                AddRequest {
                    media: shown(image, start, prompt.len() as u32),
                    n,
                    min_tokens,
                    stop_token_ids: stop,
                    priority,
                    tenant: TenantId(u64::from(n) - 1),
                    weight: 700 * n,
                    cache_salt: if salted { b"salt".to_vec() } else { vec![] },
                    logprobs,
                    prompt_logprobs: if prompt_logprobs > 0 {
                        prompt_logprobs
                    } else {
                        -1
                    },
                    ..request(0, &prompt, max_tokens)
                }
            },
        )
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        4 => requests().prop_map(|request| Event::Add(Box::new(request))),
        1 => (any::<prop::sample::Index>(), prop::option::of(0_u32..5)).prop_map(|(at, index)| Event::Abort(at, index)),
        3 => (1_u8..6).prop_map(Event::Steps),
    ];
    prop::collection::vec(event, 1..40)
}

/// Plays a trace to its end; the requests that were sent.
fn play(engine: &mut Engine, events: &[Event]) -> Vec<AddRequest> {
    let mut sent: Vec<AddRequest> = Vec::new();
    for event in events {
        match event {
            Event::Add(request) => {
                let id = sent.len() as u64;
                let mut request = AddRequest::clone(request);
                request.request_id.0 = id;
                request.params = vec![id as u8, 5];
                engine.add(request.clone());
                sent.push(request);
            }
            Event::Abort(at, index) if !sent.is_empty() => {
                engine.abort(at.index(sent.len()) as u64, *index);
            }
            Event::Abort(..) => {}
            Event::Steps(count) => (0..*count).for_each(|_| engine.step()),
        }
    }
    engine.run(50_000);
    sent
}

fn check_outputs(engine: &Engine, config: &CoreConfig, sent: &[AddRequest]) {
    for request in sent {
        let len = request.prompt_token_ids.len() as u32;
        let fits = len > 0 && len < config.max_model_len && len <= config.num_positions();
        let id = request.request_id.0;
        if let Some(refusal) = engine.refusals.get(&id) {
            assert_eq!(
                (refusal.kind, fits),
                (RefusalKind::Invalid, false),
                "{refusal:?}"
            );
            continue;
        }
        assert!(fits, "request {id} should have been refused");
        for index in 0..request.n {
            let (tokens, finish) =
                expected(request, index, config.vocab_size, config.max_sequence_len());
            let received = &engine.received[&(id, index)];
            if received.finish == Some(FinishReason::Abort) {
                assert!(tokens.starts_with(&received.tokens));
                continue;
            }
            assert_eq!(
                (&received.tokens, received.finish),
                (&tokens, Some(finish)),
                "request {id}, sequence {index}"
            );
            check_extras(request, index, &received.outputs[0]);
            received
                .outputs
                .iter()
                .for_each(|output| check_logprobs(request, output));
        }
    }
}

/// One entry a token, each its own.
fn check_logprobs(request: &AddRequest, output: &SequenceOutput) {
    let num_logprobs = if request.logprobs >= 0 {
        output.token_ids.len()
    } else {
        0
    };
    assert_eq!(output.logprobs.len(), num_logprobs);
    for (logprobs, id) in output.logprobs.iter().zip(&output.token_ids) {
        assert_eq!(logprobs.entries.len(), 1 + request.logprobs as usize);
        assert_eq!(logprobs.entries[0], (*id, 0.0));
    }
}

fn check_extras(request: &AddRequest, index: u32, first: &SequenceOutput) {
    assert!(first.queue_s.is_some() && first.num_cached_tokens.is_some());
    let wanted = request.prompt_logprobs >= 0 && index == 0;
    assert_eq!(first.prompt_logprobs.is_some(), wanted);
    let targets: Vec<u32> = first
        .prompt_logprobs
        .iter()
        .flatten()
        .map(|entry| entry.entries[0].0)
        .collect();
    if wanted {
        assert_eq!(targets, request.prompt_token_ids[1..]);
    }
}

/// Under FCFS, only a shorter request gets its first slot before an older one of its tenant.
fn check_order(engine: &Engine, sent: &[AddRequest]) {
    let len = |id: u8| sent[id as usize].prompt_token_ids.len();
    let starts = engine.plans.iter().flat_map(|plan| &plan.new_rows);
    let mut seen: Vec<u8> = Vec::new();
    for id in starts.map(|row| row.params[0]) {
        if seen.contains(&id) {
            continue;
        }
        let tenant = |id: u8| sent[id as usize].tenant;
        let overtook = |earlier: &&u8| **earlier > id && tenant(**earlier) == tenant(id);
        for earlier in seen.iter().filter(overtook) {
            assert!(len(*earlier) < len(id), "{earlier} started before {id}");
        }
        seen.push(id);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases * 8))]

    #[test]
    fn every_sequence_gets_its_tokens_and_every_block_comes_back(config in configs(), events in events()) {
        let mut engine = Engine::new(&config);
        engine.step_time = |totals| Duration::from_millis(1 + u64::from(totals.num_tokens));
        let sent = play(&mut engine, &events);
        check_outputs(&engine, &config, &sent);
        if config.policy == Policy::Fcfs {
            check_order(&engine, &sent);
        }
    }
}
