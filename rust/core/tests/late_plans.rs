//! Plans that wait until the device needs them, by the clock of the machine.

mod simulator;

use std::thread;
use std::time::Duration;

use octavo_core::config::CoreConfig;
use octavo_core::ids::ClientId;
use octavo_core::protocol::Inbound;
use simulator::engine::{Engine, config, request};

const STEP: Duration = Duration::from_millis(100);

/// Someone who comes when he hears what a turn has to tell: whether he is in the plan of that very turn.
fn is_in_the_plan(plans_late: bool) -> bool {
    let mut engine = Engine::new(&CoreConfig {
        depth: 2,
        max_itl_ms: None,
        plans_late,
        ..config()
    });
    engine.add(request(0, &[1, 2, 3], 100));
    for _ in 0..6 {
        engine.live_step(STEP);
    }
    let (inbox, outbox) = (engine.core.inbox(), engine.core.outbox());
    outbox.take_local();
    let newcomer = thread::spawn(move || {
        while outbox.take_local().is_empty() {
            thread::sleep(Duration::from_millis(1));
        }
        inbox.push(ClientId::LOCAL, Inbound::Add(request(1, &[4, 5, 6], 3)));
    });
    engine.live_step(STEP);
    newcomer.join().expect("the newcomer came");
    let plan = engine.plans.last();
    plan.is_some_and(|plan| plan.new_rows.len() == 1)
}

#[test]
fn who_comes_while_the_device_is_busy_is_in_the_next_plan() {
    assert!(is_in_the_plan(true));
    assert!(!is_in_the_plan(false));
}
