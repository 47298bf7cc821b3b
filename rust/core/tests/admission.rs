//! Which requests are taken, which are refused and why, and what the loop may not do.

mod simulator;

use octavo_core::config::{CoreConfig, Policy};
use octavo_core::core::{Core, PromptLogprobs};
use octavo_core::errors::StepError;
use octavo_core::ids::{ClientId, RequestId, SlotId};
use octavo_core::protocol::{Abort, AddRequest, Inbound, Outbound, RefusalKind};
use simulator::engine::{Engine, config, request};

fn refusal(config: &CoreConfig, request: AddRequest) -> (RefusalKind, String) {
    let mut engine = Engine::new(config);
    engine.add(request);
    engine.step();
    let refusal = engine.refusals.remove(&0).expect("a refusal");
    assert!(!engine.core.has_work());
    (refusal.kind, refusal.message)
}

#[test]
fn impossible_requests_are_refused_with_a_reason() {
    let base = || request(0, &[1, 2, 3], 5);
    let small = CoreConfig {
        num_blocks: 3,
        ..config()
    };
    let table = [
        (
            config(),
            AddRequest {
                prompt_token_ids: vec![],
                ..base()
            },
            "empty",
        ),
        (
            config(),
            AddRequest {
                prompt_token_ids: vec![1; 128],
                ..base()
            },
            "--max-model-len 128 it may have at most 127",
        ),
        (
            small,
            AddRequest {
                prompt_token_ids: vec![1; 9],
                ..base()
            },
            "KV cache holds 8",
        ),
        (
            config(),
            AddRequest {
                prompt_token_ids: vec![1, 50],
                ..base()
            },
            "token id 50",
        ),
        (config(), AddRequest { n: 0, ..base() }, "n: 0"),
        (
            config(),
            AddRequest {
                n: 1_000_000,
                ..base()
            },
            "n: 1000000",
        ),
        (
            config(),
            AddRequest {
                max_tokens: 0,
                ..base()
            },
            "max_tokens",
        ),
        (
            config(),
            AddRequest {
                logprobs: 4,
                ..base()
            },
            "logprobs: 4",
        ),
        (
            config(),
            AddRequest {
                prompt_logprobs: 9,
                ..base()
            },
            "prompt_logprobs: 9",
        ),
    ];
    for (config, request, part) in table {
        let (kind, message) = refusal(&config, request);
        assert_eq!(kind, RefusalKind::Invalid);
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
}

#[test]
fn a_full_queue_refuses_and_says_when_to_come_back() {
    let mut engine = Engine::new(&CoreConfig {
        max_num_seqs: 1,
        max_queued_requests: 2,
        ..config()
    });
    for id in 0..4 {
        engine.add(request(id, &[1, 2], 5));
    }
    engine.step();
    // All four arrive before the first one starts: two wait, two are too many.
    let mut refused: Vec<u64> = engine.refusals.keys().copied().collect();
    refused.sort_unstable();
    assert_eq!(refused, [2, 3]);
    assert_eq!(engine.refusals[&3].kind, RefusalKind::QueueFull);
    assert!(engine.refusals[&3].retry_after_s >= 1.0);
    engine.add(request(4, &[1, 2], 5));
    engine.run(100);
    assert!(engine.received.contains_key(&(4, 0)));
    assert_eq!(engine.stats.num_refused, 2);
}

#[test]
fn a_full_queue_refuses_before_the_next_step() {
    let mut engine = Engine::new(&CoreConfig {
        max_num_seqs: 1,
        max_queued_requests: 2,
        ..config()
    });
    let (inbox, outbox) = (engine.core.inbox(), engine.core.outbox());
    let offer = |client: u32, id: u64| {
        let add = Inbound::Add(request(id, &[1, 2], 5));
        inbox.offer(ClientId(client), add, &outbox);
    };
    let refused = || -> Vec<(u32, u64)> {
        let posted = outbox.take_remote().into_iter();
        let refusal = |(client, message): (ClientId, Outbound)| {
            let Outbound::Output(frame) = message else {
                panic!()
            };
            let refusals = frame.refusals.into_iter();
            refusals
                .map(move |r| (client.0, r.request_id.0))
                .collect::<Vec<_>>()
        };
        posted.flat_map(refusal).collect()
    };
    (0..3).for_each(|id| offer(1, id));
    assert_eq!(refused(), [(1, 2)], "no step was needed to refuse it");
    engine.step();
    offer(1, 3);
    offer(2, 4);
    offer(1, 5);
    assert_eq!(refused(), [(2, 4), (1, 5)], "one waits already");
    inbox.offer(
        ClientId(1),
        Inbound::Abort(Abort {
            request_id: RequestId(1),
            index: None,
        }),
        &outbox,
    );
    engine.step();
    assert_eq!(engine.core.stats().num_refused, 3);
    offer(2, 6);
    assert!(refused().is_empty(), "an abort made room");
    while engine.core.has_work() {
        engine.step();
    }
    let told = outbox.take_remote();
    for client in [1, 2] {
        let last = told.iter().rfind(|(to, _)| to.0 == client).unwrap();
        let Outbound::Output(frame) = &last.1 else {
            panic!()
        };
        let stats = (frame.stats.num_refused, frame.stats.num_running);
        assert_eq!(stats, (3, 0), "client {client}");
    }
}

#[test]
fn deadlines_hit_only_those_that_wait() {
    let mut engine = Engine::new(&CoreConfig {
        max_num_seqs: 1,
        ..config()
    });
    for id in 0..3 {
        let mut late = request(id, &[1, 2], 20);
        late.deadline_s = if id == 2 { 1e6 } else { 1e-9 };
        late.n = 1 + u32::from(id == 1);
        engine.add(late);
    }
    engine.run(1000);
    assert_eq!(engine.tokens(0, 0).len(), 20, "it started at once");
    assert_eq!(engine.refusals[&1].kind, RefusalKind::Deadline);
    assert_eq!(engine.tokens(2, 0).len(), 20);
}

#[test]
fn draining_finishes_what_is_there() {
    let mut engine = Engine::new(&config());
    engine.add(request(0, &[1, 2], 5));
    engine.step();
    engine.core.drain();
    engine.add(request(1, &[1, 2], 5));
    engine.run(100);
    assert_eq!(engine.tokens(0, 0).len(), 5);
    assert_eq!(engine.refusals[&1].kind, RefusalKind::Draining);
}

#[test]
fn a_request_id_in_use_is_refused_and_the_first_goes_on() {
    let mut engine = Engine::new(&config());
    engine.add(request(0, &[1, 2], 5));
    engine.add(request(0, &[3], 5));
    engine.run(100);
    assert_eq!(engine.refusals[&0].kind, RefusalKind::Invalid);
    assert_eq!(engine.tokens(0, 0).len(), 5);
}

#[test]
fn ids_belong_to_their_clients_and_a_lost_client_takes_its_requests_along() {
    let mut engine = Engine::new(&config());
    let inbox = engine.core.inbox();
    for client in [1, 2] {
        inbox.push(ClientId(client), Inbound::Add(request(7, &[client, 5], 40)));
        inbox.push(
            ClientId(client),
            Inbound::Call {
                call_id: 3,
                body: vec![client as u8],
            },
        );
    }
    engine.step();
    engine.step();
    inbox.push(ClientId(1), Inbound::Disconnected);
    engine.step();
    let calls = engine.core.take_calls();
    assert_eq!(
        calls.iter().map(|call| call.client).collect::<Vec<_>>(),
        [ClientId(2)]
    );
    assert_eq!(engine.core.stats().num_running, 1);
    engine.core.outbox().take_remote();
    engine.core.reply(ClientId(2), 3, b"{}".to_vec());
    while engine.core.has_work() {
        engine.step();
    }
    let messages = engine.core.outbox().take_remote();
    assert!(messages.iter().all(|(client, _)| *client == ClientId(2)));
    assert!(matches!(messages[0].1, Outbound::Reply { call_id: 3, .. }));
    let Outbound::Output(last) = &messages.last().unwrap().1 else {
        panic!()
    };
    assert!(last.outputs[0].finish.is_some());
}

#[test]
fn impossible_configs_are_refused() {
    for (bad, name) in [
        (
            CoreConfig {
                block_size: 0,
                ..config()
            },
            "block_size",
        ),
        (
            CoreConfig {
                num_blocks: 1,
                ..config()
            },
            "num_blocks",
        ),
        (
            CoreConfig {
                depth: 5,
                ..config()
            },
            "depth",
        ),
        (
            CoreConfig {
                max_model_len: 1,
                ..config()
            },
            "max_model_len",
        ),
        (
            CoreConfig {
                max_itl_ms: Some(-1.0),
                ..config()
            },
            "max_itl_ms",
        ),
        (
            CoreConfig {
                max_num_seqs: 1 << 16,
                max_logprobs: 1 << 16,
                ..config()
            },
            "max_num_seqs",
        ),
    ] {
        let message = Core::new(bad).err().expect("an error").to_string();
        assert!(message.contains(name), "{message:?} lacks {name:?}");
    }
    assert!(Policy::from_name("lifo").is_err());
}

#[test]
fn the_loop_is_told_what_it_does_wrong() {
    let mut core = Core::new(config()).unwrap();
    let mut arena = vec![0; core.arena_layout().num_ints as usize];
    let layout = core.output_layout().clone();
    let mut output = vec![0; layout.num_ints as usize];
    assert_eq!(
        core.step(Some(&output), &mut arena),
        Err(StepError::NothingInFlight)
    );
    core.inbox()
        .push(ClientId::LOCAL, Inbound::Add(request(0, &[1, 2], 5)));
    core.step(None, &mut arena).unwrap();
    assert_eq!(core.step(None, &mut arena), Err(StepError::TooDeep(1)));
    for (count, token, part) in [
        (0, 0, "0 tokens sampled"),
        (2, 0, "2 tokens"),
        (1, -1, "token -1"),
        (1, 50, "token 50"),
    ] {
        let mut core = Core::new(config()).unwrap();
        core.inbox()
            .push(ClientId::LOCAL, Inbound::Add(request(0, &[1, 2], 5)));
        core.step(None, &mut arena).unwrap();
        output[layout.count as usize] = count;
        output[layout.sampled as usize] = token;
        let message = core
            .step(Some(&output), &mut arena)
            .unwrap_err()
            .to_string();
        assert!(
            message.contains(part) && message.contains("step 1, row 0"),
            "{message}"
        );
        assert!(core.dump().contains("last plan"));
    }
}

#[test]
fn prompt_logprobs_are_checked() {
    let mut engine = Engine::new(&config());
    let mut asking = request(0, &[1, 2, 3], 5);
    asking.prompt_logprobs = 1;
    engine.add(asking);
    engine.step();
    let put = |core: &mut Core, slot: u32, ids: &[i32], values: &[f32], ranks: &[i32]| {
        core.put_prompt_logprobs(SlotId(slot), PromptLogprobs { ids, values, ranks })
    };
    let core = &mut engine.core;
    assert!(put(core, 5, &[], &[], &[]).is_err());
    assert!(put(core, 99, &[], &[], &[]).is_err());
    assert!(put(core, 0, &[1, 2, 3], &[0.0; 3], &[1, 1]).is_err());
    assert!(put(core, 0, &[1, 2], &[0.0; 2], &[1, 1]).is_err());
    assert!(put(core, 0, &[1, 2], &[0.0; 3], &[1]).is_err());
    engine.run(100);
    let logprobs = engine.received[&(0, 0)].outputs[0]
        .prompt_logprobs
        .as_ref()
        .unwrap();
    assert_eq!(logprobs.len(), 2);
    assert_eq!(logprobs[0].entries, [(2, -0.5), (2, -0.5)]);
    assert_eq!(logprobs[0].rank, 2);
}

#[test]
fn arenas_hold_the_longest_sequence_beside_a_full_batch() {
    let long = CoreConfig {
        max_model_len: 1 << 17,
        block_size: 16,
        num_blocks: 20_000,
        vocab_size: 50,
        ..config()
    };
    let layout = Core::new(long).unwrap().arena_layout();
    assert!(layout.max_block_updates >= 8 + (1 << 17) / 16);
}
