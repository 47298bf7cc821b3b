//! A whole decoder on the CPU: described once, filled with weights as they are stored, then stepped.
//!
//! A step is `forward` (rows and tokens of the runner's arena, checked, through all layers in one parallel region) and
//! `sample` (head and choice of the sampled rows). Not here: kernels (matrix, attention), who runs when (rust/core).

use std::ops::Range;

mod attend;
mod batch;
mod buffers;
mod cache;
mod description;
mod error;
mod head;
mod region;
mod rows;
mod weights;

pub use batch::{Limits, StepView};
pub use description::{Activation, Description, LayerKind, Rope};
pub use error::DecoderError;
pub use weights::{TOP, WeightsBuilder};

use attend::Attend;
use batch::{Batch, Row, Slots};
use buffers::Buffers;
use cache::{Cache, CacheShape};
use head::{Head, HeadCall};
use region::Region;
use weights::Weights;

use crate::element::CacheDtype;
use crate::pool::ThreadPool;
use crate::sampling::{SlotSampling, gather};
use crate::shared::Shared;

/// Multiply-adds that a thread must have in a step to be worth waking and waiting for.
const MACS_PER_THREAD: usize = 1 << 22;

/// Sizes of the serving around a decoder.
#[derive(Clone, Debug)]
pub struct Serving {
    pub num_slots: usize,
    pub num_blocks: usize,
    pub block_size: usize,
    /// Longest sequence.
    pub max_length: usize,
    /// Most tokens of a step.
    pub max_tokens: usize,
    pub cache_dtype: CacheDtype,
    pub num_threads: usize,
    /// Processors of the threads, as many; empty: they run where the system puts them.
    pub cpus: Vec<usize>,
}

/// A row's new token, or a prompt's given one.
#[derive(Clone, Debug, Default)]
pub struct Choice {
    pub token: i32,
    /// 1 + the number of tokens that are more probable; with logprobs alone.
    pub rank: i32,
    /// The token, then the top ones; empty without logprobs.
    pub ids: Vec<i32>,
    pub logprobs: Vec<f32>,
}

impl Choice {
    /// With logprobs of `token` and of the `num_top` most probable ones.
    fn scored(logits: &[f32], token: usize, num_top: usize) -> Self {
        let count = 1 + num_top.min(logits.len());
        let (mut ids, mut logprobs) = (vec![0; count], vec![0.0; count]);
        let rank = gather(logits, token, num_top, &mut ids, &mut logprobs);
        Self {
            token: token as i32,
            rank,
            ids,
            logprobs,
        }
    }
}

/// Allowed tokens of each slot, a bit each.
#[derive(Clone, Copy, Debug)]
pub struct Masks<'a> {
    /// `[slots, rows_per_slot, words_per_row]`: of a slot, the tokens that may follow its row's own tokens, then those
    /// that may follow each drafted one.
    pub words: &'a [i32],
    pub rows_per_slot: usize,
    pub words_per_row: usize,
}

impl Masks<'_> {
    /// Whether every row of `rows` over `vocab_size` tokens finds its masks.
    fn fit(&self, rows: &[Row], vocab_size: usize) -> bool {
        let slots = self.words.len() / (self.rows_per_slot * self.words_per_row).max(1);
        self.words_per_row >= vocab_size.div_ceil(32)
            && rows
                .iter()
                .all(|row| row.slot < slots && row.num_drafted < self.rows_per_slot)
    }

    /// What may follow the `nth` of a slot's tokens that are sampled behind.
    fn row(&self, slot: usize, nth: usize) -> &[i32] {
        let place = slot * self.rows_per_slot + nth;
        &self.words[place * self.words_per_row..][..self.words_per_row]
    }
}

pub struct Decoder {
    description: Description,
    weights: Weights,
    pool: ThreadPool,
    cache: Cache,
    slots: Slots,
    attend: Attend,
    sampling: Vec<SlotSampling>,
    batch: Batch,
    buffers: Buffers,
    head: Head,
    /// Of each sampled row: as much of its draft as is right, and the token behind it.
    choices: Vec<Vec<Choice>>,
}

impl Decoder {
    /// Errors: sizes that no decoder has, weights that are missing or of a wrong shape.
    pub fn new(
        description: Description,
        weights: WeightsBuilder,
        serving: Serving,
    ) -> Result<Self, DecoderError> {
        description.check()?;
        for (name, size) in [
            ("num_slots", serving.num_slots),
            ("num_blocks", serving.num_blocks),
            ("block_size", serving.block_size),
            ("max_length", serving.max_length),
            ("max_tokens", serving.max_tokens),
            ("num_threads", serving.num_threads),
        ] {
            if size == 0 || size >= 1 << 31 {
                return Err(DecoderError::Description(format!("{name} is {size}")));
            }
        }
        let (num_cpus, num_threads) = (serving.cpus.len(), serving.num_threads);
        if num_cpus > 0 && num_cpus != num_threads {
            let message = format!("{num_cpus} processors for {num_threads} threads");
            return Err(DecoderError::Description(message));
        }
        let weights = weights.finish(&description)?;
        let limits = Limits {
            num_slots: serving.num_slots,
            num_groups: description.num_groups(),
            max_blocks: serving.max_length.div_ceil(serving.block_size),
            num_blocks: serving.num_blocks,
            block_size: serving.block_size,
            vocab_size: description.vocab_size,
            max_tokens: serving.max_tokens,
        };
        let shape = CacheShape {
            dtype: serving.cache_dtype,
            num_blocks: serving.num_blocks,
            block_size: serving.block_size,
            num_kv_heads: description.num_kv_heads,
            head_dim: description.head_dim,
        };
        let cache = Cache::new(shape, description.lanes())?;
        let pool = if serving.cpus.is_empty() {
            ThreadPool::new(serving.num_threads)
        } else {
            ThreadPool::pinned(serving.cpus)
        };
        Ok(Self {
            buffers: Buffers::new(&description, &weights, pool.num_threads()),
            pool,
            slots: Slots::new(limits),
            attend: Attend::new(&description, serving.cache_dtype),
            sampling: vec![SlotSampling::default(); limits.num_slots],
            batch: Batch::default(),
            head: Head::default(),
            choices: Vec::new(),
            description,
            weights,
            cache,
        })
    }

    pub fn vocab_size(&self) -> usize {
        self.description.vocab_size
    }

    pub fn weight_bytes(&self) -> usize {
        self.weights.num_bytes()
    }

    /// A sequence gets a slot.
    pub fn admit(&mut self, slot: usize, sampling: SlotSampling) -> Result<(), DecoderError> {
        match self.sampling.get_mut(slot) {
            Some(place) => {
                *place = sampling;
                Ok(())
            }
            None => Err(DecoderError::Step(format!("no slot {slot}"))),
        }
    }

    /// Bring block tables and cache up to date, and run the step's tokens through the layers: the last one as far as they
    /// are needed.
    pub fn forward(&mut self, step: &StepView<'_>) -> Result<(), DecoderError> {
        self.slots.update(step.block_updates)?;
        self.cache.copy(step.block_copies)?;
        self.batch.fill(step, &self.slots)?;
        let num_tokens = self.batch.tokens.len();
        let macs = self.weights.num_layer_weights() * num_tokens;
        let num_threads = (macs / MACS_PER_THREAD).clamp(1, self.pool.num_threads());
        self.buffers
            .resize(&self.description, num_tokens, num_threads);
        let pointers = (
            self.buffers.q.as_ptr(),
            self.cache.address(),
            self.buffers.attended.as_mut_ptr(),
        );
        self.attend.prepare(
            &self.description,
            &self.cache.shape,
            (step, &self.batch),
            &self.slots,
            num_threads,
            pointers,
        )?;
        let region = Region::new(
            &self.description,
            &self.weights,
            &self.batch,
            &self.attend,
            &mut self.cache,
            &mut self.buffers,
        );
        self.pool.run_on(num_threads, &|team| region.run(team));
        Ok(())
    }

    /// Choose the token behind each of the last step's first `num_sampled` rows; in rows with drafts behind the tokens
    /// before those too, up to the first that is not the drafted one.
    pub fn sample(
        &mut self,
        num_sampled: usize,
        masks: Option<Masks<'_>>,
    ) -> Result<&[Vec<Choice>], DecoderError> {
        let rows = self.batch.rows.get(..num_sampled).ok_or_else(|| {
            DecoderError::Step(format!(
                "{num_sampled} rows of {} are sampled",
                self.batch.rows.len()
            ))
        })?;
        if masks.is_some_and(|masks| !masks.fit(rows, self.vocab_size())) {
            return Err(DecoderError::Step("masks are too small".to_owned()));
        }
        let runs: Vec<Range<usize>> = rows.iter().map(Row::sampled).collect();
        let kept = rows.iter().zip(&runs).map(|(row, run)| row.kept(run));
        let kept: Option<Vec<_>> = kept.collect();
        let kept =
            kept.ok_or_else(|| DecoderError::Step("a sampled row was not needed".to_owned()))?;
        self.choices.clear();
        self.choices.resize_with(num_sampled, Vec::new);
        let (choices, sampling) = (
            Shared::new(&mut self.choices),
            Shared::new(&mut self.sampling),
        );
        let call = HeadCall {
            description: &self.description,
            weights: &self.weights,
            pool: &self.pool,
            hidden: &self.buffers.hidden,
        };
        let (vocab, batch) = (self.description.vocab_size, &self.batch);
        self.head.visit(&call, &kept, &|index, logits| {
            let row = &rows[index];
            // SAFETY: each row is visited once, and rows of one batch have different slots.
            let (chosen, slot) = unsafe {
                (
                    &mut choices.part_mut(index..index + 1)[0],
                    &mut sampling.part_mut(row.slot..row.slot + 1)[0],
                )
            };
            let first = row.kv_len - row.num_drafted;
            for (nth, logits) in logits.chunks_exact_mut(vocab).enumerate() {
                let mask = masks.as_ref().map(|masks| masks.row(row.slot, nth));
                let choice = choose(slot, logits, (first + nth) as u32, mask);
                let token = choice.token as usize;
                chosen.push(choice);
                let drafted = batch.tokens[..runs[index].end].get(runs[index].start + nth + 1);
                if drafted.is_none_or(|drafted| drafted.id != token) {
                    break;
                }
            }
        });
        for (row, chosen) in rows.iter().zip(&self.choices) {
            if let Some(last) = chosen.last() {
                self.slots.set_newest(row.slot, last.token as u32);
            }
        }
        Ok(&self.choices)
    }

    /// Logprobs of `targets` behind the last step's tokens from `start` on, each with the `num_top` most probable ones.
    pub fn score(
        &mut self,
        start: usize,
        targets: &[u32],
        num_top: usize,
    ) -> Result<Vec<Choice>, DecoderError> {
        let count = self.batch.tokens.len();
        if start > count
            || targets.len() > count - start
            || targets.iter().any(|&id| id as usize >= self.vocab_size())
        {
            return Err(DecoderError::Step(format!(
                "{} targets from token {start} of {count}",
                targets.len()
            )));
        }
        let tokens = singles(start..start + targets.len());
        let runs: Option<Vec<_>> = tokens
            .iter()
            .map(|token| self.batch.kept_token(token))
            .collect();
        let runs =
            runs.ok_or_else(|| DecoderError::Step("a scored token was not needed".to_owned()))?;
        let mut scores = vec![Choice::default(); targets.len()];
        let shared = Shared::new(&mut scores);
        let call = HeadCall {
            description: &self.description,
            weights: &self.weights,
            pool: &self.pool,
            hidden: &self.buffers.hidden,
        };
        self.head.visit(&call, &runs, &|index, logits| {
            // SAFETY: each row is visited once.
            let score = unsafe { &mut shared.part_mut(index..index + 1)[0] };
            *score = Choice::scored(logits, targets[index] as usize, num_top);
        });
        Ok(scores)
    }

    /// Logits of the last step's needed tokens, `[tokens, vocab_size]`: for tests and comparisons.
    pub fn logits(&mut self) -> Vec<f32> {
        let (count, vocab) = (self.batch.kept.len(), self.description.vocab_size);
        let runs = singles(0..count);
        let mut all = vec![0.0; count * vocab];
        let shared = Shared::new(&mut all);
        let call = HeadCall {
            description: &self.description,
            weights: &self.weights,
            pool: &self.pool,
            hidden: &self.buffers.hidden,
        };
        self.head.visit(&call, &runs, &|index, logits| {
            // SAFETY: each row is visited once.
            unsafe { shared.part_mut(index * vocab..(index + 1) * vocab) }.copy_from_slice(logits);
        });
        all
    }
}

/// Runs of one token each.
fn singles(tokens: Range<usize>) -> Vec<Range<usize>> {
    tokens.map(|token| token..token + 1).collect()
}

/// The row's token, and its logprobs where they are asked for (of the model's own distribution).
fn choose(
    slot: &mut SlotSampling,
    logits: &mut [f32],
    position: u32,
    mask: Option<&[i32]>,
) -> Choice {
    let Some(num_top) = slot.num_logprobs() else {
        return Choice {
            token: slot.choose(logits, position, mask) as i32,
            ..Choice::default()
        };
    };
    let own = logits.to_vec();
    let token = slot.choose(logits, position, mask);
    Choice::scored(&own, token, num_top)
}
