//! Limits and policy of the control plane, and their validation. Values are resolved in Python (`octavo.config`,
//! `octavo.worker.memory`); nothing has a default here.

use crate::errors::ConfigError;
use crate::groups::{Keep, MAX_GROUPS, blocks_for};
use crate::media::OutputBytes;
use crate::queue_load::{MAX_QUEUED_BYTES, QueueBounds};
use crate::speculation::SpeculationConfig;
use crate::step_sizes::StepSizes;

/// In which order requests are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// By arrival.
    Fcfs,
    /// By priority (lower first), then arrival.
    Priority,
}

impl Policy {
    /// The policy that `--scheduling-policy` names.
    pub fn from_name(name: &str) -> Result<Self, ConfigError> {
        match name {
            "fcfs" => Ok(Self::Fcfs),
            "priority" => Ok(Self::Priority),
            _ => Err(ConfigError(format!(
                "policy: {name:?} is neither \"fcfs\" nor \"priority\""
            ))),
        }
    }
}

/// See `CoreConfig` in `_core.pyi`.
#[derive(Clone, Debug)]
pub struct CoreConfig {
    pub block_size: u32,
    /// The null block is among them.
    pub num_blocks: u32,
    /// The model's cache groups.
    pub groups: Vec<Keep>,
    /// Of a model that takes images, if their encoder's outputs are to be kept.
    pub output_bytes: Option<OutputBytes>,
    pub max_num_seqs: u32,
    pub max_num_batched_tokens: u32,
    pub max_model_len: u32,
    pub vocab_size: u32,
    pub max_queued_requests: u64,
    pub max_queued_tokens: u64,
    pub policy: Policy,
    pub enable_prefix_caching: bool,
    /// 0 = no limit.
    pub long_prefill_token_threshold: u32,
    /// Longest wanted time of a step with decode rows; 0 = no limit, `None` = derived (`step_cost`).
    pub max_itl_ms: Option<f64>,
    /// Plans are made late, for newcomers' sake (`hold`): right where launching a step does not wait for it.
    pub plans_late: bool,
    /// What steps with prompts are padded to.
    pub step_sizes: StepSizes,
    /// Steps in flight, 1 to 4.
    pub depth: u32,
    pub max_logprobs: u32,
    /// Key of the block hashes; random, so that nobody can craft a collision.
    pub hash_seed: u64,
    /// `None`: no drafts.
    pub speculation: Option<SpeculationConfig>,
}

impl CoreConfig {
    /// Every range that the rest of the crate relies on.
    pub fn validate(&self) -> Result<(), ConfigError> {
        const LIMIT: u64 = 1 << 30;
        let num_groups = self.groups.len() as u64;
        let ranges = [
            ("groups", num_groups, 1, MAX_GROUPS as u64),
            ("block_size", u64::from(self.block_size), 1, 1 << 16),
            // The null block, and one for the first tokens in every group.
            (
                "num_blocks",
                u64::from(self.num_blocks),
                1 + num_groups,
                LIMIT,
            ),
            ("max_num_seqs", u64::from(self.max_num_seqs), 1, 1 << 16),
            (
                "max_num_batched_tokens",
                u64::from(self.max_num_batched_tokens),
                1,
                1 << 24,
            ),
            ("max_model_len", u64::from(self.max_model_len), 2, LIMIT),
            ("vocab_size", u64::from(self.vocab_size), 1, LIMIT),
            ("max_queued_requests", self.max_queued_requests, 1, u64::MAX),
            ("max_queued_tokens", self.max_queued_tokens, 1, u64::MAX),
            ("depth", u64::from(self.depth), 1, 4),
            ("max_logprobs", u64::from(self.max_logprobs), 0, 1 << 16),
        ];
        for (name, value, low, high) in ranges {
            if value < low || value > high {
                return Err(ConfigError(format!(
                    "{name}: {value} is not within {low} and {high}"
                )));
            }
        }
        if self.max_itl_ms.is_some_and(|ms| ms.is_nan() || ms < 0.0) {
            return Err(ConfigError("max_itl_ms: must be 0 or more".into()));
        }
        if self
            .output_bytes
            .is_some_and(|bytes| bytes.of_token == 0 || bytes.of_block == 0)
        {
            return Err(ConfigError("output_bytes: must be 1 or more".into()));
        }
        if self.speculation.is_some() && self.groups.iter().any(|keep| keep.is_overwritten()) {
            return Err(ConfigError(
                "speculation: the model keeps states, which rejected drafts would spoil: leave it out".into(),
            ));
        }
        self.speculation
            .map_or(Ok(()), |speculation| speculation.validate())
    }

    /// Most drafted tokens of a row.
    pub fn max_drafted(&self) -> u32 {
        self.speculation.map_or(0, |config| config.num_tokens)
    }

    pub fn queue_bounds(&self) -> QueueBounds {
        QueueBounds {
            max_requests: self.max_queued_requests,
            max_tokens: self.max_queued_tokens,
            max_bytes: MAX_QUEUED_BYTES,
        }
    }

    /// Sequences that may hold a slot: each of them can have at least one token in every step.
    pub fn max_running(&self) -> u32 {
        self.max_num_seqs.min(self.max_num_batched_tokens)
    }

    /// Positions that one sequence can have when all usable blocks are its own.
    pub fn num_positions(&self) -> u32 {
        let usable = u64::from(self.num_blocks - 1);
        let fits = |num_blocks: u32| {
            blocks_for(&self.groups, num_blocks, self.block_size, self.depth) <= usable
        };
        // Groups of windows only may hold any length.
        let (mut fit, mut over) = (0, self.num_blocks.max(self.max_blocks_per_sequence() + 1));
        while over - fit > 1 {
            let middle = fit.midpoint(over);
            if fits(middle) {
                fit = middle;
            } else {
                over = middle;
            }
        }
        fit.saturating_mul(self.block_size)
    }

    /// Most tokens (prompt and output) of one sequence. The last token needs no position: nothing attends to it.
    pub fn max_sequence_len(&self) -> u32 {
        self.max_model_len
            .min(self.num_positions().saturating_add(1))
    }

    /// Table entries that the chunks of one step may change: groups that keep all have theirs from the start.
    pub fn max_chunk_updates(&self) -> u32 {
        let growing = self.groups.iter().filter(|keep| **keep != Keep::All);
        let blocks = self.max_num_batched_tokens / self.block_size + self.max_num_seqs;
        blocks.saturating_mul(growing.count() as u32)
    }

    /// Blocks of the longest sequence in a group that keeps all.
    pub fn max_blocks_per_sequence(&self) -> u32 {
        self.max_model_len.div_ceil(self.block_size)
    }
}
