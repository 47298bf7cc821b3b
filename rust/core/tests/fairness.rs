//! Who gets how much of a step: long and short prompts, the pace of decodes, the urgent, and how long one waits.

mod simulator;

use std::time::Duration;

use octavo_core::config::{CoreConfig, Policy};
use octavo_core::protocol::AddRequest;
use octavo_core::step_sizes::StepSizes;
use proptest::prelude::*;
use simulator::engine::{Engine, config, request};
use simulator::oracle::expected;

fn prompt(len: u32, salt: u32) -> Vec<u32> {
    (0..len).map(|i| (i * 3 + i / 50 + salt) % 50).collect()
}

fn large() -> CoreConfig {
    CoreConfig {
        block_size: 16,
        num_blocks: 4000,
        max_num_batched_tokens: 128,
        max_model_len: 8192,
        ..config()
    }
}

fn check_tokens(engine: &Engine, requests: &[AddRequest]) {
    for request in requests {
        let id = request.request_id.0;
        assert_eq!(
            engine.tokens(id, 0),
            expected(request, 0, 50, 8192).0,
            "request {id}"
        );
    }
}

#[test]
fn a_short_prompt_does_not_wait_for_long_ones() {
    for (num_long, depth) in [(1, 1), (1, 2), (4, 1), (4, 2)] {
        let mut engine = Engine::new(&CoreConfig { depth, ..large() });
        let mut sent = vec![request(0, &prompt(20, 0), 300)];
        engine.add(sent[0].clone());
        for _ in 0..10 {
            engine.step();
        }
        for id in 1..=num_long {
            sent.push(request(id, &prompt(4000, id as u32), 3));
            engine.add(sent[id as usize].clone());
        }
        for _ in 0..3 {
            engine.step();
        }
        let arrival = engine.num_turns;
        sent.push(request(99, &prompt(10, 7), 5));
        engine.add(sent.last().unwrap().clone());
        engine.run(1000);
        let turns = engine.first_turn[&(99, 0)] - arrival;
        assert!(turns <= 1 + depth as usize, "{turns} turns");
        // While the long ones run, the first user gets a token in every step.
        let first_long = engine.plans.iter().position(|p| p.totals.num_tokens > 60);
        let last_long = engine.plans.iter().rposition(|p| p.totals.num_tokens > 60);
        let busy = &engine.plans[first_long.unwrap()..=last_long.unwrap()];
        assert!(busy.len() >= 30 && busy.iter().all(|p| p.totals.num_decode_rows >= 1));
        check_tokens(&engine, &sent);
    }
}

#[test]
fn equal_long_prompts_run_one_after_the_other() {
    let mut engine = Engine::new(&large());
    for id in 0..3 {
        engine.add(request(id, &prompt(1280, id as u32), 1));
    }
    engine.run(100);
    let turn = |id: u64| engine.first_turn[&(id, 0)];
    assert_eq!([turn(0), turn(1), turn(2)], [11, 21, 31]);
}

#[test]
fn a_flood_of_short_prompts_leaves_a_long_one_half() {
    let mut engine = Engine::new(&CoreConfig {
        max_num_seqs: 100,
        ..large()
    });
    engine.add(request(0, &prompt(4000, 0), 1));
    let mut id = 1;
    while !engine.first_turn.contains_key(&(0, 0)) {
        for _ in 0..20 {
            engine.add(request(id, &prompt(20, id as u32), 1));
            id += 1;
        }
        engine.step();
        assert!(engine.num_turns <= 4000 / 64 + 2, "starved");
    }
    assert!(engine.first_turn.len() > 150, "the short ones got the rest");
    engine.run(4000);
}

fn pace(totals: &octavo_core::arena::Totals) -> Duration {
    let prompt = totals.num_tokens - totals.num_decode_rows;
    Duration::from_micros(5000 + 100 * u64::from(prompt))
}

#[test]
fn decodes_keep_their_pace_beside_a_long_prompt() {
    for (max_itl_ms, limit_ms, depth) in [
        (Some(20.0), 20, 1),
        (Some(20.0), 20, 2),
        (None, 100, 1),
        (Some(0.0), 1000, 1),
    ] {
        let mut engine = Engine::new(&CoreConfig {
            max_num_batched_tokens: 2048,
            max_itl_ms,
            depth,
            ..large()
        });
        engine.step_time = pace;
        // Nobody decodes: the whole budget is used.
        engine.add(request(0, &prompt(5000, 0), 1));
        engine.run(10);
        let sizes = |engine: &Engine| -> Vec<u32> {
            let totals = engine.plans.iter().map(|plan| plan.totals);
            totals.map(|t| t.num_tokens - t.num_decode_rows).collect()
        };
        assert_eq!(sizes(&engine), [2048, 2048, 904]);
        engine.add(request(1, &prompt(20, 1), 500));
        for _ in 0..20 {
            engine.step();
        }
        let before = engine.plans.len();
        engine.add(request(2, &prompt(8000, 2), 1));
        engine.run(2000);
        let beside: Vec<_> = engine.plans[before..].iter().map(|p| p.totals).collect();
        let slowest = beside.iter().map(pace).max().unwrap();
        let limit = Duration::from_millis(limit_ms);
        assert!(slowest <= limit + Duration::from_micros(10), "{slowest:?}");
        assert!(slowest > limit / 10, "the target is used: {slowest:?}");
        assert_eq!(engine.tokens(1, 0).len(), 500);
    }
}

#[test]
fn pieces_of_prompts_fill_the_sizes_of_steps() {
    for depth in [1, 2] {
        let sizes = vec![64, 128, 256, 384, 512, 1024, 2048];
        let mut engine = Engine::new(&CoreConfig {
            max_num_batched_tokens: 2048,
            max_itl_ms: Some(50.0),
            step_sizes: StepSizes::new(sizes.clone()),
            depth,
            ..large()
        });
        engine.step_time = pace;
        engine.add(request(0, &prompt(20, 0), 800));
        engine.add(request(1, &prompt(20, 1), 800));
        for _ in 0..20 {
            engine.step();
        }
        for id in 2..8 {
            engine.add(request(id, &prompt(1000, id as u32), 1));
            for _ in 0..12 {
                engine.step();
            }
        }
        let all = engine.plans.iter().map(|plan| plan.totals);
        let steps = all.filter(|t| t.num_decode_rows == 2 && t.num_tokens > 2);
        let late: Vec<u32> = steps.skip(20).map(|t| t.num_tokens).collect();
        // 45 ms are 450 tokens: a thousand in three pieces, the last of which is what is left.
        assert!(late.iter().filter(|len| sizes.contains(len)).count() * 3 >= late.len() * 2);
        assert!(late.iter().all(|len| *len <= 452), "{late:?}");
    }
}

fn urgent(id: u64, len: u32, max_tokens: u32, priority: i32) -> AddRequest {
    AddRequest {
        priority,
        ..request(id, &prompt(len, id as u32), max_tokens)
    }
}

#[test]
fn an_urgent_newcomer_takes_the_slot_of_the_least_urgent() {
    for (seqs, depth) in [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)] {
        let mut engine = Engine::new(&CoreConfig {
            max_num_seqs: seqs,
            policy: Policy::Priority,
            depth,
            ..large()
        });
        let mut sent: Vec<_> = (0..u64::from(seqs))
            .map(|id| urgent(id, 20, 400, 10 + id as i32))
            .collect();
        for first in &sent {
            engine.add(first.clone());
        }
        for _ in 0..30 {
            engine.step();
        }
        let arrival = engine.num_turns;
        sent.push(urgent(50, 20, 10, 0));
        engine.add(sent.last().unwrap().clone());
        for id in 60..70 {
            sent.push(urgent(id, 20, 10, 10 + seqs as i32 - 1));
            engine.add(sent.last().unwrap().clone());
        }
        engine.run(4000);
        assert!(engine.first_turn[&(50, 0)] - arrival <= 2 * depth as usize);
        assert_eq!(engine.stats.num_preemptions, 1, "only for the urgent one");
        let victim = u64::from(seqs) - 1;
        assert!(engine.first_turn[&(victim, 0)] < arrival);
        assert!((60..70).all(|id| engine.first_turn[&(id, 0)] > arrival));
        check_tokens(&engine, &sent);
    }
}

#[test]
fn an_urgent_newcomer_takes_blocks_only_when_they_are_enough() {
    // 15 of 40 blocks are held by a more urgent sequence, 10 by each of two less urgent ones; one is a reserve.
    for (len, num_victims) in [(16, 0), (20, 1), (56, 1), (60, 2), (96, 2), (100, 0)] {
        let mut engine = Engine::new(&CoreConfig {
            block_size: 4,
            num_blocks: 41,
            max_num_batched_tokens: 256,
            policy: Policy::Priority,
            enable_prefix_caching: false,
            ..large()
        });
        let mut sent = vec![
            urgent(0, 60, 9, -5),
            urgent(1, 37, 9, 5),
            urgent(2, 37, 9, 5),
        ];
        for first in &sent {
            engine.add(first.clone());
        }
        engine.step();
        sent.push(urgent(3, len, 2, 0));
        engine.add(sent[3].clone());
        engine.step();
        let victims = engine.core.stats().num_preemptions;
        assert_eq!(victims, num_victims, "a prompt of {len}");
        engine.run(1000);
        check_tokens(&engine, &sent);
    }
}

#[test]
fn equal_priorities_and_fcfs_push_nobody_out() {
    for policy in [Policy::Fcfs, Policy::Priority] {
        let mut engine = Engine::new(&CoreConfig {
            max_num_seqs: 2,
            policy,
            ..large()
        });
        for id in 0..12 {
            let priority = match policy {
                Policy::Fcfs => -(id as i32),
                Policy::Priority => 3,
            };
            engine.add(urgent(id, 20, 30, priority));
            engine.step();
        }
        engine.run(4000);
        assert_eq!(engine.stats.num_preemptions, 0);
        let turns: Vec<usize> = (0..12).map(|id| engine.first_turn[&(id, 0)]).collect();
        assert!(turns.is_sorted(), "{turns:?}");
    }
}

#[derive(Clone, Debug)]
struct Arrival {
    len: u32,
    max_tokens: u32,
    /// Turns before the next one.
    pause: u8,
}

fn arrivals() -> impl Strategy<Value = Vec<Arrival>> {
    let len = prop_oneof![3 => 1_u32..20, 1 => 20_u32..400];
    let arrival = (len, 1_u32..12, 0_u8..4).prop_map(|(len, max_tokens, pause)| Arrival {
        len,
        max_tokens,
        pause,
    });
    prop::collection::vec(arrival, 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases / 2))]

    /// A request waits at most until each older one has had its turn: a slot that comes free when somebody ends, and
    /// its prompt with half of what decodes leave of a step.
    #[test]
    fn the_wait_is_bounded_by_what_came_before(
        arrivals in arrivals(), seqs in 1_u32..6, budget in 8_u32..64, depth in 1_u32..4,
        max_itl_ms in prop_oneof![Just(Some(0.0)), Just(None), Just(Some(3.0))],
    ) {
        let mut engine = Engine::new(&CoreConfig {
            max_num_seqs: seqs, max_num_batched_tokens: budget, depth, max_itl_ms, enable_prefix_caching: false, ..large()
        });
        engine.step_time = pace;
        let mut arrived = Vec::new();
        for (id, arrival) in (0..).zip(&arrivals) {
            engine.add(request(id, &prompt(arrival.len, id as u32), arrival.max_tokens));
            arrived.push(engine.num_turns);
            (0..arrival.pause).for_each(|_| engine.step());
        }
        engine.run(50_000);
        let half = (budget - (seqs - 1)).min(32).div_ceil(2) as usize;
        let longest = arrivals.iter().map(|a| a.max_tokens as usize).max().unwrap();
        let mut bound = 0;
        for (id, arrival) in arrivals.iter().enumerate() {
            bound += (arrival.len as usize).div_ceil(half) + longest + depth as usize + 1;
            let waited = engine.first_turn[&(id as u64, 0)] - arrived[id];
            prop_assert!(waited <= bound, "request {id} waited {waited} turns, not {bound}");
        }
    }

    /// Short prompts beside one long prompt: half of the step is theirs.
    #[test]
    fn short_prompts_wait_only_for_each_other(lens in prop::collection::vec(1_u32..40, 1..30), depth in 1_u32..3) {
        let mut engine = Engine::new(&CoreConfig {
            max_num_seqs: 64, max_num_batched_tokens: 164, depth, enable_prefix_caching: false, ..large()
        });
        engine.add(request(0, &prompt(3000, 0), 1));
        engine.step();
        for (id, len) in (1..).zip(&lens) {
            engine.add(request(id, &prompt(*len, id as u32), 5));
        }
        let arrival = engine.num_turns;
        engine.run(1000);
        let sum = lens.iter().sum::<u32>() as usize;
        let last = (1..=lens.len() as u64).map(|id| engine.first_turn[&(id, 0)]).max().unwrap();
        prop_assert!(last - arrival <= sum.div_ceil(50) + lens.len().div_ceil(32) + 1 + depth as usize);
    }
}
