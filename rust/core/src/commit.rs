//! Takes in the result of the oldest step in flight: tokens are appended, ends are found, blocks are published, dead
//! rows are dropped, and clients are told.

use std::time::Instant;

use crate::errors::StepError;
use crate::ids::{SeqIdx, TokenId};
use crate::outputs::empty_output;
use crate::plan::Row;
use crate::prefix::PromptKeys;
use crate::protocol::{FinishReason, SequenceOutput};
use crate::results::Results;
use crate::sequence::{Sequence, State};
use crate::state::EngineState;

/// Appends what row `index` sampled to the sequence and its output, up to the token that ends it.
fn append_tokens(
    sequence: &mut Sequence,
    output: &mut SequenceOutput,
    results: &Results<'_>,
    (index, draft): (usize, &[TokenId]),
) -> Result<(), String> {
    let token_ids = results.tokens(index, draft)?;
    if let Some(reason) = sequence.guide.as_ref().and_then(|guide| guide.failure()) {
        output.finish = Some(FinishReason::Error);
        output.error = Some(reason.to_owned());
        return Ok(());
    }
    output.token_ids.reserve_exact(token_ids.len());
    for (nth, token_id) in token_ids.iter().enumerate() {
        let token_id = *token_id as TokenId;
        sequence.output.push(token_id);
        output.token_ids.push(token_id);
        if let Ok(num_top) = usize::try_from(sequence.limits.logprobs) {
            output.logprobs.push(results.logprobs(index, nth, num_top));
        }
        let num_output = sequence.output.len() as u32;
        let is_complete = sequence
            .guide
            .as_ref()
            .is_some_and(|guide| guide.is_complete_at(num_output));
        if is_complete || sequence.stops_at(token_id, num_output) {
            output.finish = Some(FinishReason::Stop);
            output.stop_token_id = sequence.names_stop(token_id).then_some(token_id);
        } else if num_output >= sequence.limits.max_output {
            output.finish = Some(FinishReason::Length);
        }
        if output.finish.is_some() {
            break;
        }
    }
    Ok(())
}

/// Drafted tokens that were right have been computed: they count from now on. How many they are.
fn settle_draft(sequence: &mut Sequence, draft: &[TokenId], token_ids: &[TokenId]) -> u32 {
    let Some(first) = token_ids.first() else {
        return 0;
    };
    if draft.is_empty() {
        sequence.drafting.settle_plain(*first);
        return 0;
    }
    // Behind the last token nothing is computed.
    let num_computed = token_ids.len() as u32 - 1;
    sequence.num_computed += num_computed;
    sequence.num_committed += num_computed;
    let same = draft.iter().zip(token_ids).take_while(|(a, b)| a == b);
    let num_right = same.count() as u32;
    sequence.drafting.settle(num_right);
    num_right
}

/// What became of a row.
enum Fate {
    Continues,
    Ended,
}

impl EngineState {
    /// Commits the oldest step in flight from its output arena.
    pub fn commit(&mut self, output: &[i32], now: Instant) -> Result<(), StepError> {
        let step = self
            .in_flight
            .pop_front()
            .ok_or(StepError::NothingInFlight)?;
        self.step_cost.record(step.shape, step.planned, now);
        let layout = self.output_layout.clone();
        let results = Results {
            ints: output,
            layout: &layout,
            vocab_size: self.config.vocab_size,
        };
        self.advance_guides(&step, &results)?;
        let mut any_ended = false;
        let mut drafts = step.drafts.as_slice();
        for (index, row) in step.rows.iter().enumerate() {
            let draft;
            (draft, drafts) = drafts.split_at(row.num_drafted as usize);
            let is_sampled = index < step.num_sampled as usize;
            let fate = self
                .commit_row(row, is_sampled.then_some((index, draft)), &results, now)
                .map_err(|message| StepError::BadOutput {
                    step: step.step_id,
                    row: index,
                    message,
                })?;
            if matches!(fate, Fate::Ended) {
                self.end(row.seq);
                any_ended = true;
            }
        }
        if any_ended {
            self.drop_ended();
        }
        self.stats.num_steps += 1;
        Ok(())
    }

    /// `sampled`: the row's place in the output arena and its draft, if it gained tokens.
    fn commit_row(
        &mut self,
        row: &Row,
        sampled: Option<(usize, &[TokenId])>,
        results: &Results<'_>,
        now: Instant,
    ) -> Result<Fate, String> {
        let sequence = self.table.seq_mut(row.seq);
        sequence.in_flight -= 1;
        if let State::Ending(_) = sequence.state {
            if sequence.in_flight == 0 {
                self.retire(row.seq);
            }
            return Ok(Fate::Continues);
        }
        sequence.num_committed = row.start + row.len - row.num_drafted;
        let Some((index, draft)) = sampled else {
            self.publish(row.seq);
            self.cut(row.seq);
            return Ok(Fate::Continues);
        };
        let mut output = empty_output(sequence.request_id, sequence.key.index);
        sequence.num_pending -= 1;
        append_tokens(sequence, &mut output, results, (index, draft))?;
        self.stats.num_accepted_tokens +=
            u64::from(settle_draft(sequence, draft, &output.token_ids));
        let (client, is_silent) = (sequence.client, sequence.is_silent);
        let needs_publish = (sequence.num_published + 1) * self.config.block_size;
        if sequence.num_committed >= needs_publish {
            self.publish(row.seq);
        }
        if row.len > 1 {
            self.cut(row.seq);
        }
        self.stats.num_output_tokens += output.token_ids.len() as u64;
        if is_silent {
            self.introduce(row.seq, &mut output, now)?;
        }
        let fate = if output.finish.is_some() {
            self.stats.num_finished += 1;
            Fate::Ended
        } else {
            Fate::Continues
        };
        self.outputs.push(client, output);
        Ok(fate)
    }

    /// Adds what only the first output of a sequence says.
    fn introduce(
        &mut self,
        seq: SeqIdx,
        output: &mut SequenceOutput,
        now: Instant,
    ) -> Result<(), String> {
        let sequence = self.table.seq_mut(seq);
        sequence.is_silent = false;
        output.prompt_logprobs = sequence.prompt_logprobs.take();
        if let Some(logprobs) = &output.prompt_logprobs {
            let expected = sequence.prompt.len() - 1;
            if logprobs.len() != expected {
                return Err(format!(
                    "{} prompt logprobs were put in, {expected} expected",
                    logprobs.len()
                ));
            }
        }
        let request = sequence.request;
        let request = self.table.request(request);
        let started = request.started.unwrap_or(now);
        output.num_cached_tokens = Some(request.num_cached_tokens);
        output.queue_s = Some(started.duration_since(request.arrival).as_secs_f32());
        Ok(())
    }

    /// Makes the full blocks findable whose content has been computed by now, or (of the prompt) will be before the step
    /// of a later plan runs, as steps run in the order of their plans.
    pub fn publish(&mut self, seq: SeqIdx) {
        if !self.config.enable_prefix_caching {
            return;
        }
        let sequence = self.table.seq_mut(seq);
        let mut hashes = std::mem::take(&mut sequence.hashes);
        let first = sequence.num_published;
        let planned = sequence.num_computed.min(sequence.num_prompt_tokens());
        let planned = planned.max(sequence.num_committed);
        let num_full = planned / self.config.block_size;
        sequence.num_published = num_full.max(first);
        let sequence = self.table.seq(seq);
        let keys = PromptKeys::of(self.table.request(sequence.request));
        let token = |position| sequence.token(position);
        self.cache.extend_hashes(keys, &mut hashes, planned, token);
        if let State::Running(holding) = &sequence.state {
            let range = (first as usize, num_full as usize);
            self.cache.publish(&hashes, &holding.tables, range);
        }
        self.table.seq_mut(seq).hashes = hashes;
    }
}
