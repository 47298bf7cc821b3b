//! The fake device: block tables, last tokens and KV blocks as a real one keeps them, with every read checked against
//! what the slot's own tokens make, in every cache group.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use octavo_core::arena::{ArenaLayout, OutputLayout};
use octavo_core::config::CoreConfig;
use octavo_core::groups::Keep;
use octavo_core::plan::StepPlan;

use super::oracle::{next_state, sample};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cell {
    group: usize,
    token: u32,
    position: u32,
    state: u64,
}

#[derive(Clone, Default)]
struct Slot {
    /// One a group.
    tables: Vec<Vec<u32>>,
    /// What the sequence's tokens make of each position; as far as they are known.
    truth: Vec<Cell>,
    last_token: Option<u32>,
    params: Option<Arc<[u8]>>,
    index: u32,
}

impl Slot {
    /// A row's drafted tokens are taken for true until they are sampled.
    fn guess(&mut self, row: &Row) {
        let num_known = row.tokens.len() - row.num_drafted as usize;
        if row.num_drafted > 0 {
            assert_eq!(self.truth.len(), row.start as usize + num_known);
        }
        for token in &row.tokens[num_known..] {
            self.append(*token);
        }
    }

    /// What was sampled behind a row's known tokens.
    fn take(&mut self, row: &Row, tokens: &[u32]) {
        let len = (row.kv_len - row.num_drafted) as usize;
        assert!(len <= self.truth.len());
        self.truth.truncate(len);
        for token in tokens {
            self.append(*token);
        }
        self.last_token = tokens.last().copied();
    }

    fn append(&mut self, token: u32) {
        let position = self.truth.len() as u32;
        let before = self.truth.last().map_or(0, |cell| cell.state);
        self.truth.push(Cell {
            group: 0,
            token,
            position,
            state: next_state(before, token, position),
        });
    }
}

struct Row {
    slot: usize,
    start: u32,
    kv_len: u32,
    tokens: Vec<u32>,
    num_drafted: u32,
}

pub struct Device {
    config: CoreConfig,
    layout: ArenaLayout,
    output_layout: OutputLayout,
    slots: Vec<Slot>,
    blocks: Vec<Vec<Option<Cell>>>,
    /// Blocks that have an encoder's outputs: of which image, and which part.
    outputs: HashMap<u32, (u128, usize)>,
    pub num_outputs_read: u32,
    pub num_copies: u32,
}

impl Device {
    pub fn new(config: &CoreConfig) -> Self {
        Self {
            layout: ArenaLayout::new(config).unwrap(),
            output_layout: OutputLayout::new(config).unwrap(),
            slots: vec![
                Slot {
                    tables: vec![
                        vec![0; config.max_blocks_per_sequence() as usize];
                        config.groups.len()
                    ],
                    ..Slot::default()
                };
                config.max_num_seqs as usize
            ],
            outputs: HashMap::new(),
            num_outputs_read: 0,
            blocks: vec![vec![None; config.block_size as usize]; config.num_blocks as usize],
            config: config.clone(),
            num_copies: 0,
        }
    }

    /// Runs a step; its output arena.
    pub fn run(&mut self, plan: &StepPlan, arena: &[i32]) -> Vec<i32> {
        self.check_header(plan, arena);
        self.update_slots(plan, arena);
        self.copy_blocks(plan, arena);
        self.move_outputs(plan);
        let rows = self.rows(plan, arena);
        self.check_writes(&rows);
        for row in &rows {
            self.check_kv(row, row.start);
        }
        for row in &rows {
            self.slots[row.slot].guess(row);
            for (position, token) in (row.start..).zip(&row.tokens) {
                self.write(row.slot, position, *token);
            }
        }
        for row in &rows {
            self.check_kv(row, row.kv_len);
        }
        self.sample(plan, &rows)
    }

    fn check_header(&self, plan: &StepPlan, arena: &[i32]) {
        let t = &plan.totals;
        let expected = [
            plan.step_id as u32,
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
        for (at, value) in expected.iter().enumerate() {
            assert_eq!(
                arena[self.layout.header as usize + at],
                *value as i32,
                "header {at}"
            );
        }
        assert!(
            t.num_tokens <= self.config.max_num_batched_tokens,
            "over budget"
        );
        assert!(t.num_rows <= self.config.max_num_seqs, "too many rows");
        assert_eq!(plan.new_rows.len() as u32, t.num_new_rows);
    }

    fn update_slots(&mut self, plan: &StepPlan, arena: &[i32]) {
        for (at, row) in plan.new_rows.iter().enumerate() {
            let place = self.layout.new_row as usize + 2 * at;
            assert_eq!(arena[place], row.slot.0 as i32);
            assert_eq!(arena[place + 1], row.num_prompt_tokens as i32);
            let slot = &mut self.slots[row.slot.0 as usize];
            for table in &mut slot.tables {
                table.fill(0);
            }
            slot.truth.clear();
            for token in &row.token_ids {
                slot.append(*token);
            }
            slot.last_token = None;
            slot.params = Some(Arc::clone(&row.params));
            slot.index = row.index;
        }
        for at in 0..plan.totals.num_block_updates as usize {
            let place = self.layout.block_update as usize + 3 * at;
            let [row, index, block] = [arena[place], arena[place + 1], arena[place + 2]];
            assert!(
                block > 0 && (block as usize) < self.blocks.len(),
                "block {block}"
            );
            let num_slots = self.config.max_num_seqs as usize + 1;
            let (group, slot) = (row as usize / num_slots, row as usize % num_slots);
            let entry = &mut self.slots[slot].tables[group][index as usize];
            assert_eq!(*entry, 0, "a block of a table is replaced");
            *entry = block as u32;
        }
    }

    fn copy_blocks(&mut self, plan: &StepPlan, arena: &[i32]) {
        let mut touched = HashSet::new();
        for at in 0..plan.totals.num_block_copies as usize {
            let place = self.layout.block_copy as usize + 2 * at;
            let (source, target) = (arena[place] as usize, arena[place + 1] as usize);
            assert!(touched.insert(target), "two copies to one block");
            let content = self.blocks[source].clone();
            self.outputs.remove(&(target as u32));
            self.blocks[target] = content;
        }
        for at in 0..plan.totals.num_block_copies as usize {
            let source = arena[self.layout.block_copy as usize + 2 * at] as usize;
            assert!(
                !touched.contains(&source),
                "a copy reads what another one writes"
            );
        }
        self.num_copies += plan.totals.num_block_copies;
    }

    /// Outputs of images are read where they are said to be, or written: in whatever order, since no two share a block.
    fn move_outputs(&mut self, plan: &StepPlan) {
        let mut touched = HashSet::new();
        for placed in &plan.outputs {
            for (nth, block) in placed.blocks.iter().enumerate() {
                assert!(touched.insert(block.0), "two outputs in one block");
                let content = (placed.digest, nth);
                if placed.is_filled {
                    assert_eq!(self.outputs.get(&block.0), Some(&content));
                    self.num_outputs_read += 1;
                } else {
                    self.outputs.insert(block.0, content);
                    self.blocks[block.0 as usize].fill(None);
                }
            }
        }
    }

    fn rows(&self, plan: &StepPlan, arena: &[i32]) -> Vec<Row> {
        let layout = &self.layout;
        let t = &plan.totals;
        let starts = &arena[layout.query_start as usize..][..=t.num_rows as usize];
        assert_eq!(starts[0], 0);
        assert_eq!(starts[t.num_rows as usize], t.num_tokens as i32);
        let mut slots = HashSet::new();
        (0..t.num_rows as usize)
            .map(|row| {
                let slot = arena[layout.row_slot as usize + row] as usize;
                assert!(slots.insert(slot), "slot {slot} has two rows");
                let (first, end) = (starts[row] as usize, starts[row + 1] as usize);
                assert_eq!(
                    end - first == 1 && row < t.num_sampled as usize,
                    row < t.num_decode_rows as usize
                );
                let kv_len = arena[layout.kv_len as usize + row] as u32;
                let start = kv_len - (end - first) as u32;
                let positions = &arena[layout.position as usize..][first..end];
                assert!(
                    (start as i32..)
                        .zip(positions)
                        .all(|(want, have)| want == *have)
                );
                let ids = &arena[layout.token_id as usize..][first..end];
                let last = || self.slots[slot].last_token.expect("a last token");
                let resolve = |id: &i32| u32::try_from(*id).unwrap_or_else(|_| last());
                Row {
                    slot,
                    start,
                    kv_len,
                    tokens: ids.iter().map(resolve).collect(),
                    num_drafted: arena[layout.num_drafted as usize + row] as u32,
                }
            })
            .collect()
    }

    fn place(&self, group: usize, slot: usize, position: u32) -> (usize, usize) {
        let size = self.config.block_size;
        let block = self.slots[slot].tables[group][(position / size) as usize];
        assert_ne!(block, 0, "slot {slot} has no block for position {position}");
        let offset = match self.config.groups[group] {
            Keep::State => 0, // a block has one state
            _ => position % size,
        };
        (block as usize, offset as usize)
    }

    /// Every block that a row reads or writes, with the positions of the row that are read in it.
    fn places<'a>(
        &'a self,
        row: &'a Row,
        len: u32,
    ) -> impl Iterator<Item = (usize, u32, (usize, usize))> + 'a {
        let groups = self.config.groups.iter().enumerate();
        groups.flat_map(move |(group, keep)| {
            (keep.first_read(row.start)..len)
                .map(move |position| (group, position, self.place(group, row.slot, position)))
        })
    }

    /// No block that a row writes to is read by another row of the step, or belongs to two groups.
    fn check_writes(&self, rows: &[Row]) {
        let mut writer = HashMap::new();
        for row in rows {
            for (group, position, (block, _)) in self.places(row, row.kv_len) {
                if position >= row.start {
                    let user = *writer.entry(block).or_insert((row.slot, group));
                    assert_eq!(user, (row.slot, group), "two write to block {block}");
                }
            }
        }
        for row in rows {
            for (group, _, (block, _)) in self.places(row, row.kv_len) {
                let user = *writer.get(&block).unwrap_or(&(row.slot, group));
                assert_eq!(user, (row.slot, group), "block {block} is read and written");
            }
        }
    }

    /// What a row reads below `len` is what its slot's sequence makes.
    fn check_kv(&self, row: &Row, len: u32) {
        for (group, position, (block, offset)) in self.places(row, len) {
            if self.config.groups[group] == Keep::State && position + 1 != len {
                continue;
            }
            let truth = self.slots[row.slot].truth[position as usize];
            assert_eq!(
                self.blocks[block][offset],
                Some(Cell { group, ..truth }),
                "slot {} reads foreign or stale KV in group {group}",
                row.slot
            );
        }
    }

    fn write(&mut self, slot: usize, position: u32, token: u32) {
        let truth = self.slots[slot].truth[position as usize];
        assert_eq!(truth.token, token, "slot {slot} runs a foreign token");
        for group in 0..self.config.groups.len() {
            let (block, offset) = self.place(group, slot, position);
            self.blocks[block][offset] = Some(Cell { group, ..truth });
            self.outputs.remove(&(block as u32));
        }
    }

    fn sample(&mut self, plan: &StepPlan, rows: &[Row]) -> Vec<i32> {
        let layout = &self.output_layout;
        let mut output = vec![-7; layout.num_ints as usize];
        let width = layout.max_sampled as usize;
        let num_sampled = plan.totals.num_sampled as usize;
        let drafted: u32 = rows.iter().map(|row| row.num_drafted).sum();
        assert_eq!(drafted, plan.totals.num_draft_tokens);
        assert!(rows[num_sampled..].iter().all(|row| row.num_drafted == 0));
        for (index, row) in rows[..num_sampled].iter().enumerate() {
            let tokens = self.sample_row(row);
            self.slots[row.slot].take(row, &tokens);
            output[layout.count as usize + index] = tokens.len() as i32;
            for (nth, token) in tokens.into_iter().enumerate() {
                let place = index * width + nth;
                output[layout.sampled as usize + place] = token as i32;
                output[layout.rank as usize + place] = 1;
                let entries = 1 + layout.max_logprobs as usize;
                for entry in 0..entries {
                    let at = place * entries + entry;
                    output[layout.logprob_id as usize + at] = (token as usize + entry) as i32;
                    output[layout.logprob_value as usize + at] = (-(entry as f32)).to_bits() as i32;
                }
            }
        }
        output
    }

    /// The tokens behind a row's last one, or behind each of its drafted ones as long as they are what was sampled.
    fn sample_row(&self, row: &Row) -> Vec<u32> {
        let slot = &self.slots[row.slot];
        let params = slot.params.as_ref().unwrap();
        let first = row.tokens.len() - 1 - row.num_drafted as usize;
        let mut sampled = Vec::new();
        for at in first..row.tokens.len() {
            let cell = slot.truth[row.start as usize + at];
            let vocab_size = self.config.vocab_size;
            sampled.push(sample(
                cell.state, cell.token, params, slot.index, vocab_size,
            ));
            if row.tokens.get(at + 1) != sampled.last() {
                break;
            }
        }
        sampled
    }
}
