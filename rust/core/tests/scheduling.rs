//! Rules of scheduling, one scenario each; random traces are in `traces`.

mod simulator;

use octavo_core::config::{CoreConfig, Policy};
use octavo_core::protocol::FinishReason;
use simulator::engine::{Engine, config, request};
use simulator::oracle::expected;

fn prompt(len: u32, salt: u32) -> Vec<u32> {
    (0..len).map(|i| (i * 3 + salt) % 50).collect()
}

/// (start of each row's work, tokens) is not in the plan; totals are: tokens per step.
fn tokens_per_step(engine: &Engine) -> Vec<u32> {
    engine
        .plans
        .iter()
        .map(|plan| plan.totals.num_tokens)
        .collect()
}

#[test]
fn a_long_prompt_is_cut_under_the_budget() {
    let mut engine = Engine::new(&CoreConfig {
        max_num_batched_tokens: 30,
        ..config()
    });
    engine.add(request(0, &prompt(70, 0), 3));
    engine.run(100);
    assert_eq!(tokens_per_step(&engine), [30, 30, 10, 1, 1]);
    let sampled: Vec<u32> = engine
        .plans
        .iter()
        .map(|plan| plan.totals.num_sampled)
        .collect();
    assert_eq!(sampled, [0, 0, 1, 1, 1]);
}

#[test]
fn decodes_go_before_prompts_and_the_threshold_bounds_prompts() {
    let mut engine = Engine::new(&CoreConfig {
        max_num_batched_tokens: 30,
        long_prefill_token_threshold: 8,
        ..config()
    });
    engine.add(request(0, &prompt(20, 0), 6));
    engine.step();
    engine.add(request(1, &prompt(40, 1), 2));
    engine.run(100);
    // Alone, nothing limits the first prompt but the budget; beside a decode a prompt gets eight tokens a step.
    assert_eq!(tokens_per_step(&engine)[..6], [20, 9, 9, 9, 9, 9]);
    for plan in &engine.plans[1..6] {
        assert_eq!(plan.totals.num_decode_rows, 1);
    }
}

#[test]
fn equal_prompts_in_one_step_do_not_share_what_is_not_computed_yet() {
    let mut engine = Engine::new(&config());
    let shared = prompt(16, 0);
    engine.add(request(0, &shared, 4));
    engine.add(request(1, &shared, 4));
    engine.run(100);
    assert_eq!(tokens_per_step(&engine)[0], 32);
    engine.add(request(2, &shared, 4));
    engine.run(100);
    // The last of four full blocks runs again: something must be sampled from.
    let first = &engine.received[&(2, 0)].outputs[0];
    assert_eq!(first.num_cached_tokens, Some(12));
    let stats = engine.core.stats();
    assert_eq!(
        (stats.prefix_queried_tokens, stats.prefix_hit_tokens),
        (48, 12)
    );
}

#[test]
fn a_long_prefix_is_computed_once_for_all_who_come_together() {
    for depth in [1, 2] {
        let mut engine = Engine::new(&CoreConfig {
            max_num_batched_tokens: 1000,
            max_model_len: 512,
            num_blocks: 400,
            depth,
            ..config()
        });
        let shared = prompt(300, 0);
        for id in 0..4 {
            let own = prompt(8, id as u32 + 1);
            engine.add(request(id, &[&shared[..], &own[..]].concat(), 4));
        }
        engine.add(request(4, &prompt(5, 7), 4));
        engine.run(100);
        // The first one's prompt alone, then the own tokens of the others (8, and 1 of the last shared one).
        let tokens = tokens_per_step(&engine);
        assert_eq!(tokens[0], 308);
        assert_eq!(tokens[1], 1 + 3 * 8 + 5, "depth {depth}: {tokens:?}");
    }
}

#[test]
fn salts_and_resets_keep_prefixes_apart() {
    let mut engine = Engine::new(&config());
    let shared = prompt(17, 0);
    let cached = |engine: &mut Engine, id: u64, salt: &[u8]| {
        let mut next = request(id, &shared, 2);
        next.cache_salt = salt.to_vec();
        engine.add(next);
        engine.run(100);
        engine.received[&(id, 0)].outputs[0]
            .num_cached_tokens
            .unwrap()
    };
    assert_eq!(cached(&mut engine, 0, b"a"), 0);
    assert_eq!(cached(&mut engine, 1, b"b"), 0);
    assert_eq!(cached(&mut engine, 2, b"a"), 16);
    assert!(engine.core.reset_prefix_cache());
    assert_eq!(cached(&mut engine, 3, b"a"), 0);
    engine.add(request(4, &shared, 9));
    engine.step();
    engine.step();
    assert!(!engine.core.reset_prefix_cache(), "some blocks are in use");
    engine.run(100);
}

#[test]
fn siblings_share_the_prompt_and_copy_its_last_block() {
    for (len, caching, copies) in [(10, false, 3), (10, true, 3), (9, false, 0), (3, true, 3)] {
        let mut engine = Engine::new(&CoreConfig {
            enable_prefix_caching: caching,
            ..config()
        });
        let mut several = request(0, &prompt(len, 0), 5);
        several.n = 4;
        engine.add(several.clone());
        engine.run(100);
        assert_eq!(engine.device.num_copies, copies, "prompt of {len}");
        // The prompt once, its last token again for each sibling, and four more tokens for everybody.
        assert_eq!(
            tokens_per_step(&engine).iter().sum::<u32>(),
            len + 3 + 4 * 4
        );
        for index in 0..4 {
            assert_eq!(
                engine.tokens(0, index),
                expected(&several, index, 50, 128).0
            );
        }
        assert_eq!(engine.stats.num_prompt_tokens, u64::from(len));
    }
}

#[test]
fn siblings_whose_first_sequence_is_gone_go_on_alone() {
    let mut engine = Engine::new(&CoreConfig {
        max_num_batched_tokens: 8,
        ..config()
    });
    let mut several = request(0, &prompt(20, 0), 5);
    several.n = 3;
    engine.add(several.clone());
    engine.step();
    engine.abort(0, Some(0));
    engine.run(100);
    assert_eq!(engine.received[&(0, 0)].finish, Some(FinishReason::Abort));
    for index in 1..3 {
        assert_eq!(
            engine.tokens(0, index),
            expected(&several, index, 50, 128).0
        );
    }
}

#[test]
fn preemption_changes_no_output() {
    for depth in 1..=4 {
        for caching in [false, true] {
            let mut engine = Engine::new(&CoreConfig {
                num_blocks: 12,
                enable_prefix_caching: caching,
                depth,
                ..config()
            });
            for id in 0..4 {
                engine.add(request(id, &prompt(8, id as u32), 30));
            }
            engine.run(2000);
            assert!(engine.stats.num_preemptions > 0);
            for id in 0..4 {
                let wanted = expected(&request(id, &prompt(8, id as u32), 30), 0, 50, 128);
                assert_eq!(
                    engine.tokens(id, 0),
                    wanted.0,
                    "depth {depth}, caching {caching}"
                );
            }
        }
    }
}

#[test]
fn the_last_in_turn_is_preempted() {
    let mut engine = Engine::new(&CoreConfig {
        num_blocks: 9,
        policy: Policy::Priority,
        ..config()
    });
    for (id, priority) in [(0, 5), (1, -5)] {
        let mut next = request(id, &prompt(8, id as u32), 16);
        next.priority = priority;
        engine.add(next);
    }
    engine.run(1000);
    let slots: Vec<u8> = engine
        .plans
        .iter()
        .flat_map(|plan| &plan.new_rows)
        .map(|row| row.params[0])
        .collect();
    assert_eq!(slots, [1, 0, 0], "the urgent one starts first and stays");
}

#[test]
fn a_stop_token_leaves_a_dead_row_whose_blocks_come_back_when_it_retires() {
    let wanted = expected(&request(0, &prompt(8, 0), 20), 0, 50, 128).0;
    let mut stopped = request(0, &prompt(8, 0), 20);
    stopped.stop_token_ids = vec![wanted[0]];
    let mut engine = Engine::new(&CoreConfig {
        depth: 2,
        ..config()
    });
    engine.add(stopped);
    engine.step();
    engine.step();
    engine.step();
    assert_eq!(engine.received[&(0, 0)].finish, Some(FinishReason::Stop));
    assert_eq!(
        engine.received[&(0, 0)].outputs[0].stop_token_id,
        Some(wanted[0])
    );
    let stats = engine.core.stats();
    assert_eq!(stats.num_running, 0);
    assert!(
        stats.num_free_blocks < stats.num_blocks,
        "a row in flight still writes to them"
    );
    engine.step();
    let stats = engine.core.stats();
    assert_eq!(stats.num_free_blocks, stats.num_blocks);
    assert_eq!(engine.plans.len(), 2);
    assert_eq!(engine.tokens(0, 0), &wanted[..1]);
}

#[test]
fn stop_ids_wait_for_min_tokens() {
    let wanted = expected(&request(0, &prompt(8, 0), 20), 0, 50, 128).0;
    let mut stopped = request(0, &prompt(8, 0), 20);
    stopped.stop_token_ids = wanted.clone();
    stopped.min_tokens = 5;
    let mut engine = Engine::new(&config());
    engine.add(stopped);
    engine.run(100);
    assert_eq!(engine.tokens(0, 0), &wanted[..5]);
}

#[test]
fn length_ends_a_sequence_without_a_dead_row() {
    for depth in 1..=4 {
        let mut engine = Engine::new(&CoreConfig {
            depth,
            max_model_len: 24,
            ..config()
        });
        engine.add(request(0, &prompt(8, 0), 5));
        engine.add(request(1, &prompt(20, 1), 1000));
        engine.run(100);
        assert_eq!(engine.tokens(0, 0).len(), 5);
        assert_eq!(engine.tokens(1, 0).len(), 4, "cut at the context length");
        let sampled: u32 = engine
            .plans
            .iter()
            .map(|plan| plan.totals.num_sampled)
            .sum();
        assert_eq!(sampled, 9, "depth {depth}");
    }
}

#[test]
fn a_sequence_may_fill_the_whole_cache() {
    for depth in 1..=3 {
        let mut engine = Engine::new(&CoreConfig {
            num_blocks: 4,
            depth,
            ..config()
        });
        engine.add(request(0, &prompt(12, 0), 1000));
        engine.add(request(1, &prompt(3, 0), 1000));
        engine.run(1000);
        assert_eq!(
            engine.tokens(0, 0).len(),
            1,
            "the prompt fills the cache; the last token needs no place"
        );
        assert_eq!(engine.tokens(1, 0).len(), 10);
    }
}

#[test]
fn a_long_request_starts_although_short_ones_keep_coming() {
    let mut engine = Engine::new(&CoreConfig {
        num_blocks: 21,
        ..config()
    });
    for id in 0..6 {
        engine.add(request(id, &prompt(8, id as u32), 6));
    }
    engine.step();
    engine.add(request(1000, &prompt(70, 3), 4));
    let mut steps = 0;
    while !engine.received.contains_key(&(1000, 0)) {
        engine.add(request(2000 + steps, &prompt(8, steps as u32), 6));
        engine.step();
        steps += 1;
        assert!(steps < 30, "starved");
    }
    engine.run(2000);
}

#[test]
fn aborts_free_everything_within_one_step() {
    let mut engine = Engine::new(&config());
    for id in 0..20 {
        engine.add(request(id, &prompt(8, id as u32), 50));
    }
    for _ in 0..5 {
        engine.step();
    }
    for id in 0..20 {
        engine.abort(id, None);
    }
    engine.abort(77, None);
    engine.step();
    assert!(!engine.core.has_work());
    let stats = engine.core.stats();
    assert_eq!(stats.num_free_blocks, stats.num_blocks);
    assert_eq!(stats.num_aborted, 20);
    assert!(
        engine
            .received
            .values()
            .all(|received| received.finish == Some(FinishReason::Abort))
    );
}
