//! When the next step is planned while the device still runs one: late, so that whoever comes meanwhile is in it.
//!
//! A plan is final: with two steps in flight, a request that comes just after a plan was made waits for the end of the
//! running step and for that of the planned one. But the device needs the plan only when it is done. How long steps take
//! is known (`step_cost`), so the plan waits until a margin before the expected end. Nobody is kept waiting by that: what
//! has been sampled is sent before. Not here: the sleep itself (`Core::step`).

use std::time::{Duration, Instant};

use crate::state::EngineState;

/// Planning and launching a step takes the host less.
const LEAST_MARGIN: Duration = Duration::from_millis(1);
/// Part of a step's time that is left for it to be shorter than expected.
const MARGIN_PART: u32 = 4;
/// Calls of clients are answered between plans.
const MAX_HOLD: Duration = Duration::from_millis(50);

impl EngineState {
    /// When to plan, if not at once: the times of all steps in flight must be known.
    pub fn plan_at(&self, now: Instant) -> Option<Instant> {
        if !self.config.plans_late {
            return None;
        }
        let mut end = self.step_cost.last_end();
        for flight in &self.in_flight {
            let time = self.step_cost.expected(flight.shape)?;
            let margin = (time / MARGIN_PART).max(LEAST_MARGIN);
            end = Some(end.max(Some(flight.planned))? + time.saturating_sub(margin));
        }
        let until = end
            .filter(|_| !self.in_flight.is_empty())?
            .min(now + MAX_HOLD);
        (until > now).then_some(until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{CoreConfig, Policy};
    use crate::groups::Keep;
    use crate::plan::InFlight;
    use crate::step_cost::StepShape;
    use crate::step_sizes::StepSizes;

    const DECODE: StepShape = StepShape {
        num_decode_rows: 4,
        num_prompt_tokens: 0,
        num_drafted: 0,
    };

    fn state(plans_late: bool) -> EngineState {
        EngineState::new(CoreConfig {
            block_size: 16,
            num_blocks: 100,
            groups: vec![Keep::All],
            output_bytes: None,
            max_num_seqs: 8,
            max_num_batched_tokens: 64,
            max_model_len: 128,
            vocab_size: 50,
            max_queued_requests: 10,
            max_queued_tokens: 1000,
            policy: Policy::Fcfs,
            enable_prefix_caching: false,
            long_prefill_token_threshold: 0,
            max_itl_ms: None,
            plans_late,
            step_sizes: StepSizes::default(),
            depth: 3,
            max_logprobs: 0,
            hash_seed: 1,
            speculation: None,
        })
        .unwrap()
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn launch(state: &mut EngineState, shape: StepShape, planned: Instant) {
        state.in_flight.push_back(InFlight {
            step_id: 1,
            rows: vec![],
            drafts: vec![],
            num_sampled: 0,
            needs_masks: false,
            planned,
            shape,
        });
    }

    /// Steps of four rows take 8 ms; the last one has just ended.
    fn measured(plans_late: bool) -> (EngineState, Instant) {
        let mut state = state(plans_late);
        let start = Instant::now();
        for at in 0..3 {
            let planned = start + ms(8 * at);
            state.step_cost.record(DECODE, planned, planned + ms(8));
        }
        (state, start + ms(24))
    }

    #[test]
    fn a_plan_waits_until_a_margin_before_the_end_of_the_step_in_flight() {
        let (mut state, now) = measured(true);
        assert_eq!(state.plan_at(now), None, "the device has nothing to do");
        launch(&mut state, DECODE, now);
        assert_eq!(state.plan_at(now), Some(now + ms(6)));
        assert_eq!(state.plan_at(now + ms(7)), None, "it is late already");
        launch(&mut state, DECODE, now);
        assert_eq!(state.plan_at(now), Some(now + ms(12)));
    }

    #[test]
    fn unknown_steps_do_not_wait_nor_does_who_is_not_asked_to() {
        let (mut state, now) = measured(false);
        launch(&mut state, DECODE, now);
        assert_eq!(state.plan_at(now), None);
        for shape in [
            StepShape {
                num_decode_rows: 8,
                ..DECODE
            },
            StepShape {
                num_prompt_tokens: 5,
                ..DECODE
            },
            StepShape {
                num_drafted: 2,
                ..DECODE
            },
        ] {
            let (mut state, now) = measured(true);
            launch(&mut state, shape, now);
            assert_eq!(state.plan_at(now), None, "{shape:?}");
        }
    }
}
