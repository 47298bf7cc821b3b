//! What one sequence asks of its sampling, and the state that follows its tokens. The features and their order are those
//! of `octavo.sampling.sampler`.

use std::collections::{HashMap, HashSet};

use super::uniform::Stream;
use super::weights::{argmax, draw, greatest, nucleus_threshold};

/// Logit of a token that a feature forbids: finite, so that when everything is forbidden something allowed is chosen.
const MASKED: f32 = -1e30;
/// Below it a distribution is a single token: greedy.
const MIN_TEMPERATURE: f32 = 1e-5;
/// What +inf counts as.
const LARGEST: f32 = 1e30;

/// Parameters of a sequence; the defaults change nothing and are greedy.
#[derive(Clone, Debug)]
pub struct Params {
    pub temperature: f32,
    /// 0: no limit.
    pub top_k: usize,
    pub top_p: f64,
    pub min_p: f64,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    pub repetition_penalty: f32,
    pub seed: i64,
    pub index: u32,
    /// Top logprobs wanted; None: not even the token's own.
    pub num_logprobs: Option<usize>,
    pub bias: Vec<(u32, f32)>,
    /// None: every token.
    pub allowed: Option<Vec<u32>>,
    pub bad_words: Vec<Vec<u32>>,
    /// Masked before position `stops_from`.
    pub stops: Vec<u32>,
    pub stops_from: u32,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
            index: 0,
            num_logprobs: None,
            bias: Vec::new(),
            allowed: None,
            bad_words: Vec::new(),
            stops: Vec::new(),
            stops_from: 0,
        }
    }
}

/// A sequence's parameters and tokens.
#[derive(Clone, Debug, Default)]
pub struct SlotSampling {
    params: Params,
    /// Of prompt and output; kept where bad words are asked for.
    tokens: Vec<u32>,
    /// Kept where penalties are asked for.
    prompt: HashSet<u32>,
    counts: HashMap<u32, u32>,
}

impl SlotSampling {
    /// A sequence with the tokens it has. Ids that are not below `vocab_size` can't come up and are forgotten.
    pub fn new(mut params: Params, prompt: &[u32], output: &[u32], vocab_size: usize) -> Self {
        let known = |id: &u32| (*id as usize) < vocab_size;
        params.bias.retain(|(id, _)| known(id));
        params.stops.retain(known);
        params
            .bad_words
            .retain(|word| !word.is_empty() && word.iter().all(known));
        if let Some(allowed) = &mut params.allowed {
            allowed.retain(known);
        }
        let mut slot = Self {
            params,
            ..Self::default()
        };
        if slot.has_bad_words() {
            slot.tokens = [prompt, output].concat();
        }
        if slot.has_penalties() {
            slot.prompt = prompt.iter().copied().collect();
            for &token in output {
                *slot.counts.entry(token).or_default() += 1;
            }
        }
        slot
    }

    pub fn num_logprobs(&self) -> Option<usize> {
        self.params.num_logprobs
    }

    fn has_bad_words(&self) -> bool {
        !self.params.bad_words.is_empty()
    }

    fn has_penalties(&self) -> bool {
        let params = &self.params;
        params.presence_penalty != 0.0
            || params.frequency_penalty != 0.0
            || (params.repetition_penalty - 1.0).abs() > 0.0
    }

    fn is_random(&self) -> bool {
        self.params.temperature >= MIN_TEMPERATURE
    }

    /// The token at `position` by its (clean) logits, which are used up; `mask` has a bit for each token that a grammar
    /// allows.
    pub fn choose(&mut self, logits: &mut [f32], position: u32, mask: Option<&[i32]>) -> usize {
        self.restrict(logits, mask);
        self.mask_words(logits, position);
        self.adjust(logits, position);
        let token = self.pick(logits, position);
        if self.has_bad_words() {
            self.tokens.truncate(position as usize);
            self.tokens.push(token as u32);
        }
        if self.has_penalties() {
            *self.counts.entry(token as u32).or_default() += 1;
        }
        token
    }

    /// Tokens that may not come get -inf. What may gets at least `MASKED`, so that it beats the others even when the
    /// model itself gave -inf. The request's own list has the last word: where it and the grammar have no token in
    /// common, one of the list comes, and the grammar ends the sequence.
    fn restrict(&self, logits: &mut [f32], mask: Option<&[i32]>) {
        for (chunk, &word) in logits.chunks_mut(32).zip(mask.unwrap_or_default()) {
            for (bit, x) in chunk.iter_mut().enumerate() {
                *x = if word >> bit & 1 == 1 {
                    x.max(MASKED)
                } else {
                    f32::NEG_INFINITY
                };
            }
        }
        let Some(allowed) = &self.params.allowed else {
            return;
        };
        let kept: Vec<(usize, f32)> = allowed
            .iter()
            .map(|&id| (id as usize, logits[id as usize].max(MASKED)))
            .collect();
        logits.fill(f32::NEG_INFINITY);
        for (id, x) in kept {
            logits[id] = x;
        }
    }

    /// The last token of a bad word whose others are there.
    fn mask_words(&self, logits: &mut [f32], position: u32) {
        let known = &self.tokens[..self.tokens.len().min(position as usize)];
        for word in &self.params.bad_words {
            if let [first @ .., last] = word.as_slice()
                && known.ends_with(first)
            {
                logits[*last as usize] += MASKED;
            }
        }
    }

    /// Minimum length, bias and penalties.
    fn adjust(&self, logits: &mut [f32], position: u32) {
        let params = &self.params;
        if position < params.stops_from {
            for &id in &params.stops {
                logits[id as usize] += MASKED;
            }
        }
        for &(id, bias) in &params.bias {
            logits[id as usize] += bias;
        }
        if !self.has_penalties() {
            return;
        }
        let only_prompt = self
            .prompt
            .iter()
            .filter(|id| !self.counts.contains_key(id));
        for &id in self.counts.keys().chain(only_prompt) {
            let Some(x) = logits.get_mut(id as usize) else {
                continue;
            };
            *x = if *x > 0.0 {
                *x / params.repetition_penalty
            } else {
                *x * params.repetition_penalty
            };
        }
        for (&id, &count) in &self.counts {
            if let Some(x) = logits.get_mut(id as usize) {
                *x -= params.frequency_penalty * count as f32;
                *x -= params.presence_penalty;
            }
        }
    }

    fn pick(&self, logits: &mut [f32], position: u32) -> usize {
        if !self.is_random() {
            return argmax(logits);
        }
        let params = &self.params;
        if (params.temperature - 1.0).abs() > 0.0 {
            for x in logits.iter_mut() {
                *x /= params.temperature;
            }
        }
        if params.top_k > 0 || params.top_p < 1.0 {
            cut(
                logits,
                nucleus_threshold(logits, params.top_k, params.top_p),
            );
        }
        if params.min_p > 0.0 {
            cut(logits, greatest(logits) + params.min_p.ln() as f32);
        }
        draw(
            logits,
            Stream {
                seed: params.seed,
                index: params.index,
                position,
            },
        )
    }
}

/// Values below a threshold become -inf.
fn cut(logits: &mut [f32], threshold: f32) {
    for x in logits.iter_mut() {
        if *x < threshold {
            *x = f32::NEG_INFINITY;
        }
    }
}

/// NaN becomes -inf, +inf a large number.
pub fn clean(logits: &mut [f32]) {
    for x in logits.iter_mut() {
        *x = if x.is_nan() {
            f32::NEG_INFINITY
        } else if *x == f32::INFINITY {
            LARGEST
        } else {
            *x
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choose(params: Params, prompt: &[u32], output: &[u32], logits: &[f32]) -> usize {
        let mut slot = SlotSampling::new(params, prompt, output, logits.len());
        slot.choose(
            &mut logits.to_vec(),
            (prompt.len() + output.len()) as u32,
            None,
        )
    }

    #[test]
    fn features_move_the_choice() {
        let logits = [1.0, 4.0, 3.0, 2.0];
        let with = |change: fn(&mut Params)| {
            let mut params = Params::default();
            change(&mut params);
            choose(params, &[0, 1], &[1, 1], &logits)
        };
        assert_eq!(with(|_| ()), 1);
        assert_eq!(with(|p| p.allowed = Some(vec![3, 0])), 3);
        assert_eq!(with(|p| p.bad_words = vec![vec![1]]), 2);
        assert_eq!(with(|p| p.bad_words = vec![vec![0, 1, 1, 1, 1]]), 2);
        assert_eq!(with(|p| p.bad_words = vec![vec![2, 1, 1]]), 1);
        assert_eq!(with(|p| p.bias = vec![(0, 3.5), (9, 1.0)]), 0);
        assert_eq!(with(|p| p.frequency_penalty = 0.6), 2);
        assert_eq!(with(|p| p.presence_penalty = 0.9), 1);
        assert_eq!(with(|p| p.presence_penalty = 1.1), 2);
        assert_eq!(with(|p| p.repetition_penalty = 1.5), 2);
        assert_eq!(with(|p| (p.stops, p.stops_from) = (vec![1], 5)), 2);
        assert_eq!(with(|p| (p.stops, p.stops_from) = (vec![1], 4)), 1);
    }

    #[test]
    fn a_grammar_allows_what_its_bits_say() {
        let mut slot = SlotSampling::new(Params::default(), &[], &[], 40);
        let mut logits = vec![f32::NEG_INFINITY; 40];
        logits[0] = 1.0;
        assert_eq!(slot.choose(&mut logits, 0, Some(&[0, 1 << 3])), 35);
    }

    #[test]
    fn logits_that_are_no_numbers_are_not_chosen() {
        let mut logits = [f32::NAN, 1.0, f32::INFINITY, f32::NEG_INFINITY];
        clean(&mut logits);
        let expected = [f32::NEG_INFINITY, 1.0, 1e30, f32::NEG_INFINITY];
        assert_eq!(logits.map(f32::to_bits), expected.map(f32::to_bits));
    }
}
