//! Cache groups: what windows and chunks hold, give back and share. Random traces over all kinds are in `traces`.

mod simulator;

use octavo_core::config::CoreConfig;
use octavo_core::groups::Keep;
use simulator::engine::{Engine, config, request};
use simulator::oracle::expected;

const ALL_AND_WINDOW: [Keep; 2] = [Keep::All, Keep::Window(16)];

fn prompt(len: u32, salt: u32) -> Vec<u32> {
    (0..len).map(|i| (i * i + i * 3 + salt) % 50).collect()
}

fn engine(groups: &[Keep], change: impl FnOnce(&mut CoreConfig)) -> Engine {
    let mut config = CoreConfig {
        groups: groups.to_vec(),
        num_blocks: 400,
        max_model_len: 512,
        ..config()
    };
    change(&mut config);
    Engine::new(&config)
}

fn used(engine: &mut Engine) -> u32 {
    let stats = engine.core.stats();
    stats.num_blocks - stats.num_free_blocks
}

fn cached(engine: &mut Engine, id: u64, prompt: &[u32]) -> u32 {
    engine.add(request(id, prompt, 2));
    engine.run(1000);
    let first = &engine.received[&(id, 0)].outputs[0];
    first.num_cached_tokens.expect("of the first output")
}

#[test]
fn a_window_holds_itself_and_a_block_at_any_length() {
    for depth in [1, 2] {
        let groups = [Keep::Window(1024), Keep::All];
        let mut engine = engine(&groups, |config| {
            config.block_size = 16;
            config.num_blocks = 4096;
            config.max_model_len = 1 << 15;
            config.max_num_batched_tokens = 2048;
            config.depth = depth;
        });
        let len = (1 << 15) - 40;
        engine.add(request(0, &prompt(len, 0), 40));
        let (mut most, mut most_decoding) = (0, 0);
        while engine.core.has_work() {
            engine.step();
            let tokens = engine.plans.last().unwrap().totals.num_tokens;
            let held = used(&mut engine).saturating_sub(len.div_ceil(16));
            most = most.max(held);
            if tokens == 1 && engine.received.contains_key(&(0, 0)) {
                // The full group grows too.
                let all = (len + engine.tokens(0, 0).len() as u32).div_ceil(16);
                most_decoding = most_decoding.max(used(&mut engine).saturating_sub(all));
            }
        }
        let window = 1024 / 16;
        assert!(most <= window + 1 + depth * 2048 / 16 + 1, "{most}");
        assert!(
            (window..=window + 2).contains(&most_decoding),
            "{most_decoding}"
        );
        assert_eq!(engine.tokens(0, 0).len(), 40);
    }
}

#[test]
fn a_prefix_is_the_least_of_the_groups() {
    let mut engine = engine(&ALL_AND_WINDOW, |_| {});
    let long = prompt(100, 0);
    assert_eq!(cached(&mut engine, 0, &long), 0);
    assert_eq!(cached(&mut engine, 1, &long), 96);
    // Blocks that left the window are cached as others are: a prompt that parts in the middle finds its own.
    let parting: Vec<u32> = [&long[..60], &prompt(30, 7)].concat();
    assert_eq!(cached(&mut engine, 2, &parting), 60);
    assert!(engine.core.reset_prefix_cache());
    assert_eq!(cached(&mut engine, 3, &long), 0);
}

#[test]
fn what_other_sequences_took_is_no_longer_a_prefix() {
    // 26 + 5 blocks for a sequence of 100 tokens, of 48: the next one takes the oldest cached ones.
    let mut engine = engine(&ALL_AND_WINDOW, |config| config.num_blocks = 49);
    let (first, second) = (prompt(100, 0), prompt(100, 1));
    cached(&mut engine, 0, &first);
    cached(&mut engine, 1, &second);
    let again = cached(&mut engine, 2, &first);
    assert!(again < 96, "{again}");
    let wanted = expected(&request(2, &first, 2), 0, 50, 512).0;
    assert_eq!(engine.tokens(2, 0), wanted);
}

#[test]
fn siblings_share_a_window() {
    for len in [33, 34, 40] {
        let mut engine = engine(&[Keep::Window(8), Keep::Chunk(12), Keep::All], |_| {});
        let mut several = request(0, &prompt(len, 0), 30);
        several.n = 3;
        engine.add(several.clone());
        engine.run(1000);
        let copies = if (len - 1).is_multiple_of(4) {
            0
        } else {
            2 * 3
        };
        assert_eq!(engine.device.num_copies, copies, "prompt of {len}");
        for index in 0..3 {
            let wanted = expected(&several, index, 50, 512).0;
            assert_eq!(engine.tokens(0, index), wanted);
        }
    }
}

#[test]
fn windows_alone_hold_any_length() {
    for groups in [[Keep::Window(8)], [Keep::Chunk(8)]] {
        let mut engine = engine(&groups, |config| {
            config.num_blocks = 4;
            config.depth = 2;
        });
        let long = request(0, &prompt(100, 0), 300);
        engine.add(long.clone());
        engine.run(2000);
        assert_eq!(engine.tokens(0, 0), expected(&long, 0, 50, 512).0);
        assert_eq!(engine.stats.num_preemptions, 0);
    }
}

#[test]
fn a_starved_cache_changes_no_output() {
    for depth in 1..=4 {
        let mut engine = engine(&[Keep::All, Keep::Window(9), Keep::Chunk(12)], |config| {
            config.num_blocks = 31;
            config.depth = depth;
            config.max_num_batched_tokens = 20;
        });
        let long = |id: u64| request(id, &prompt(20, id as u32), 40);
        for id in 0..5 {
            engine.add(long(id));
        }
        engine.run(5000);
        assert!(engine.stats.num_preemptions > 0);
        for id in 0..5 {
            assert_eq!(engine.tokens(id, 0), expected(&long(id), 0, 50, 512).0);
        }
    }
}

#[test]
fn a_prompt_in_a_full_cache_goes_on_with_what_it_gives_back() {
    // The window's blocks and no other are free: the prompt of 200 tokens passes through them.
    let mut engine = engine(&[Keep::Window(16)], |config| {
        config.num_blocks = 6;
        config.depth = 2;
    });
    let long = request(0, &prompt(200, 0), 3);
    engine.add(long.clone());
    engine.run(500);
    assert_eq!(engine.tokens(0, 0), expected(&long, 0, 50, 512).0);
}

#[test]
fn states_are_found_at_borders_of_blocks() {
    for groups in [&[Keep::State][..], &[Keep::All, Keep::State, Keep::State]] {
        let mut engine = engine(groups, |config| config.depth = 2);
        let long = prompt(101, 0);
        assert_eq!(cached(&mut engine, 0, &long), 0);
        assert_eq!(cached(&mut engine, 1, &long), 100);
        let parting: Vec<u32> = [&long[..62], &prompt(30, 7)].concat();
        assert_eq!(cached(&mut engine, 2, &parting), 60);
        let mut several = request(3, &prompt(50, 5), 20);
        several.n = 3;
        engine.add(several.clone());
        engine.run(1000);
        for index in 0..3 {
            assert_eq!(
                engine.tokens(3, index),
                expected(&several, index, 50, 512).0
            );
        }
        assert_eq!(
            engine.device.num_copies, 0,
            "a sibling's state is that of its own tokens"
        );
    }
}
