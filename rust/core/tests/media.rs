//! Images in prompts: equal tokens of different images share no blocks, and rows don't cut images that must be whole.

mod simulator;

use octavo_core::config::CoreConfig;
use octavo_core::media::{MediaSpan, OutputBytes};
use octavo_core::protocol::AddRequest;
use simulator::engine::{Engine, config, request};

/// A text of 5 tokens, 12 equal tokens for an image, and 7 tokens of text.
fn with_image(id: u64, digest: u128, is_whole: bool) -> AddRequest {
    let prompt: Vec<u32> = (0..5).chain([9; 12]).chain(20..27).collect();
    let span = MediaSpan {
        start: 5,
        len: 12,
        digest,
        is_whole,
    };
    AddRequest {
        media: vec![span],
        media_data: vec![1, 2, 3],
        ..request(id, &prompt, 2)
    }
}

fn cached(engine: &mut Engine, request: AddRequest) -> u32 {
    let id = request.request_id.0;
    engine.add(request);
    engine.run(100);
    let first = &engine.received[&(id, 0)].outputs[0];
    first.num_cached_tokens.expect("the first output has it")
}

#[test]
fn images_with_equal_tokens_are_kept_apart() {
    let mut engine = Engine::new(&config()); // blocks of 4
    assert_eq!(cached(&mut engine, with_image(0, 1, false)), 0);
    assert_eq!(cached(&mut engine, with_image(1, 1, false)), 20);
    // Only the block before the image is the same.
    assert_eq!(cached(&mut engine, with_image(2, 2, false)), 4);
    let text = AddRequest {
        media: vec![],
        ..with_image(3, 0, false)
    };
    assert_eq!(cached(&mut engine, text), 4);
    let mut shifted = with_image(4, 1, false);
    shifted.media[0].start = 4;
    assert_eq!(cached(&mut engine, shifted), 4);
    assert_eq!(cached(&mut engine, with_image(5, 2, false)), 20);
}

#[test]
fn the_worker_gets_what_came_with_the_request() {
    let mut engine = Engine::new(&config());
    engine.add(with_image(0, 1, false));
    engine.add(request(1, &[1, 2], 1));
    engine.run(100);
    let given: Vec<&[u8]> = engine.plans[0]
        .new_rows
        .iter()
        .map(|row| &*row.media_data)
        .collect();
    assert_eq!(given, [&[1, 2, 3][..], &[]]);
}

/// What the plans say of the image's outputs.
fn placed(engine: &Engine) -> Vec<(usize, bool)> {
    let outputs = engine.plans.iter().flat_map(|plan| &plan.outputs);
    outputs.map(|o| (o.blocks.len(), o.is_filled)).collect()
}

#[test]
fn outputs_lie_in_free_blocks_until_others_need_them() {
    // An image of 12 positions takes 4 blocks, and lies in 3 rows of 7.
    let mut engine = Engine::new(&CoreConfig {
        output_bytes: Some(OutputBytes {
            of_token: 10,
            of_block: 33,
        }),
        max_num_batched_tokens: 7,
        num_blocks: 21,
        enable_prefix_caching: false,
        ..config()
    });
    engine.add(with_image(0, 1, false));
    engine.run(100);
    assert_eq!(placed(&engine), [(4, false), (4, true), (4, true)]);
    engine.plans.clear();
    engine.add(with_image(1, 1, false));
    engine.add(with_image(2, 2, false));
    engine.run(100);
    let found = placed(&engine);
    assert_eq!(found.iter().filter(|(_, is_filled)| !is_filled).count(), 1);
    // Texts take all blocks, and give them back.
    engine.plans.clear();
    for id in 3..5 {
        engine.add(request(id, &[5; 40], 1));
    }
    engine.run(100);
    engine.add(with_image(5, 1, false));
    engine.run(100);
    assert_eq!(placed(&engine)[0], (4, false));
}

#[test]
fn an_image_that_finds_no_room_keeps_nobody_waiting() {
    let mut engine = Engine::new(&CoreConfig {
        output_bytes: Some(OutputBytes {
            of_token: 50,
            of_block: 1,
        }),
        ..config()
    });
    engine.add(with_image(0, 1, false));
    engine.run(100);
    assert_eq!(placed(&engine), []);
    assert_eq!(engine.tokens(0, 0).len(), 2);
}

#[test]
fn rows_do_not_cut_whole_images() {
    for (is_whole, expected) in [(true, [5, 12, 7]), (false, [12, 12, 0])] {
        let mut engine = Engine::new(&CoreConfig {
            max_num_batched_tokens: 12,
            ..config()
        });
        engine.add(with_image(0, 1, is_whole));
        engine.run(100);
        let tokens = engine.plans.iter().map(|plan| plan.totals.num_tokens);
        let wanted: Vec<u32> = expected.into_iter().filter(|n| *n > 0).collect();
        assert_eq!(tokens.take(wanted.len()).collect::<Vec<_>>(), wanted);
    }
}

#[test]
fn a_whole_image_is_computed_beside_decodes_though_the_threshold_is_lower() {
    let mut engine = Engine::new(&CoreConfig {
        max_num_batched_tokens: 14,
        long_prefill_token_threshold: 3,
        ..config()
    });
    engine.add(request(0, &[1, 2, 3], 30));
    engine.step();
    engine.add(with_image(1, 1, true));
    engine.run(100);
    let tokens: Vec<u32> = engine.plans[1..]
        .iter()
        .take(6)
        .map(|plan| plan.totals.num_tokens)
        .collect();
    assert_eq!(tokens, [4, 3, 13, 4, 4, 2]);
}

#[test]
fn spans_that_do_not_fit_are_refused() {
    let mut engine = Engine::new(&CoreConfig {
        max_num_batched_tokens: 11,
        ..config()
    });
    let mut outside = with_image(0, 1, false);
    outside.media[0].start = 13;
    engine.add(outside);
    engine.add(with_image(1, 1, true));
    engine.run(10);
    assert!(engine.refusals[&0].message.contains("does not fit"));
    assert!(engine.refusals[&1].message.contains("12 tokens"));
}
