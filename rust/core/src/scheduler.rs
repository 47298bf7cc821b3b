//! Plans a step: which sequences get how many tokens.
//!
//! There are no phases. Every running sequence has `num_remaining` tokens to catch up with; those with one (decodes)
//! go first, then longer ones and newcomers in chunks under the token budget (`prompts`). When a decode needs a
//! block and none is free, the running sequence whose turn is last gives its blocks up and is computed again later.
//! A sequence with rows in flight can't be preempted: it is withheld from this plan instead, so that it can be in the
//! next one; the first in order therefore gets its block within `depth` steps. Turns never change, so nobody starves.

use std::sync::Arc;
use std::time::Instant;

use crate::arena::{ArenaWriter, LAST_TOKEN};
use crate::groups::Keep;
use crate::holding::Holding;
use crate::ids::{BlockHash, RequestIdx, SeqIdx, TokenId};
use crate::media::{PlacedOutputs, least_len, uncut_len, within};
use crate::plan::{InFlight, NewRow, PromptLogprobRow, Row, StepPlan};
use crate::shared::{Reader, SharedBlocks, shared_blocks};
use crate::state::EngineState;
use crate::step_cost::StepShape;

/// A newcomer waits for the next step if it finds so many more tokens of its prompt in the cache then.
pub const AWAITED_TOKENS: u32 = 256;

/// What some rows ask for.
#[derive(Default)]
struct Needs {
    logprobs: bool,
    prompt_logprobs: bool,
    masks: bool,
}

/// A plan in the making.
pub struct Planner<'a> {
    pub state: &'a mut EngineState,
    pub writer: ArenaWriter<'a>,
    pub step_id: u64,
    pub now: Instant,
    /// Tokens left.
    pub budget: u32,
    /// Tokens that the arena still holds: what an image that can't be cut may take beyond the budget.
    room: u32,
    /// Newcomers are admitted.
    pub is_open: bool,
    pub new_rows: Vec<NewRow>,
    /// Rows of one sampled token, longer sampled rows, rows that are not sampled.
    pub decodes: Vec<Row>,
    /// Decode rows with drafts, and the drafts of all of them.
    pub drafted: Vec<Row>,
    pub drafts: Vec<TokenId>,
    sampled: Vec<Row>,
    partial: Vec<Row>,
    needs: Needs,
    /// Requests whose first sequence computes the end of the prompt in this step.
    led: Vec<RequestIdx>,
    /// Of rows with many tokens, how far `admission` looks into what they compute.
    pub fresh: Vec<Fresh>,
}

/// A prefix that this step computes, up to a block some way into a row's tokens.
pub struct Fresh {
    pub block: usize,
    pub hash: BlockHash,
}

/// What a decode that needs a block gets.
enum Growth {
    Grown,
    /// It sits this plan out (it may have been preempted itself).
    Skipped,
}

/// The tail of the running list while blocks are short.
struct Tail {
    /// Running sequences from here on have been withheld.
    end: usize,
    /// Blocks that the withheld ones will give up, less what is meant for skipped decodes.
    promised: usize,
    is_short: bool,
}

impl<'a> Planner<'a> {
    pub fn new(
        state: &'a mut EngineState,
        arena: &'a mut [i32],
        step_id: u64,
        now: Instant,
    ) -> Self {
        let writer = ArenaWriter::new(arena, state.arena_layout);
        Self {
            writer,
            step_id,
            now,
            budget: state.config.max_num_batched_tokens,
            room: state.config.max_num_batched_tokens,
            is_open: true,
            new_rows: Vec::new(),
            decodes: Vec::with_capacity(state.running.len()),
            drafted: Vec::new(),
            drafts: Vec::new(),
            sampled: Vec::new(),
            partial: Vec::new(),
            needs: Needs::default(),
            led: Vec::new(),
            fresh: Vec::new(),
            state,
        }
    }

    /// Plans the step and puts it in flight, unless it has no rows.
    pub fn run(mut self) -> StepPlan {
        let end = self.make_room();
        let prefills = self.schedule_decodes(end);
        self.schedule_prompts(prefills);
        self.schedule_drafts();
        for request in std::mem::take(&mut self.led) {
            self.state.queue_parked(request);
        }
        self.finish()
    }

    /// One token for everybody of the first `end` running sequences who needs just one; returns the others. When
    /// blocks are short, nobody is admitted.
    fn schedule_decodes(&mut self, end: usize) -> Vec<SeqIdx> {
        let mut prefills = Vec::new();
        let mut tail = Tail {
            end,
            promised: 0,
            is_short: false,
        };
        let mut at = 0;
        while at < tail.end {
            let seq = self.state.running[at];
            at += 1;
            let num_remaining = self.state.table.seq(seq).num_remaining();
            if num_remaining == 0 {
                continue;
            }
            let end = self.least_end(seq);
            let sequence = self.state.table.seq_mut(seq);
            // A prompt's window moves on when its rows in flight are done: no need to push anybody out for it now.
            let is_full = end > sequence.running_mut().capacity;
            let must_grow = is_full && (num_remaining == 1 || sequence.in_flight == 0);
            if must_grow && matches!(self.grow(at - 1, end, &mut tail), Growth::Skipped) {
                continue;
            }
            if num_remaining == 1 {
                self.push_row(seq, 1);
            } else {
                prefills.push(seq);
            }
        }
        self.is_open = !tail.is_short;
        prefills
    }

    /// Rows of one sampled token so far.
    pub fn num_decodes(&self) -> u32 {
        self.decodes.len() as u32
    }

    /// Rows of more than one known token, so far.
    pub fn has_prompts(&self) -> bool {
        !(self.sampled.is_empty() && self.partial.is_empty())
    }

    /// Where the shortest row of a sequence that could run next would end.
    fn least_end(&self, seq: SeqIdx) -> u32 {
        let sequence = self.state.table.seq(seq);
        let media = &self.state.table.request(sequence.request).media;
        sequence.num_computed + least_len(media, sequence.num_computed)
    }

    /// Blocks up to `end` in every group that needs them, for the running sequence at `at`: one more, but for images.
    fn grow(&mut self, at: usize, end: u32, tail: &mut Tail) -> Growth {
        let seq = self.state.running[at];
        self.state.cut(seq);
        loop {
            let num_lacking = self.num_lacking(seq, end);
            if self.state.cache.num_free() >= num_lacking {
                self.extend(seq, end);
                return Growth::Grown;
            }
            tail.is_short = true;
            let num_lacking = num_lacking as usize;
            if tail.promised > 0 {
                tail.promised = tail.promised.saturating_sub(num_lacking);
                return Growth::Skipped;
            }
            let state = &mut *self.state;
            let victim = state.running[tail.end - 1];
            tail.end -= 1;
            let sequence = state.table.seq(victim);
            if sequence.in_flight == 0 {
                state.preempt(victim);
                state.running.remove(tail.end);
            } else {
                let promised = sequence.holding().map_or(0, Holding::num_held);
                tail.promised += promised.saturating_sub(num_lacking);
            }
            if victim == seq || state.table.seq(victim).is_running() {
                return Growth::Skipped;
            }
            debug_assert!(tail.end > at);
        }
    }

    /// As much of a sequence as budget and threshold allow, at most `most` tokens.
    pub fn schedule_chunk(&mut self, seq: SeqIdx, most: u32) {
        let threshold = match self.state.config.long_prefill_token_threshold {
            0 => u32::MAX,
            _ if self.decodes.is_empty() => u32::MAX,
            threshold => threshold,
        };
        let len = self.state.table.seq(seq).num_remaining();
        let len = len.min(self.budget).min(threshold).min(most);
        let wanted = self.uncut(seq, len, self.room);
        let fit = self.make_way(seq, wanted);
        let len = self.uncut(seq, fit, fit);
        if len > 0 {
            self.push_row(seq, len);
        }
    }

    /// How many of the next `len` positions a row may cover that cuts no image, up to `most`; see `uncut_len`.
    fn uncut(&self, seq: SeqIdx, len: u32, most: u32) -> u32 {
        let sequence = self.state.table.seq(seq);
        let media = &self.state.table.request(sequence.request).media;
        uncut_len(media, sequence.num_computed, len, most)
    }

    /// Adds a row of the next `len` positions.
    fn push_row(&mut self, seq: SeqIdx, len: u32) {
        let sequence = self.state.table.seq_mut(seq);
        let start = sequence.num_computed;
        let end = start + len;
        let known = sequence.num_known();
        let is_sampled = end == known + sequence.num_pending;
        let row = Row {
            seq,
            slot: sequence.running_mut().slot,
            start,
            len,
            token: if start < known {
                sequence.token(start) as i32
            } else {
                LAST_TOKEN
            },
            num_drafted: 0,
        };
        let first_block = start / self.state.config.block_size;
        let block = first_block + AWAITED_TOKENS.div_ceil(self.state.config.block_size) - 1;
        if (block + 1) * self.state.config.block_size <= end
            && let Some(hash) = sequence.hashes.get(block as usize)
        {
            self.fresh.push(Fresh {
                block: block as usize,
                hash: *hash,
            });
        }
        sequence.num_computed = end;
        sequence.in_flight += 1;
        sequence.last_step = self.step_id;
        sequence.last_start = start;
        self.needs.prompt_logprobs |= sequence.prompt_logprobs.is_some();
        if sequence.leads && end >= sequence.num_prompt_tokens() {
            sequence.leads = false;
            self.led.push(sequence.request);
        }
        self.budget = self.budget.saturating_sub(len);
        self.room -= len;
        if is_sampled {
            sequence.num_pending += 1;
            self.needs.logprobs |= sequence.limits.logprobs >= 0;
            self.needs.masks |= sequence.guide.is_some();
        }
        match (is_sampled, len) {
            (true, 1) => self.decodes.push(row),
            (true, _) => self.sampled.push(row),
            (false, _) => self.partial.push(row),
        }
    }

    /// Writes the rows in the arena's order.
    fn finish(mut self) -> StepPlan {
        let num_decodes = self.decodes.len();
        let num_drafted = self.drafted.len();
        let num_sampled = (num_decodes + num_drafted + self.sampled.len()) as u32;
        let mut rows = self.decodes;
        rows.append(&mut self.drafted);
        rows.append(&mut self.sampled);
        rows.append(&mut self.partial);
        self.writer.totals.num_decode_rows = num_decodes as u32;
        self.writer.totals.num_sampled = num_sampled;
        for row in &rows[..num_decodes] {
            self.writer.decode_row(row.slot, row.start, row.token);
        }
        let mut drafts = self.drafts.as_slice();
        for row in &rows[num_decodes..][..num_drafted] {
            let draft;
            (draft, drafts) = drafts.split_at(row.num_drafted as usize);
            self.writer
                .drafted_row(row.slot, row.start, row.token, draft);
        }
        for row in &rows[num_decodes + num_drafted..] {
            self.state.publish(row.seq);
        }
        if num_decodes == rows.len() {
            self.writer.totals.shared = shared_by(self.state, &rows);
        }
        let mut prompt_logprob_rows = Vec::new();
        for (index, row) in rows.iter().enumerate().skip(num_decodes + num_drafted) {
            if self.needs.prompt_logprobs {
                let token_start = self.writer.totals.num_tokens;
                let wanted = prompt_logprob_row(self.state, row, index as u32, token_start);
                prompt_logprob_rows.extend(wanted);
            }
            let sequence = self.state.table.seq(row.seq);
            let token_ids = sequence.known_tokens().skip(row.start as usize);
            self.writer
                .row(row.slot, row.start, token_ids.take(row.len as usize));
        }
        let plan = StepPlan {
            step_id: self.step_id,
            arena: 0,
            totals: self.writer.finish(self.step_id),
            needs_logprobs: self.needs.logprobs,
            new_rows: self.new_rows,
            prompt_logprob_rows,
            outputs: place_outputs(self.state, &rows),
            has_calls: false,
            needs_masks: self.needs.masks,
        };
        if !rows.is_empty() {
            let num_decode_rows = (num_decodes + num_drafted) as u32;
            let num_drafted = plan.totals.num_draft_tokens;
            let num_tokens = plan.totals.num_tokens;
            let num_padded = if rows.len() == num_decodes {
                num_tokens
            } else {
                self.state.config.step_sizes.padded(num_tokens)
            };
            self.state.in_flight.push_back(InFlight {
                step_id: self.step_id,
                rows,
                drafts: self.drafts,
                num_sampled,
                needs_masks: self.needs.masks,
                planned: self.now,
                shape: StepShape {
                    num_decode_rows,
                    num_prompt_tokens: num_padded - num_decode_rows - num_drafted,
                    num_drafted,
                },
            });
        }
        plan
    }
}

/// Blocks for what an encoder makes of the images that rows reach. Nobody holds them after the plan: steps run one after
/// the other, so that what a later plan does with them comes later.
fn place_outputs(state: &mut EngineState, rows: &[Row]) -> Vec<PlacedOutputs> {
    let Some(bytes) = state.config.output_bytes else {
        return Vec::new();
    };
    let mut placed: Vec<PlacedOutputs> = Vec::new();
    for row in rows {
        let media = Arc::clone(&state.table.request(state.table.seq(row.seq).request).media);
        for span in within(&media, row.start, row.start + row.len) {
            if placed.iter().any(|outputs| outputs.digest == span.digest) {
                continue;
            }
            let count = bytes.num_blocks(span);
            if let Some((blocks, is_filled)) = state.cache.hold_outputs(span, count) {
                placed.push(PlacedOutputs {
                    digest: span.digest,
                    blocks,
                    is_filled,
                });
            }
        }
    }
    for outputs in &placed {
        state.cache.release(&outputs.blocks);
    }
    placed
}

/// The blocks of the first cache group that decode rows begin with together.
fn shared_by(state: &EngineState, rows: &[Row]) -> SharedBlocks {
    if state.config.groups[0] != Keep::All {
        return SharedBlocks::default();
    }
    let table = &state.table;
    let readers = rows.iter().map(|row| Reader {
        slot: row.slot,
        blocks: table
            .seq(row.seq)
            .holding()
            .map_or(&[][..], |holding| &holding.tables[0].blocks),
        position: row.start,
    });
    shared_blocks(readers, state.config.block_size)
}

/// What a row tells of its prompt's logprobs, if somebody wants them.
fn prompt_logprob_row(
    state: &EngineState,
    row: &Row,
    index: u32,
    token_start: u32,
) -> Option<PromptLogprobRow> {
    let sequence = state.table.seq(row.seq);
    sequence.prompt_logprobs.as_ref()?;
    let first = row.start as usize + 1;
    let last = ((row.start + row.len) as usize + 1).min(sequence.prompt.len());
    let num_top = state.table.request(sequence.request).prompt_logprobs;
    (first < last).then(|| PromptLogprobRow {
        row: index,
        slot: row.slot,
        token_start,
        num_top: num_top.max(0) as u32,
        target_ids: sequence.prompt[first..last].to_vec(),
    })
}
