//! What prompt tokens add to a step's time, as measured: a middle value of the newest steps of each class of sizes, and a
//! line through those of all classes.
//!
//! Most steps of a quiet time have much the same size, and times jitter: a line through the newest steps alone would say
//! little of larger ones. So each class (four an octave) keeps its own. The line has the median of the slopes between
//! all pairs (Theil 1950, Sen 1968) of classes that lie far enough apart, so that a step that compiled a kernel or
//! captured a graph does not count. Not here: decode rows' own time, and what is made of it all (`step_cost`).

use std::collections::{BTreeMap, VecDeque};

/// Steps that are remembered of each class.
const WINDOW: usize = 5;
/// A class of which as many steps are known is believed; others count while there is none: the very first step, in which
/// all is slow, would make larger ones look cheap.
const FULL: usize = 3;
/// So many steps (with prompts) after its last one a class is forgotten, …
const FULL_AGE: u64 = 4096;
/// … one that is not believed.
const AGE: u64 = 256;

/// A step with prompt tokens, and its time without that of its decode rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    pub num_tokens: u32,
    pub extra_ms: f64,
}

/// Time of prompt (or drafted) tokens in a step, beyond that of its decode rows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Line {
    pub fixed_ms: f64,
    pub ms_per_token: f64,
    /// All samples are of about one size: what is fixed and what grows can't be told apart.
    pub is_guess: bool,
}

#[derive(Debug, Default)]
struct Class {
    samples: VecDeque<Sample>,
    last_step: u64,
}

impl Class {
    fn is_full(&self) -> bool {
        self.samples.len() >= FULL
    }

    /// Its middle size and its middle time.
    fn middle(&self) -> Sample {
        let times = self.samples.iter().map(|sample| sample.extra_ms);
        let mut sizes: Vec<u32> = self.samples.iter().map(|s| s.num_tokens).collect();
        sizes.sort_unstable();
        Sample {
            num_tokens: sizes[(sizes.len() - 1) / 2],
            extra_ms: median(times).unwrap_or_default(),
        }
    }
}

#[derive(Debug, Default)]
pub struct PromptCost {
    classes: BTreeMap<u32, Class>,
    num_steps: u64,
    line: Line,
}

/// Four an octave.
fn class_of(num_tokens: u32) -> u32 {
    let octave = num_tokens.max(4).ilog2();
    4 * octave + ((num_tokens.max(4) >> (octave - 2)) & 3)
}

pub fn push<T>(values: &mut VecDeque<T>, value: T, most: usize) {
    if values.len() == most {
        values.pop_front();
    }
    values.push_back(value);
}

/// The middle value (the lower one of two).
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted.get(sorted.len().saturating_sub(1) / 2).copied()
}

impl PromptCost {
    pub fn record(&mut self, sample: Sample) {
        self.num_steps += 1;
        let class = self.classes.entry(class_of(sample.num_tokens)).or_default();
        push(&mut class.samples, sample, WINDOW);
        class.last_step = self.num_steps;
        let now = self.num_steps;
        self.classes.retain(|_, class| {
            let age = if class.is_full() { FULL_AGE } else { AGE };
            now - class.last_step < age
        });
        let has_full = self.classes.values().any(Class::is_full);
        let believed = self.classes.values().filter(|c| c.is_full() || !has_full);
        let middles: Vec<Sample> = believed.map(Class::middle).collect();
        self.line = fit(&middles, |small, large| 2 * large >= 3 * small);
    }

    pub fn line(&self) -> Line {
        self.line
    }

    /// Most tokens of a step that is remembered.
    pub fn largest(&self) -> Option<u32> {
        let samples = self.classes.values().flat_map(|class| &class.samples);
        samples.map(|sample| sample.num_tokens).max()
    }

    /// What so many tokens will add, if it is known.
    pub fn expected_ms(&self, num_tokens: u32) -> Option<f64> {
        let class = self.classes.get(&class_of(num_tokens));
        if let Some(class) = class.filter(|class| class.is_full()) {
            let times = class.samples.iter().map(|sample| sample.extra_ms);
            return times.reduce(f64::min);
        }
        let Line {
            fixed_ms,
            ms_per_token,
            is_guess,
        } = self.line;
        let is_known = !is_guess && !self.classes.is_empty();
        is_known.then(|| fixed_ms + ms_per_token * f64::from(num_tokens))
    }
}

/// `are_far`: whether two sizes (the smaller first) differ enough to say something of the slope.
pub fn fit<'a>(
    samples: impl IntoIterator<Item = &'a Sample>,
    are_far: impl Fn(u32, u32) -> bool,
) -> Line {
    let samples: Vec<Sample> = samples.into_iter().copied().collect();
    let mut slopes = Vec::new();
    for (at, a) in samples.iter().enumerate() {
        for b in &samples[at + 1..] {
            let (small, large) = if a.num_tokens < b.num_tokens {
                (a, b)
            } else {
                (b, a)
            };
            if small.num_tokens < large.num_tokens && are_far(small.num_tokens, large.num_tokens) {
                let tokens = f64::from(large.num_tokens - small.num_tokens);
                slopes.push((large.extra_ms - small.extra_ms) / tokens);
            }
        }
    }
    let Some(slope) = median(slopes) else {
        let rates = samples.iter().map(|s| s.extra_ms / f64::from(s.num_tokens));
        return Line {
            fixed_ms: 0.0,
            ms_per_token: median(rates).unwrap_or_default(),
            is_guess: true,
        };
    };
    let ms_per_token = slope.max(0.0);
    let rest = samples
        .iter()
        .map(|s| s.extra_ms - ms_per_token * f64::from(s.num_tokens));
    Line {
        fixed_ms: median(rest).unwrap_or_default().max(0.0),
        ms_per_token,
        is_guess: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(cost: &mut PromptCost, num_tokens: u32, extra_ms: f64) {
        cost.record(Sample {
            num_tokens,
            extra_ms,
        });
    }

    fn true_ms(num_tokens: u32) -> f64 {
        2.0 + 0.02 * f64::from(num_tokens)
    }

    #[test]
    fn many_steps_of_much_the_same_size_do_not_bend_the_line() {
        let mut cost = PromptCost::default();
        for num_tokens in [512, 1024, 2048] {
            for _ in 0..3 {
                record(&mut cost, num_tokens, true_ms(num_tokens));
            }
        }
        // The shorter ones of a quiet time take as long as the longer ones.
        for step in 0..500 {
            let num_tokens = if step % 3 == 2 { 315 } else { 379 };
            record(&mut cost, num_tokens, true_ms(379));
        }
        let line = cost.line();
        assert!((line.ms_per_token - 0.02).abs() < 0.002, "{line:?}");
        let expected = cost.expected_ms(1024).unwrap();
        assert!((expected - true_ms(1024)).abs() < 1e-9, "{expected}");
        let between = cost.expected_ms(1500).unwrap();
        assert!((between - true_ms(1500)).abs() < 2.0, "{between}");
    }

    #[test]
    fn one_size_is_a_guess_and_nothing_is_expected_of_others() {
        let mut cost = PromptCost::default();
        assert_eq!(cost.expected_ms(100), None);
        for _ in 0..10 {
            record(&mut cost, 379, true_ms(379));
            record(&mut cost, 340, true_ms(340));
        }
        assert!(cost.line().is_guess);
        assert_eq!(cost.expected_ms(2000), None);
        assert_eq!(cost.expected_ms(379), Some(true_ms(340).min(true_ms(379))));
    }

    #[test]
    fn one_slow_small_step_at_first_does_not_make_large_ones_look_cheap() {
        let mut cost = PromptCost::default();
        record(&mut cost, 64, 9.0);
        for _ in 0..3 {
            for num_tokens in [1130, 1130, 2050] {
                record(&mut cost, num_tokens, true_ms(num_tokens));
            }
        }
        record(&mut cost, 3100, true_ms(3100));
        let line = cost.line();
        assert!((line.ms_per_token - 0.02).abs() < 1e-6, "{line:?}");
        assert!((line.fixed_ms - 2.0).abs() < 1e-6, "{line:?}");
    }

    #[test]
    fn a_size_that_is_not_seen_any_more_is_forgotten() {
        let mut cost = PromptCost::default();
        record(&mut cost, 4096, 900.0);
        for _ in 0..AGE - 1 {
            record(&mut cost, 64, true_ms(64));
        }
        assert_eq!(cost.largest(), Some(4096));
        record(&mut cost, 64, true_ms(64));
        assert_eq!(cost.largest(), Some(64));
    }
}
