//! Drafts in the control plane, one scenario each; random traces with drafts are in `traces`.

mod simulator;

use std::time::Duration;

use octavo_core::config::CoreConfig;
use octavo_core::protocol::FinishReason;
use octavo_core::speculation::SpeculationConfig;
use simulator::engine::{Engine, config, request};
use simulator::oracle::expected;

const ALWAYS: SpeculationConfig = SpeculationConfig {
    num_tokens: 5,
    lookup_min: 1,
    lookup_max: 4,
    is_measured: false,
};

fn speculating(speculation: SpeculationConfig) -> CoreConfig {
    CoreConfig {
        speculation: Some(speculation),
        ..config()
    }
}

fn prompt(len: u32) -> Vec<u32> {
    (0..len).map(|i| (i * 3 + 1) % 7).collect()
}

/// Runs requests to their ends; every token is as without drafts. How many steps it took.
fn run(engine: &mut Engine, num_requests: u64, max_tokens: u32) -> usize {
    for id in 0..num_requests {
        engine.add(request(id, &prompt(9 + id as u32), max_tokens));
    }
    engine.run(5000);
    for id in 0..num_requests {
        let wanted = expected(&request(id, &prompt(9 + id as u32), max_tokens), 0, 50, 128);
        assert_eq!(engine.tokens(id, 0), wanted.0, "request {id}");
    }
    engine.plans.len()
}

#[test]
fn repetitive_texts_take_fewer_steps_at_every_depth() {
    for depth in 1..=4 {
        let mut plain = Engine::new(&CoreConfig { depth, ..config() });
        let without = run(&mut plain, 1, 100);
        let mut engine = Engine::new(&CoreConfig {
            depth,
            ..speculating(ALWAYS)
        });
        let with = run(&mut engine, 1, 100);
        assert!(
            with * 10 < without * 7,
            "{with} of {without} steps at depth {depth}"
        );
        let stats = engine.stats;
        assert!(stats.num_accepted_tokens > 30, "{stats:?}");
        assert!(
            stats.num_accepted_tokens <= stats.num_draft_tokens,
            "{stats:?}"
        );
        assert_eq!(stats.num_output_tokens, 100);
        if depth == 1 {
            // The prompt's step brings a token, and each other one its own beside what was accepted.
            assert_eq!(100, with as u64 + stats.num_accepted_tokens);
        }
    }
}

#[test]
fn drafts_take_no_block_that_others_need() {
    for depth in 1..=3 {
        let mut engine = Engine::new(&CoreConfig {
            num_blocks: 14,
            depth,
            ..speculating(ALWAYS)
        });
        run(&mut engine, 4, 35);
        assert!(engine.stats.num_preemptions > 0);
        assert!(engine.stats.num_accepted_tokens > 0);
    }
}

#[test]
fn a_draft_leaves_room_for_the_other_rows_of_the_budget() {
    let mut engine = Engine::new(&CoreConfig {
        max_num_batched_tokens: 8,
        ..speculating(ALWAYS)
    });
    run(&mut engine, 6, 40);
    assert!(engine.plans.iter().any(|plan| plan.totals.num_tokens == 8));
    assert!(engine.stats.num_accepted_tokens > 0);
}

#[test]
fn only_verified_tokens_are_found_in_the_cache() {
    let mut engine = Engine::new(&speculating(ALWAYS));
    run(&mut engine, 1, 60);
    let mut known = prompt(9);
    known.extend(engine.tokens(0, 0));
    // Another one that begins with that text reads those blocks; the device compares every position with its own.
    engine.add(request(7, &known, 10));
    engine.run(100);
    assert_eq!(
        engine.received[&(7, 0)].outputs[0].num_cached_tokens,
        Some(68)
    );
    assert_eq!(
        engine.tokens(7, 0),
        expected(&request(7, &known, 10), 0, 50, 128).0
    );
}

#[test]
fn stop_ids_and_lengths_cut_where_they_would_without_drafts() {
    let all = expected(&request(0, &prompt(9), 60), 0, 50, 128).0;
    for num_tokens in 1..60 {
        let mut engine = Engine::new(&speculating(ALWAYS));
        let mut stopped = request(0, &prompt(9), 60);
        stopped.stop_token_ids = vec![all[num_tokens - 1]];
        stopped.min_tokens = num_tokens as u32;
        engine.add(stopped);
        engine.run(100);
        assert_eq!(engine.tokens(0, 0), &all[..num_tokens]);
        assert_eq!(engine.received[&(0, 0)].finish, Some(FinishReason::Stop));
        engine.add(request(1, &prompt(9), num_tokens as u32));
        engine.run(100);
        assert_eq!(engine.tokens(1, 0).len(), num_tokens);
    }
}

#[test]
fn an_abort_with_a_draft_in_flight_gives_everything_back() {
    for depth in 1..=3 {
        let mut engine = Engine::new(&CoreConfig {
            depth,
            ..speculating(ALWAYS)
        });
        engine.add(request(0, &prompt(30), 90));
        while engine
            .plans
            .last()
            .is_none_or(|plan| plan.totals.num_draft_tokens == 0)
        {
            engine.step();
        }
        engine.abort(0, None);
        engine.run(10);
    }
}

/// A device on which a drafted token costs `share` of a row.
fn measured(step_time: fn(&octavo_core::arena::Totals) -> Duration) -> (usize, usize, Engine) {
    let policy = SpeculationConfig {
        is_measured: true,
        ..ALWAYS
    };
    let roomy = CoreConfig {
        num_blocks: 600,
        ..speculating(policy)
    };
    let mut engine = Engine::new(&roomy);
    engine.step_time = step_time;
    let steps = run(&mut engine, 8, 110);
    let drafted = engine
        .plans
        .iter()
        .filter(|plan| plan.totals.num_draft_tokens > 0);
    (drafted.count(), steps, engine)
}

#[test]
fn measurement_turns_drafts_on_where_they_are_cheap() {
    let (drafted, steps, engine) =
        measured(|totals| Duration::from_micros(5000 + 20 * u64::from(totals.num_tokens)));
    assert!(drafted * 10 > steps * 7, "{drafted} of {steps}");
    assert!(engine.stats.num_accepted_tokens > 200);
}

#[test]
fn measurement_turns_drafts_off_where_they_cost_as_much_as_rows() {
    let (drafted, steps, engine) =
        measured(|totals| Duration::from_micros(100 + 1000 * u64::from(totals.num_tokens)));
    assert!(steps > 90);
    assert!(drafted <= 4, "{drafted} of {steps}");
    // Trying it out costs little.
    assert!(engine.stats.num_draft_tokens < 20, "{:?}", engine.stats);
}
