//! How long steps take, and how many prompt tokens a step may hold so that those who decode keep their pace.
//!
//! Measured by the loop's own clock: a step lasts from its plan, or from the end of the step before it, to its result.
//! A step with prompt tokens costs what its decode rows alone cost, plus a fixed part, plus a part a token
//! (`prompt_cost`). Not here: who gets the tokens (`prompts`).

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::prompt_cost::{Line, PromptCost, Sample, median, push};
use crate::speculation::{DraftCosts, DraftPrice};

/// Fewest prompt tokens of a step beside decodes: prompts always go on.
pub const MIN_CHUNK: u32 = 32;
/// Decode steps that are remembered of each size.
const DECODE_WINDOW: usize = 9;
/// Sizes of decode steps: 1, 2-3, 4-7, … rows.
pub const NUM_SIZES: usize = 17;
/// Without a target a step takes at most so long, or so many times its fixed costs.
const AUTO_MAX_MS: f64 = 100.0;
const AUTO_MAX_RATIO: f64 = 4.0;
/// Without a target a step takes at least so many times its fixed costs, and a share of the work that waits.
const AUTO_MIN_RATIO: f64 = 3.0;
const AUTO_SHARE: f64 = 0.35;

/// What a step's time depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepShape {
    pub num_decode_rows: u32,
    /// Tokens of all other rows, and what the step is padded with.
    pub num_prompt_tokens: u32,
    /// Tokens that decode rows have beyond one.
    pub num_drafted: u32,
}

#[derive(Debug, Default)]
pub struct StepCost {
    decode_ms: [VecDeque<f64>; NUM_SIZES],
    prompts: PromptCost,
    drafts: DraftCosts,
    last_end: Option<Instant>,
}

pub fn size_of(num_rows: u32) -> usize {
    (num_rows.max(1).ilog2() as usize).min(NUM_SIZES - 1)
}

impl StepCost {
    /// The result of a step has come that was planned at `planned`.
    pub fn record(&mut self, shape: StepShape, planned: Instant, now: Instant) {
        let begin = self
            .last_end
            .replace(now)
            .map_or(planned, |end| end.max(planned));
        let time_ms = now.saturating_duration_since(begin).as_secs_f64() * 1e3;
        if shape.num_drafted > 0 {
            let extra_ms = time_ms - self.decode_ms(shape.num_decode_rows);
            self.drafts
                .record(shape.num_decode_rows, shape.num_drafted, extra_ms);
            return;
        }
        if shape.num_prompt_tokens == 0 {
            self.drafts.record_plain(shape.num_decode_rows);
            let times = &mut self.decode_ms[size_of(shape.num_decode_rows)];
            push(times, time_ms, DECODE_WINDOW);
            return;
        }
        let mut decode_ms = self.decode_ms(shape.num_decode_rows);
        if time_ms < decode_ms {
            // A decode step that compiled something was remembered. Prompts may follow each other for long, and no
            // step of decodes alone would ever correct it: those take less than this one.
            self.decode_ms[size_of(shape.num_decode_rows)] = VecDeque::from([time_ms]);
            decode_ms = time_ms;
        }
        self.prompts.record(Sample {
            num_tokens: shape.num_prompt_tokens,
            extra_ms: time_ms - decode_ms,
        });
    }

    /// Time of a step of decode rows alone; of the nearest size when this one was never seen; 0 when none was.
    fn decode_ms(&self, num_rows: u32) -> f64 {
        let size = size_of(num_rows);
        let smaller = self.decode_ms[..=size].iter().rev();
        let mut sizes = smaller.chain(&self.decode_ms[size + 1..]);
        let measured = sizes.find(|times| !times.is_empty());
        measured.map_or(0.0, |times| {
            median(times.iter().copied()).unwrap_or_default()
        })
    }

    /// When the result of the newest committed step came.
    pub fn last_end(&self) -> Option<Instant> {
        self.last_end
    }

    /// How long a step will take at least, so far as is known of its like.
    pub fn expected(&self, shape: StepShape) -> Option<Duration> {
        let times = &self.decode_ms[size_of(shape.num_decode_rows)];
        let decode_ms = times.iter().copied().reduce(f64::min)?;
        if shape.num_drafted > 0 {
            return None;
        }
        let prompt_ms = match shape.num_prompt_tokens {
            0 => 0.0,
            num_tokens => self.prompts.expected_ms(num_tokens)?,
        };
        Duration::try_from_secs_f64((decode_ms + prompt_ms) / 1e3).ok()
    }

    /// What drafts would cost a step of so many decodes; `None`: it shall have none.
    pub fn draft_price(&self, num_rows: u32) -> Option<DraftPrice> {
        let times = &self.decode_ms[size_of(num_rows)];
        let plain_ms = median(times.iter().copied())?;
        self.drafts.price(num_rows, plain_ms)
    }

    /// Most prompt tokens beside `num_decode_rows`, while `num_pending` prompt tokens wait or run.
    ///
    /// `max_itl_ms`: the time that such a step may take; 0 = any. `None` derives it: a third of the pending work,
    /// not less than three and not more than four times (or 100 ms) what the step costs without prompt tokens. So a
    /// single prompt hardly slows anybody down, and a long queue is worked off at nearly full speed.
    pub fn max_prompt_tokens(
        &self,
        num_decode_rows: u32,
        num_pending: u64,
        max_itl_ms: Option<f64>,
    ) -> u32 {
        let largest = self.prompts.largest();
        let (Some(largest), false) = (largest, max_itl_ms == Some(0.0)) else {
            return u32::MAX;
        };
        let Line {
            fixed_ms,
            ms_per_token,
            is_guess,
        } = self.prompts.line();
        let fixed_ms = fixed_ms + self.decode_ms(num_decode_rows);
        let limit_ms = max_itl_ms.unwrap_or_else(|| {
            let share_ms = AUTO_SHARE * num_pending as f64 * ms_per_token;
            let most_ms = (AUTO_MAX_RATIO * fixed_ms).max(AUTO_MAX_MS);
            (fixed_ms + share_ms).clamp(AUTO_MIN_RATIO * fixed_ms, most_ms)
        });
        // Beyond twice of what was measured the line is not believed.
        let most = largest.saturating_mul(2);
        let fitting = ((limit_ms - fixed_ms) / ms_per_token.max(1e-9)) as u32;
        let chunk = fitting.min(most) / MIN_CHUNK * MIN_CHUNK;
        let least = if is_guess && largest <= MIN_CHUNK {
            2 * MIN_CHUNK
        } else {
            MIN_CHUNK
        };
        chunk.max(least)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device with a clock of its own.
    struct Device {
        cost: StepCost,
        now: Instant,
        fixed_ms: f64,
        ms_per_token: f64,
    }

    const ROWS: u32 = 8;
    const DECODE_MS: f64 = 5.0;

    impl Device {
        fn new(fixed_ms: f64, ms_per_token: f64) -> Self {
            Self {
                cost: StepCost::default(),
                now: Instant::now(),
                fixed_ms,
                ms_per_token,
            }
        }

        fn time_ms(&self, tokens: u32) -> f64 {
            let prompt = self.fixed_ms + self.ms_per_token * f64::from(tokens);
            DECODE_MS + if tokens > 0 { prompt } else { 0.0 }
        }

        fn step_of(&mut self, num_prompt_tokens: u32, time_ms: f64) {
            let planned = self.now;
            self.now += Duration::from_secs_f64(time_ms / 1e3);
            let shape = StepShape {
                num_decode_rows: ROWS,
                num_prompt_tokens,
                num_drafted: 0,
            };
            self.cost.record(shape, planned, self.now);
        }

        fn step(&mut self, num_prompt_tokens: u32) -> f64 {
            let time_ms = self.time_ms(num_prompt_tokens);
            self.step_of(num_prompt_tokens, time_ms);
            time_ms
        }

        fn limit(&self, pending: u64, max_itl_ms: Option<f64>) -> u32 {
            self.cost.max_prompt_tokens(ROWS, pending, max_itl_ms)
        }

        /// Runs a prompt of `tokens`; the time of each of its steps.
        fn prompt(&mut self, mut tokens: u32, max_itl_ms: Option<f64>) -> Vec<f64> {
            let mut times = Vec::new();
            while tokens > 0 {
                let limit = self.limit(u64::from(tokens), max_itl_ms);
                let chunk = tokens.min(limit).min(8192);
                times.push(self.step(chunk));
                tokens -= chunk;
            }
            times
        }
    }

    #[test]
    fn nothing_is_limited_before_a_measurement_or_without_a_target() {
        let mut device = Device::new(0.0, 0.1);
        assert_eq!(device.limit(10_000, Some(9.0)), u32::MAX);
        device.step(0);
        assert_eq!(device.limit(10_000, None), u32::MAX);
        device.step(4096);
        assert!(device.limit(10_000, None) < 4096);
        assert_eq!(device.limit(10_000, Some(0.0)), u32::MAX);
    }

    #[test]
    fn a_decode_step_that_compiled_does_not_slow_prompts_for_good() {
        let mut device = Device::new(0.5, 0.02);
        device.step_of(0, 650.0);
        device.prompt(20_000, Some(12.0));
        let times = device.prompt(20_000, Some(12.0));
        let full = 20_000.0 / ((12.0 - DECODE_MS) / 0.02);
        assert!((times.len() as f64) < 1.5 * full, "{} steps", times.len());
    }

    #[test]
    fn steps_keep_to_the_target() {
        for (fixed_ms, ms_per_token) in [(0.0, 0.02), (3.0, 0.02), (0.0, 0.1), (20.0, 0.05)] {
            let mut device = Device::new(fixed_ms, ms_per_token);
            device.step(0);
            device.prompt(20_000, Some(30.0));
            let times = device.prompt(20_000, Some(30.0));
            assert!(times.iter().all(|time| *time <= 30.0), "{times:?}");
            // And they use it: all but the last chunk come close.
            let wasted = f64::from(MIN_CHUNK) * ms_per_token;
            let full = &times[..times.len() - 1];
            assert!(full.iter().all(|t| *t >= 29.9 - wasted), "{times:?}");
        }
    }

    #[test]
    fn a_target_that_cant_be_met_leaves_a_small_chunk() {
        let mut device = Device::new(0.0, 0.1);
        device.step(0);
        device.step(100);
        assert_eq!(device.limit(1000, Some(1.0)), MIN_CHUNK);
    }

    #[test]
    fn without_a_target_the_chunk_follows_the_work_that_waits() {
        let mut device = Device::new(1.0, 0.025);
        device.step(0);
        for tokens in [1000, 2000, 4000] {
            device.step(tokens);
        }
        let time = |device: &Device, pending| device.time_ms(device.limit(pending, None));
        // Decodes and the fixed part take 6 ms.
        let few = time(&device, 200);
        assert!((17.0..=18.0).contains(&few), "{few}");
        let some = time(&device, 2000);
        assert!((22.5..=23.6).contains(&some), "{some}");
        let many = time(&device, 1_000_000);
        assert!((99.0..=100.0).contains(&many), "{many}");
    }

    #[test]
    fn a_high_fixed_cost_does_not_end_in_crumbs() {
        let mut device = Device::new(12.0, 0.01);
        device.step(0);
        for _ in 0..32 {
            device.step(MIN_CHUNK);
        }
        device.prompt(4000, None);
        let chunks = device.prompt(4000, None).len();
        assert!(chunks <= 4, "{chunks} chunks");
    }

    #[test]
    fn a_slow_first_step_is_forgotten() {
        let mut device = Device::new(0.0, 0.02);
        device.step_of(0, 900.0);
        for _ in 0..4 {
            device.step(0);
        }
        device.step_of(500, 8000.0);
        assert_eq!(device.limit(10_000, Some(25.0)), MIN_CHUNK);
        device.prompt(2000, Some(25.0));
        let times = device.prompt(8000, Some(25.0));
        assert!(times.len() < 14, "{times:?}");
        assert!(times.iter().all(|time| *time <= 25.0), "{times:?}");
    }

    #[test]
    fn steps_in_flight_together_are_told_apart() {
        let mut cost = StepCost::default();
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let decode = StepShape {
            num_decode_rows: 4,
            num_prompt_tokens: 0,
            num_drafted: 0,
        };
        // Planned at 0 and at 1, run one after the other.
        cost.record(decode, at(0), at(10));
        cost.record(decode, at(1), at(20));
        assert!((cost.decode_ms(4) - 10.0).abs() < 1e-6);
        // After a pause.
        cost.record(decode, at(500), at(510));
        assert!((cost.decode_ms(4) - 10.0).abs() < 1e-6);
        // A size that was never seen is taken for the nearest.
        assert!((cost.decode_ms(1) - 10.0).abs() < 1e-6);
        assert!((cost.decode_ms(200) - 10.0).abs() < 1e-6);
    }
}
