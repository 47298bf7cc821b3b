//! Gives slots and blocks to waiting sequences; `prompts` says to whom and when.
//!
//! A sequence gets blocks for all its known tokens at once (in groups that keep a window: as many as it will ever need
//! to go on): what has started is never stopped by its own prompt. Before, it looks for KV that exists: blocks of an
//! equal prefix in the cache, or a sibling of the same request that has computed their prompt. One whose prompt is being
//! computed by another in the same step waits for the next. A sibling's full blocks are shared; the block that holds the
//! last prompt token's predecessors is copied, and that token runs again to give this sequence its own first sample.

use std::sync::Arc;

use crate::grammar::guide::Guide;
use crate::groups::Keep;
use crate::holding::{BlockTable, Holding};
use crate::ids::{BlockId, SeqIdx, SlotId};
use crate::plan::NewRow;
use crate::prefix::PromptKeys;
use crate::queue::QueueKey;
use crate::request::Constraint;
use crate::scheduler::{AWAITED_TOKENS, Planner};
use crate::sequence::{Sequence, State};

/// Existing KV that a sequence may start from; the blocks are not referenced yet.
#[derive(Debug)]
struct Reuse {
    /// One a group.
    tables: Vec<BlockTable>,
    /// To be copied into the block after the tables', one a group or none.
    copies: Vec<BlockId>,
    num_tokens: u32,
    /// Blocks known to be in the prefix index. A sibling's may not be: it may end before it has published them.
    num_published: u32,
    /// What a request's usage shows: only tokens from the prefix cache.
    num_cached_tokens: u32,
}

/// What a waiting sequence needs to start.
pub struct Demand {
    reuse: Reuse,
    /// Blocks that its tables have at first, reused ones and those to be written: one number a group.
    ends: Vec<usize>,
    /// Blocks that must be free: new ones, reused ones that nobody holds, and the reserve.
    pub needed: u32,
}

impl Planner<'_> {
    /// Whether a waiting sequence may be tried at all in this step.
    pub fn can_admit(&self) -> bool {
        self.is_open && self.state.slots.has_free()
    }

    /// Starts a waiting sequence. When it does not fit, nobody else is admitted in this step: whoever is tried first
    /// must not be passed by.
    pub fn try_admit(&mut self, seq: SeqIdx) -> bool {
        if !self.can_admit() {
            return false;
        }
        self.is_open = self.fits_and_starts(seq);
        self.is_open
    }

    fn fits_and_starts(&mut self, seq: SeqIdx) -> bool {
        let key = self.state.table.seq(seq).key;
        if self.is_blocked(key) {
            return false;
        }
        self.state.blocked = None;
        let demand = self.demand(seq);
        let num_updates = demand.ends.iter().sum::<usize>() as u32;
        let reserved = self.state.config.max_chunk_updates();
        if num_updates + reserved > self.writer.block_updates_left() {
            return false;
        }
        if self.awaits_row(seq, &demand.reuse) {
            return false;
        }
        if demand.needed > self.state.cache.num_free() {
            assert!(
                !self.state.in_flight.is_empty() || !self.state.running.is_empty(),
                "{key:?} does not fit into an empty cache"
            );
            self.state.blocked = Some((key, demand.needed));
            return false;
        }
        self.start(seq, demand.reuse, &demand.ends);
        true
    }

    /// Whether this sequence failed before and nothing has changed since. The look-up of a long prefix is not free of
    /// cost, so it is not repeated at every step.
    fn is_blocked(&self, key: QueueKey) -> bool {
        let free = self.state.cache.num_free();
        let blocked = self.state.blocked;
        !self.state.running.is_empty()
            && blocked.is_some_and(|(other, min_free)| other == key && free < min_free)
    }

    /// Whether a row of this very step computes much of the sequence's prompt: in the next step that is in the cache.
    fn awaits_row(&self, seq: SeqIdx, reuse: &Reuse) -> bool {
        let block_size = self.state.config.block_size;
        let sequence = self.state.table.seq(seq);
        let most = ((sequence.num_known() - 1) / block_size) as usize;
        let least = reuse.tables[0].blocks.len() + AWAITED_TOKENS.div_ceil(block_size) as usize;
        self.fresh.iter().any(|fresh| {
            (least..=most).contains(&(fresh.block + 1))
                && sequence.hashes.get(fresh.block) == Some(&fresh.hash)
        })
    }

    pub fn demand(&mut self, seq: SeqIdx) -> Demand {
        let num_known = self.state.table.seq(seq).num_known();
        let num_blocks = num_known.div_ceil(self.state.config.block_size) as usize;
        let reuse = self.find_reuse(seq);
        let groups = self.state.config.groups.iter().zip(&reuse.tables);
        let ends: Vec<usize> = groups
            .map(|(keep, table)| self.first_end(*keep, table, num_blocks))
            .collect();
        let reused = reuse.tables.iter().map(|table| table.blocks.len());
        let num_new = ends.iter().sum::<usize>() - reused.sum::<usize>();
        let unused = self.state.cache.num_unused(&reuse.tables);
        let needed = num_new as u32 + unused + self.reserve();
        Demand {
            reuse,
            ends,
            needed,
        }
    }

    /// How far the table of a group reaches at first, of a sequence that starts with what `table` holds.
    fn first_end(&self, keep: Keep, table: &BlockTable, num_blocks: usize) -> usize {
        let config = &self.state.config;
        match keep.max_blocks(config.block_size, config.depth) {
            None => num_blocks,
            Some(most) => num_blocks.min(table.first + most as usize),
        }
    }

    /// Free blocks that stay free for the decodes of those that run already.
    pub fn reserve(&self) -> u32 {
        let is_alone = self.state.running.is_empty();
        if is_alone {
            0
        } else {
            self.state.config.num_blocks.div_ceil(100)
        }
    }

    /// The sequence's tables, filled up to `ends`, and what the device must do for them.
    fn fill_tables(&mut self, slot: SlotId, reuse: &mut Reuse, ends: &[usize]) -> Holding {
        let (cache, block_size) = (&mut self.state.cache, self.state.config.block_size);
        let mut tables = std::mem::take(&mut reuse.tables);
        cache.share(&tables);
        for (group, (table, end)) in tables.iter_mut().zip(ends).enumerate() {
            while table.blocks.len() < *end {
                table.blocks.push(cache.take().expect("a free block"));
            }
            for (index, block) in (table.first as u32..).zip(table.held()) {
                self.writer.block_update(group, slot, index, *block);
            }
        }
        let copied = (reuse.num_tokens / block_size) as usize;
        for (table, source) in tables.iter().zip(&reuse.copies) {
            self.writer.block_copy(*source, table.blocks[copied]);
        }
        Holding::new(slot, tables, block_size)
    }

    fn start(&mut self, seq: SeqIdx, mut reuse: Reuse, ends: &[usize]) {
        let slot = self.state.slots.take(seq).expect("a free slot");
        let holding = self.fill_tables(slot, &mut reuse, ends);
        let state = &mut *self.state;
        let request = state.table.seq(seq).request;
        let guide = match &state.table.request(request).constraint {
            Constraint::Grammar(compiled) => Some(Arc::clone(compiled)),
            Constraint::Free | Constraint::Awaited(_) => None,
        };
        let sequence = state.table.seq_mut(seq);
        if let (Some(compiled), None) = (guide, &sequence.guide) {
            sequence.guide = Some(Box::new(Guide::new(&compiled)));
        }
        let key = sequence.key;
        sequence.state = State::Running(holding);
        sequence.first_step = self.step_id;
        sequence.num_computed = reuse.num_tokens;
        sequence.num_committed = reuse.num_tokens;
        sequence.num_published = reuse.num_published;
        let num_known = sequence.num_known();
        let num_prompt_tokens = sequence.num_prompt_tokens();
        self.writer.new_row(slot, num_prompt_tokens);
        self.new_rows.push(NewRow {
            slot,
            params: state.table.request(request).params.clone(),
            index: key.index,
            token_ids: state.table.seq(seq).known_tokens().collect(),
            num_prompt_tokens,
            media_data: Arc::clone(&state.table.request(request).media_data),
        });
        state.queue.start(key, self.now);
        state.insert_running(seq);
        let request = state.table.request_mut(request);
        if request.started.is_none() {
            request.started = Some(self.now);
            request.num_cached_tokens = reuse.num_cached_tokens;
            state.stats.num_prompt_tokens += u64::from(num_prompt_tokens);
            state.stats.prefix_queried_tokens += u64::from(num_known);
            state.stats.prefix_hit_tokens += u64::from(reuse.num_cached_tokens);
        }
    }

    /// The longest existing prefix, never all of it: the last token must run to be sampled from.
    fn find_reuse(&mut self, seq: SeqIdx) -> Reuse {
        let state = &mut *self.state;
        let block_size = state.config.block_size;
        let sequence = state.table.seq_mut(seq);
        if sequence.prompt_logprobs.is_some() {
            return Reuse {
                tables: state.cache.find_prefix(&[]),
                copies: Vec::new(),
                num_tokens: 0,
                num_published: 0,
                num_cached_tokens: 0,
            };
        }
        let mut hashes = std::mem::take(&mut sequence.hashes);
        let (sequence, num_known) = (state.table.seq(seq), state.table.seq(seq).num_known());
        let request = state.table.request(sequence.request);
        let keys = PromptKeys::of(request);
        state
            .cache
            .extend_hashes(keys, &mut hashes, num_known, |position| {
                sequence.token(position)
            });
        let most = hashes.len().min(((num_known - 1) / block_size) as usize);
        let tables = state.cache.find_prefix(&hashes[..most]);
        state.table.seq_mut(seq).hashes = hashes;
        let num_published = tables[0].blocks.len() as u32;
        let num_cached_tokens = num_published * block_size;

        let forkable = state.table.seq(seq).num_prompt_tokens() - 1;
        if forkable > num_cached_tokens
            && let Some(sibling) = self.sibling(seq, forkable)
        {
            return self.fork(sibling, forkable, num_cached_tokens);
        }
        Reuse {
            num_published,
            tables,
            copies: Vec::new(),
            num_tokens: num_cached_tokens,
            num_cached_tokens,
        }
    }

    /// A running sequence of the same request whose KV of the first `num_tokens` positions exists before this step, as
    /// far as the next token reads it.
    fn sibling(&self, seq: SeqIdx, num_tokens: u32) -> Option<SeqIdx> {
        let table = &self.state.table;
        let request = table.request(table.seq(seq).request);
        let is_computed = |other: &Sequence| {
            let before = if other.last_step == self.step_id {
                other.last_start
            } else {
                other.num_computed
            };
            other.is_running()
                && other.first_step < self.step_id
                && before >= num_tokens
                && self.still_holds(other, num_tokens)
        };
        let mut siblings = request.sequences.iter().flatten();
        siblings
            .find(|other| **other != seq && is_computed(table.seq(**other)))
            .copied()
    }

    /// Whether a sequence's blocks still have all that a token at `position` reads.
    fn still_holds(&self, sequence: &Sequence, position: u32) -> bool {
        let config = &self.state.config;
        if config.groups.iter().any(|keep| keep.is_overwritten()) {
            return false;
        }
        let first = |keep: &Keep| (keep.first_read(position) / config.block_size) as usize;
        let tables = sequence.holding().map_or(&[][..], |h| &h.tables);
        tables
            .iter()
            .zip(&config.groups)
            .all(|(table, keep)| table.first <= first(keep))
    }

    fn fork(&self, sibling: SeqIdx, num_tokens: u32, num_cached_tokens: u32) -> Reuse {
        let (block_size, groups) = (self.state.config.block_size, &self.state.config.groups);
        let holding = self.state.table.seq(sibling).holding();
        let sources = &holding.expect("a running sequence").tables;
        let shared = (num_tokens / block_size) as usize;
        let share = |(source, keep): (&BlockTable, &Keep)| BlockTable {
            blocks: source.blocks[..shared].to_vec(),
            first: shared.min((keep.first_read(num_tokens) / block_size) as usize),
        };
        let is_cut = !num_tokens.is_multiple_of(block_size);
        let copied = sources.iter().filter(|_| is_cut);
        Reuse {
            tables: sources.iter().zip(groups).map(share).collect(),
            copies: copied.map(|source| source.blocks[shared]).collect(),
            num_tokens,
            num_published: 0,
            num_cached_tokens,
        }
    }
}
