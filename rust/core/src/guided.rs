//! Constrained rows of a step: their guides take in what was sampled, and masks say what may be sampled next.
//!
//! Tokens reach a guide when they are committed, or earlier: the masks of a step need the tokens of the steps in flight
//! before it. Not here: grammars (`grammar`), sampling.

use std::collections::HashMap;

use crate::results::Results;

use crate::errors::StepError;
use crate::grammar::masks::Task;
use crate::ids::SeqIdx;
use crate::plan::InFlight;
use crate::state::EngineState;

impl EngineState {
    /// Fills the rows of all slots that the newest step in flight samples. `outputs`: the output arenas of the steps in
    /// flight before it, the oldest first.
    pub fn fill_masks(&mut self, outputs: &[&[i32]], masks: &mut [i32]) -> Result<(), StepError> {
        let num_words = self.masks.num_words * self.masks.rows_per_slot;
        if masks.len() != num_words * self.masks.is_open.len() {
            return Err(StepError::BadMasks(format!(
                "the buffer has {} words, not {} for each of {} slots",
                masks.len(),
                num_words,
                self.masks.is_open.len()
            )));
        }
        let Some(step) = self.in_flight.pop_back() else {
            return Err(StepError::NothingInFlight);
        };
        let shown = self.show_in_flight(outputs);
        if shown.is_ok() {
            self.fill_step(&step, masks);
        }
        self.in_flight.push_back(step);
        shown
    }

    /// Shows guides the tokens of the steps in flight.
    fn show_in_flight(&mut self, outputs: &[&[i32]]) -> Result<(), StepError> {
        if outputs.len() != self.in_flight.len() {
            return Err(StepError::BadMasks(format!(
                "{} outputs are given for {} steps in flight",
                outputs.len(),
                self.in_flight.len()
            )));
        }
        let layout = self.output_layout.clone();
        let steps = std::mem::take(&mut self.in_flight);
        let mut shown = Ok(());
        let mut counts = HashMap::new();
        for (step, output) in steps.iter().zip(outputs) {
            let results = Results {
                ints: output,
                layout: &layout,
                vocab_size: self.config.vocab_size,
            };
            shown = shown.and_then(|()| self.show(step, &mut counts, &results));
        }
        self.in_flight = steps;
        shown
    }

    /// Shows guides what a step sampled; `counts`: tokens of each sequence that are not committed and come before it.
    fn show(
        &mut self,
        step: &InFlight,
        counts: &mut HashMap<SeqIdx, usize>,
        results: &Results<'_>,
    ) -> Result<(), StepError> {
        for (index, (row, draft)) in step.sampled_rows().enumerate() {
            let sequence = self.table.seq_mut(row.seq);
            if sequence.guide.is_none() || !sequence.is_running() {
                continue;
            }
            let token_ids =
                results
                    .tokens(index, draft)
                    .map_err(|message| StepError::BadOutput {
                        step: step.step_id,
                        row: index,
                        message,
                    })?;
            let before = counts.entry(row.seq).or_default();
            let start = sequence.output.len() + *before;
            *before += token_ids.len();
            if let Some(guide) = &mut sequence.guide {
                guide.offer(start, token_ids.iter().map(|id| *id as u32));
            }
        }
        Ok(())
    }

    fn fill_step(&mut self, step: &InFlight, masks: &mut [i32]) {
        let num_words = self.masks.num_words;
        let slots = masks.chunks_exact_mut(num_words * self.masks.rows_per_slot);
        let mut rows: Vec<Option<&mut [i32]>> = slots.map(Some).collect();
        let mut tasks = Vec::new();
        let mut owners = Vec::new();
        for (row, draft) in step.sampled_rows() {
            let slot = row.slot.0 as usize;
            let Some(mask) = rows[slot].take() else {
                continue;
            };
            let sequence = self.table.seq_mut(row.seq);
            let is_running = sequence.is_running();
            match sequence.guide.take_if(|_| is_running) {
                Some(guide) => {
                    self.masks.is_open[slot] = false;
                    owners.push(row.seq);
                    tasks.push(Task {
                        index: owners.len() - 1,
                        guide,
                        masks: Some(mask.chunks_exact_mut(num_words)),
                        draft,
                    });
                }
                None if !self.masks.is_open[slot] => {
                    mask.fill(-1);
                    self.masks.is_open[slot] = true;
                }
                None => {}
            }
        }
        self.run_tasks(tasks, &owners);
    }

    /// Lets guides take in what a step sampled, before it is committed.
    pub fn advance_guides(
        &mut self,
        step: &InFlight,
        results: &Results<'_>,
    ) -> Result<(), StepError> {
        if !step.needs_masks {
            return Ok(());
        }
        self.show(step, &mut HashMap::new(), results)?;
        let mut tasks = Vec::new();
        let mut owners = Vec::new();
        for (row, _) in step.sampled_rows() {
            let guide = &mut self.table.seq_mut(row.seq).guide;
            if let Some(guide) = guide.take_if(|guide| guide.is_behind()) {
                owners.push(row.seq);
                tasks.push(Task {
                    index: owners.len() - 1,
                    guide,
                    masks: None,
                    draft: &[],
                });
            }
        }
        self.run_tasks(tasks, &owners);
        Ok(())
    }

    fn run_tasks(&mut self, mut tasks: Vec<Task<'_>>, owners: &[SeqIdx]) {
        self.masks.pool.run(&mut tasks);
        for task in tasks {
            self.table.seq_mut(owners[task.index]).guide = Some(task.guide);
        }
    }
}
