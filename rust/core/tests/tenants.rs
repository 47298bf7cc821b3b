//! Turns between tenants: service in proportion to weights, a bounded wait for everybody, room in the queue for all.

mod simulator;

use octavo_core::config::CoreConfig;
use octavo_core::ids::TenantId;
use octavo_core::protocol::{AddRequest, RefusalKind};
use proptest::prelude::*;
use simulator::engine::{Engine, config, request};

fn of(tenant: u64, weight: u32, request: AddRequest) -> AddRequest {
    AddRequest {
        tenant: TenantId(tenant),
        weight,
        ..request
    }
}

/// One slot, no chunks, no look-ahead effects: what starts next is the queue's choice alone.
fn narrow() -> CoreConfig {
    CoreConfig {
        max_num_seqs: 1,
        enable_prefix_caching: false,
        ..config()
    }
}

/// A random backlog: prompts and outputs by tenant.
#[derive(Clone, Debug)]
struct Tenant {
    weight: u32,
    requests: Vec<(u32, u32)>,
}

fn tenants() -> impl Strategy<Value = Vec<Tenant>> {
    let requests = prop::collection::vec((1_u32..40, 1_u32..30), 25..60);
    let tenant =
        (200_u32..5000, requests).prop_map(|(weight, requests)| Tenant { weight, requests });
    prop::collection::vec(tenant, 2..5)
}

const MAX_COST: f64 = 70.0;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases / 4))]

    /// While all of them have requests waiting, nobody gets more than a few requests' worth beyond his share.
    #[test]
    fn service_follows_weights(tenants in tenants()) {
        let mut engine = Engine::new(&narrow());
        let (mut next, mut spent) = (vec![0; tenants.len()], vec![0.0; tenants.len()]);
        let mut owner: Vec<(usize, f64)> = Vec::new();
        let send = |engine: &mut Engine, next: &mut Vec<usize>, owner: &mut Vec<(usize, f64)>, who: usize| {
            let (prompt, output) = tenants[who].requests[next[who]];
            next[who] += 1;
            let id = owner.len() as u64;
            owner.push((who, f64::from(prompt + output)));
            let tokens: Vec<u32> = (0..prompt).map(|i| (i + id as u32) % 50).collect();
            engine.add(of(who as u64 + 1, tenants[who].weight, request(id, &tokens, output)));
        };
        // Three of each wait; one more comes for each that has ended.
        for who in 0..tenants.len() {
            for _ in 0..3 {
                send(&mut engine, &mut next, &mut owner, who);
            }
        }
        let mut num_ended = 0;
        'busy: loop {
            engine.step();
            let ended: Vec<u64> = engine
                .received
                .iter()
                .filter(|(_, received)| received.finish.is_some())
                .map(|((id, _), _)| *id)
                .collect();
            if ended.len() == num_ended {
                continue;
            }
            num_ended = ended.len();
            spent.fill(0.0);
            for id in &ended {
                spent[owner[*id as usize].0] += owner[*id as usize].1;
            }
            let times: Vec<f64> = spent
                .iter()
                .zip(&tenants)
                .map(|(tokens, tenant)| tokens * 1000.0 / f64::from(tenant.weight))
                .collect();
            // A request's worth for each of the two, and what the guesses of the outputs that wait may be off by.
            let least = tenants.iter().map(|t| t.weight).min().unwrap();
            let bound = (2.0 + 3.0) * MAX_COST * 1000.0 / f64::from(least);
            for a in &times {
                for b in &times {
                    prop_assert!(a - b <= bound, "{times:?} with {tenants:?}");
                }
            }
            for who in 0..tenants.len() {
                let sent = owner.iter().filter(|(other, _)| *other == who).count();
                let done = ended.iter().filter(|id| owner[**id as usize].0 == who).count();
                for _ in sent - done..3 {
                    if next[who] == tenants[who].requests.len() {
                        break 'busy;
                    }
                    send(&mut engine, &mut next, &mut owner, who);
                }
            }
        }
        engine.run(20_000);
    }
}

/// The numbers of the requests in the order of their starts.
fn starts(engine: &Engine) -> Vec<u8> {
    let rows = engine.plans.iter().flat_map(|plan| &plan.new_rows);
    rows.map(|row| row.params[0]).collect()
}

#[test]
fn a_flood_does_not_starve_who_comes_late() {
    let mut engine = Engine::new(&narrow());
    for id in 0..200 {
        engine.add(of(1, 1000, request(id, &[1, 2, 3], 4)));
    }
    for _ in 0..9 {
        engine.step();
    }
    engine.add(of(2, 1000, request(201, &[1, 2, 3], 4)));
    engine.run(5000);
    let at = starts(&engine).iter().position(|id| *id == 201).unwrap();
    assert!(at <= 4, "it was number {at}");
}

#[test]
fn a_heavier_tenant_gets_more_turns() {
    let mut engine = Engine::new(&narrow());
    for id in 0..40 {
        let (tenant, weight) = if id < 20 { (1, 1000) } else { (2, 3000) };
        engine.add(of(tenant, weight, request(id, &[1, 2, 3], 5)));
    }
    engine.run(5000);
    let heavy = starts(&engine)[..16].iter().filter(|id| **id >= 20).count();
    assert!((11..=13).contains(&heavy), "{heavy} of the first 16");
}

#[test]
fn what_others_left_is_not_owed() {
    let mut engine = Engine::new(&narrow());
    for id in 0..100 {
        engine.add(of(1, 1000, request(id, &[1, 2, 3], 4)));
    }
    while engine.received.len() < 50 {
        engine.step();
    }
    for id in 100..200 {
        engine.add(of(2, 1000, request(id, &[1, 2, 3], 4)));
    }
    engine.run(5000);
    let after = &starts(&engine)[52..72];
    let first = after.iter().filter(|id| **id < 100).count();
    assert!((8..=12).contains(&first), "{first} of 20");
}

#[test]
fn a_tenant_that_fills_the_queue_leaves_room() {
    let mut engine = Engine::new(&CoreConfig {
        max_queued_requests: 10,
        ..narrow()
    });
    for id in 0..30 {
        engine.add(of(1, 1000, request(id, &[1], 4)));
    }
    engine.step();
    engine.add(of(2, 1000, request(100, &[1], 4)));
    engine.step();
    assert!(!engine.refusals.contains_key(&100));
    let refusal = &engine.refusals[&29];
    assert_eq!(refusal.kind, RefusalKind::QueueFull);
    assert!(refusal.message.contains("for others"), "{refusal:?}");
    assert!(refusal.retry_after_s >= 1.0);
    engine.run(1000);
}
