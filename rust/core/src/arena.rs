//! Where everything lies in the int32 buffers that the engine shares with the runner, and the writer of the step arena.
//!
//! One arena = one host-to-device copy. Offsets are fixed for the life of the engine; regions start on 64-byte borders.
//! Row order: decode rows (one token, sampled), then longer rows whose last token is sampled, then rows that are not
//! sampled; so the sampled rows are exactly `[0, num_sampled)`. A sampled row with drafts is sampled behind each of them
//! too, as far as they prove right.

use crate::config::CoreConfig;

use crate::errors::ConfigError;
use crate::ids::{BlockId, SlotId, TokenId};
use crate::shared::SharedBlocks;

/// Ints of the header: step id (low 31 bits), rows, decode rows, sampled rows, tokens, block updates, block copies,
/// new rows, longest query, longest KV, drafted tokens, shared blocks (a slot that has them, how many); the rest is 0.
pub const HEADER_LEN: u32 = 16;
/// Token id that stands for "the last token that was sampled in this slot".
pub const LAST_TOKEN: i32 = -1;

const ALIGN: u32 = 16;
/// Block updates that admissions may use in one step beyond what one longest sequence needs.
const MAX_ADMISSION_UPDATES: u32 = 4096;

/// Hands out aligned regions one after the other.
struct Regions {
    end: u64,
}

impl Regions {
    fn take(&mut self, len: impl Into<u64>) -> u32 {
        let start = self.end;
        self.end += len.into().next_multiple_of(u64::from(ALIGN));
        start as u32
    }

    fn finish(self) -> Result<u32, ConfigError> {
        if self.end > 1 << 30 {
            return Err(ConfigError(format!(
                "max_num_seqs and max_num_batched_tokens need an arena of {} ints, more than 2^30",
                self.end
            )));
        }
        Ok(self.end as u32)
    }
}

/// Fixed offsets (in ints) of the step arena's regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaLayout {
    pub num_ints: u32,
    pub max_rows: u32,
    pub max_tokens: u32,
    pub max_block_updates: u32,
    pub max_block_copies: u32,
    pub max_new_rows: u32,
    pub num_groups: u32,
    pub header: u32,
    pub row_slot: u32,
    pub query_start: u32,
    pub kv_len: u32,
    pub new_row: u32,
    pub block_copy: u32,
    pub block_update: u32,
    pub token_id: u32,
    pub position: u32,
    /// Drafted tokens at the end of each row.
    pub num_drafted: u32,
}

impl ArenaLayout {
    /// Every running row may get one block a group in a step and those of its draft, chunks get theirs, and one
    /// admission of the longest sequence always fits beside them.
    pub fn new(config: &CoreConfig) -> Result<Self, ConfigError> {
        let (rows, tokens) = (config.max_num_seqs, config.max_num_batched_tokens);
        let longest = config.max_blocks_per_sequence();
        let admissions = longest
            .saturating_mul(8)
            .min(MAX_ADMISSION_UPDATES)
            .max(longest);
        let grown = 1 + config.max_drafted().div_ceil(config.block_size);
        let num_groups = config.groups.len() as u32;
        let updates = rows
            .saturating_mul(grown)
            .saturating_add(admissions)
            .saturating_mul(num_groups)
            .saturating_add(config.max_chunk_updates());
        if updates > 1 << 28 {
            return Err(ConfigError(format!(
                "max_model_len {} needs more than 2^28 blocks of {}",
                config.max_model_len, config.block_size
            )));
        }
        let mut regions = Regions { end: 0 };
        let mut layout = Self {
            num_ints: 0,
            max_rows: rows,
            max_tokens: tokens,
            max_block_updates: updates,
            max_block_copies: rows * num_groups,
            max_new_rows: rows,
            num_groups,
            header: regions.take(HEADER_LEN),
            row_slot: regions.take(rows),
            query_start: regions.take(rows + 1),
            kv_len: regions.take(rows),
            new_row: regions.take(2 * rows),
            block_copy: regions.take(2 * rows * num_groups),
            block_update: regions.take(3 * updates),
            token_id: regions.take(tokens),
            position: regions.take(tokens),
            num_drafted: regions.take(rows),
        };
        layout.num_ints = regions.finish()?;
        Ok(layout)
    }
}

/// Fixed offsets (in ints) of the output arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputLayout {
    pub num_ints: u32,
    pub max_rows: u32,
    /// Most tokens that one row may gain in a step.
    pub max_sampled: u32,
    pub max_logprobs: u32,
    pub sampled: u32,
    pub count: u32,
    pub rank: u32,
    pub logprob_id: u32,
    pub logprob_value: u32,
}

impl OutputLayout {
    pub fn new(config: &CoreConfig) -> Result<Self, ConfigError> {
        let (rows, sampled) = (config.max_num_seqs, 1 + config.max_drafted());
        let entries = u64::from(rows * sampled) * u64::from(1 + config.max_logprobs);
        let mut regions = Regions { end: 0 };
        let mut layout = Self {
            num_ints: 0,
            max_rows: rows,
            max_sampled: sampled,
            max_logprobs: config.max_logprobs,
            sampled: regions.take(rows * sampled),
            count: regions.take(rows),
            rank: regions.take(rows * sampled),
            logprob_id: regions.take(entries),
            logprob_value: regions.take(entries),
        };
        layout.num_ints = regions.finish()?;
        Ok(layout)
    }
}

/// Totals of a written arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub num_rows: u32,
    pub num_decode_rows: u32,
    pub num_sampled: u32,
    pub num_tokens: u32,
    pub num_block_updates: u32,
    pub num_block_copies: u32,
    pub num_new_rows: u32,
    pub max_query_len: u32,
    pub max_kv_len: u32,
    pub num_draft_tokens: u32,
    /// What the rows of a step of decode rows only begin with together.
    pub shared: SharedBlocks,
}

/// Fills one arena. Block updates, copies and new rows come in any order; rows in the order above, each followed by
/// its tokens.
pub struct ArenaWriter<'a> {
    ints: &'a mut [i32],
    layout: ArenaLayout,
    pub totals: Totals,
}

impl<'a> ArenaWriter<'a> {
    /// `ints` must hold exactly `layout.num_ints`.
    pub fn new(ints: &'a mut [i32], layout: ArenaLayout) -> Self {
        assert_eq!(
            ints.len(),
            layout.num_ints as usize,
            "arena of the wrong size"
        );
        ints[layout.query_start as usize] = 0;
        Self {
            ints,
            layout,
            totals: Totals::default(),
        }
    }

    pub fn block_updates_left(&self) -> u32 {
        self.layout.max_block_updates - self.totals.num_block_updates
    }

    /// Entry `index` of the slot's block table in a group becomes `block`. The device has the tables of all groups in
    /// one, a group after the other, with the null slot's at the end of each.
    pub fn block_update(&mut self, group: usize, slot: SlotId, index: u32, block: BlockId) {
        assert!(self.block_updates_left() > 0, "no room for block updates");
        let at = (self.layout.block_update + 3 * self.totals.num_block_updates) as usize;
        let row = group as u32 * (self.layout.max_rows + 1) + slot.0;
        self.ints[at..at + 3].copy_from_slice(&[row as i32, index as i32, block.0 as i32]);
        self.totals.num_block_updates += 1;
    }

    /// Before the step runs, the KV of `source` is copied to `target`.
    pub fn block_copy(&mut self, source: BlockId, target: BlockId) {
        assert!(
            self.totals.num_block_copies < self.layout.max_block_copies,
            "no room for block copies"
        );
        let at = (self.layout.block_copy + 2 * self.totals.num_block_copies) as usize;
        self.ints[at..at + 2].copy_from_slice(&[source.0 as i32, target.0 as i32]);
        self.totals.num_block_copies += 1;
    }

    /// A sequence moves into a slot.
    pub fn new_row(&mut self, slot: SlotId, num_prompt_tokens: u32) {
        assert!(
            self.totals.num_new_rows < self.layout.max_new_rows,
            "no room for new rows"
        );
        let at = (self.layout.new_row + 2 * self.totals.num_new_rows) as usize;
        self.ints[at..at + 2].copy_from_slice(&[slot.0 as i32, num_prompt_tokens as i32]);
        self.totals.num_new_rows += 1;
    }

    /// One row of tokens at positions `start ..`.
    pub fn row(&mut self, slot: SlotId, start: u32, token_ids: impl Iterator<Item = TokenId>) {
        let token_at = self.layout.token_id as usize;
        let first = self.totals.num_tokens as usize;
        let max = self.layout.max_tokens as usize;
        let mut end = first;
        for token_id in token_ids {
            assert!(end < max, "no room for tokens");
            self.ints[token_at + end] = token_id as i32;
            end += 1;
        }
        let position_at = self.layout.position as usize;
        for (position, at) in
            (start as i32..).zip(&mut self.ints[position_at + first..position_at + end])
        {
            *at = position;
        }
        self.finish_row(slot, start, (end - first) as u32);
    }

    /// A decode row and the draft behind its token.
    pub fn drafted_row(&mut self, slot: SlotId, start: u32, token_id: i32, draft: &[TokenId]) {
        let row = self.totals.num_rows;
        let drafted = draft.iter().copied();
        self.row(
            slot,
            start,
            [token_id.cast_unsigned()].into_iter().chain(drafted),
        );
        self.ints[(self.layout.num_drafted + row) as usize] = draft.len() as i32;
        self.totals.num_draft_tokens += draft.len() as u32;
    }

    /// One row of one token.
    pub fn decode_row(&mut self, slot: SlotId, position: u32, token_id: i32) {
        let at = self.totals.num_tokens;
        assert!(at < self.layout.max_tokens, "no room for tokens");
        self.ints[(self.layout.token_id + at) as usize] = token_id;
        self.ints[(self.layout.position + at) as usize] = position as i32;
        self.finish_row(slot, position, 1);
    }

    fn finish_row(&mut self, slot: SlotId, start: u32, len: u32) {
        let totals = &mut self.totals;
        let row = totals.num_rows;
        assert!(row < self.layout.max_rows, "no room for rows");
        let kv_len = start + len;
        totals.num_rows += 1;
        totals.num_tokens += len;
        totals.max_query_len = totals.max_query_len.max(len);
        totals.max_kv_len = totals.max_kv_len.max(kv_len);
        self.ints[(self.layout.row_slot + row) as usize] = slot.0 as i32;
        self.ints[(self.layout.kv_len + row) as usize] = kv_len as i32;
        self.ints[(self.layout.num_drafted + row) as usize] = 0;
        self.ints[(self.layout.query_start + row + 1) as usize] = totals.num_tokens as i32;
    }

    /// Writes the header.
    pub fn finish(self, step_id: u64) -> Totals {
        let t = self.totals;
        let values = [
            (step_id & 0x7fff_ffff) as u32,
            t.num_rows,
            t.num_decode_rows,
            t.num_sampled,
            t.num_tokens,
            t.num_block_updates,
            t.num_block_copies,
            t.num_new_rows,
            t.max_query_len,
            t.max_kv_len,
            t.num_draft_tokens,
            t.shared.slot,
            t.shared.num_blocks,
        ];
        let header = &mut self.ints[self.layout.header as usize..][..HEADER_LEN as usize];
        header.fill(0);
        for (at, value) in header.iter_mut().zip(values) {
            *at = value as i32;
        }
        t
    }
}
