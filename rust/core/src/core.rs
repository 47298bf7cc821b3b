//! `Core`: the control plane of one engine as the extension module sees it. One call a step; everything else is rare.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use crate::arena::{ArenaLayout, OutputLayout};
use crate::config::CoreConfig;
use crate::errors::{ConfigError, StepError};
use crate::grammar::compiler::Grammars;
use crate::ids::{ClientId, SlotId, TokenId};
use crate::mailbox::{Inbox, Outbox, QueueView};
use crate::plan::StepPlan;
use crate::protocol::{EngineStats, Inbound, Outbound, TokenLogprobs};
use crate::scheduler::Planner;
use crate::state::EngineState;

/// A call of a client, for the engine's Python side to answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    pub client: ClientId,
    pub call_id: u64,
    pub body: Vec<u8>,
}

/// Prompt logprobs of one row: `ids` and `values` are [T, 1 + k] (the target first), `ranks` is [T].
#[derive(Clone, Copy, Debug)]
pub struct PromptLogprobs<'a> {
    pub ids: &'a [i32],
    pub values: &'a [f32],
    pub ranks: &'a [i32],
}

pub struct Core {
    state: EngineState,
    inbox: Arc<Inbox>,
    outbox: Arc<Outbox>,
    calls: Vec<Call>,
    num_arenas: u32,
    last_step: u64,
    last_plan: StepPlan,
}

impl Core {
    pub fn new(config: CoreConfig) -> Result<Self, ConfigError> {
        let core = Self {
            num_arenas: config.depth + 1,
            state: EngineState::new(config)?,
            inbox: Arc::default(),
            outbox: Arc::default(),
            calls: Vec::new(),
            last_step: 0,
            last_plan: StepPlan::default(),
        };
        core.show_queue();
        Ok(core)
    }

    /// Tells the inbox how much the queue still takes.
    fn show_queue(&self) {
        let queue = &self.state.queue;
        self.inbox.set_view(QueueView {
            bounds: queue.bounds(),
            load: queue.load(),
            retry_after_s: queue.retry_after_s(),
            stats: self.state.stats,
        });
    }

    pub fn config(&self) -> &CoreConfig {
        &self.state.config
    }

    pub fn arena_layout(&self) -> ArenaLayout {
        self.state.arena_layout
    }

    pub fn output_layout(&self) -> &OutputLayout {
        &self.state.output_layout
    }

    pub fn inbox(&self) -> Arc<Inbox> {
        Arc::clone(&self.inbox)
    }

    pub fn outbox(&self) -> Arc<Outbox> {
        Arc::clone(&self.outbox)
    }

    /// How many arenas take turns; more than `depth`, since one is filled while others are in flight.
    pub fn set_num_arenas(&mut self, num_arenas: u32) {
        assert!(num_arenas > self.state.config.depth, "too few arenas");
        self.num_arenas = num_arenas;
    }

    /// Number of the arena that the next `step` will fill.
    pub fn next_arena(&self) -> u32 {
        ((self.last_step + 1) % u64::from(self.num_arenas)) as u32
    }

    /// Commits the oldest step in flight from its output arena, if one is given, and plans the next step into `arena`,
    /// when the time has come (`hold`). A plan without rows is not in flight.
    pub fn step(
        &mut self,
        output: Option<&[i32]>,
        arena: &mut [i32],
    ) -> Result<StepPlan, StepError> {
        let now = Instant::now();
        self.commit(output, now)?;
        let Some(until) = self.state.plan_at(now) else {
            return self.plan(arena, now);
        };
        self.send();
        thread::sleep(until - now);
        self.plan(arena, Instant::now())
    }

    /// Whether `step` may sleep.
    pub fn may_hold(&self) -> bool {
        self.state.config.depth > 1 && self.state.config.plans_late
    }

    /// `step` with a clock of the caller's, which must not go back, at once.
    pub fn step_at(
        &mut self,
        output: Option<&[i32]>,
        arena: &mut [i32],
        now: Instant,
    ) -> Result<StepPlan, StepError> {
        self.commit(output, now)?;
        self.plan(arena, now)
    }

    fn commit(&mut self, output: Option<&[i32]>, now: Instant) -> Result<(), StepError> {
        output.map_or(Ok(()), |output| self.state.commit(output, now))
    }

    /// Sends what clients are to know.
    fn send(&mut self) {
        self.state.refresh_stats();
        let is_idle = self.state.is_idle();
        self.state
            .outputs
            .flush(&self.state.stats, is_idle, &self.outbox);
        self.show_queue();
    }

    fn plan(&mut self, arena: &mut [i32], now: Instant) -> Result<StepPlan, StepError> {
        let depth = self.state.config.depth as usize;
        if self.state.in_flight.len() >= depth {
            return Err(StepError::TooDeep(depth));
        }
        self.take_in(now);
        self.state.refuse_expired(now);
        let arena_index = self.next_arena();
        let mut plan = Planner::new(&mut self.state, arena, self.last_step + 1, now).run();
        plan.arena = arena_index;
        plan.has_calls = !self.calls.is_empty();
        if plan.totals.num_rows > 0 {
            self.last_step += 1;
            self.last_plan.clone_from(&plan);
        }
        self.send();
        Ok(plan)
    }

    /// Everything that has arrived since the last step.
    fn take_in(&mut self, now: Instant) {
        for client in self.inbox.take_refused() {
            self.state.stats.num_refused += 1;
            self.state.outputs.tell_stats(client);
        }
        for (client, message) in self.inbox.take() {
            match message {
                Inbound::Add(request) => self.state.add(client, request, now),
                Inbound::Abort(abort) => self.state.abort(client, abort),
                Inbound::Call { call_id, body } => self.calls.push(Call {
                    client,
                    call_id,
                    body,
                }),
                Inbound::Disconnected => {
                    self.calls.retain(|call| call.client != client);
                    self.state.disconnect(client);
                }
            }
        }
        self.state.settle_grammars(now);
    }

    /// Constrained requests are served from now on. The tokenizer.json at `path` is read by `warm_grammars`, or when the
    /// first one comes; `eos` are the ids that end a sequence where its grammar is complete.
    pub fn use_tokenizer(&mut self, path: PathBuf, eos: Vec<TokenId>) {
        let inbox = Arc::clone(&self.inbox);
        let notify = Arc::new(move || inbox.nudge());
        let vocab_size = self.state.config.vocab_size;
        self.state.grammars = Some(Grammars::new(path, vocab_size, eos, notify));
    }

    /// Gets ready for constrained requests in the background, if they are served at all.
    pub fn warm_grammars(&mut self) {
        if let Some(grammars) = &mut self.state.grammars {
            grammars.warm();
        }
    }

    /// Words of a slot's mask.
    pub fn mask_words(&self) -> u32 {
        self.state.config.vocab_size.div_ceil(32)
    }

    /// Fills the masks of the newest planned step, one row of words a slot: see `EngineState::fill_masks`.
    pub fn fill_masks(&mut self, outputs: &[&[i32]], masks: &mut [i32]) -> Result<(), StepError> {
        self.state.fill_masks(outputs, masks)
    }

    /// Grammars are being compiled: time limits must be looked at even if nothing arrives.
    pub fn is_compiling(&self) -> bool {
        self.state.grammars.as_ref().is_some_and(Grammars::is_busy)
    }

    /// Appends prompt logprobs of the row that a step in flight has in `slot`. The message says what is wrong.
    pub fn put_prompt_logprobs(
        &mut self,
        slot: SlotId,
        logprobs: PromptLogprobs<'_>,
    ) -> Result<(), String> {
        let seq = self.state.slots.owner(slot);
        let seq = seq.ok_or_else(|| format!("slot {} is not in use", slot.0))?;
        if !self.state.table.is_running(seq) {
            return Ok(());
        }
        let request = self.state.table.seq(seq).request;
        let num_top = self.state.table.request(request).prompt_logprobs;
        let num_entries = 1 + num_top.max(0) as usize;
        let sequence = self.state.table.seq_mut(seq);
        let Some(collected) = &mut sequence.prompt_logprobs else {
            return Err(format!(
                "the sequence in slot {} wants no prompt logprobs",
                slot.0
            ));
        };
        let PromptLogprobs { ids, values, ranks } = logprobs;
        let width = ids.len().checked_div(ranks.len()).unwrap_or(num_entries);
        if width * ranks.len() != ids.len() || ids.len() != values.len() || width < num_entries {
            return Err(format!(
                "prompt logprobs: {} ids, {} values and {} ranks; {num_entries} entries a token are wanted",
                ids.len(),
                values.len(),
                ranks.len()
            ));
        }
        let rows = ids.chunks_exact(width).zip(values.chunks_exact(width));
        collected.extend(rows.zip(ranks).map(|((ids, values), rank)| {
            TokenLogprobs {
                rank: *rank as u32,
                entries: ids[..num_entries]
                    .iter()
                    .zip(values)
                    .map(|(id, value)| (*id as TokenId, *value))
                    .collect(),
            }
        }));
        Ok(())
    }

    pub fn num_running(&self) -> u32 {
        self.state.running.len() as u32
    }

    /// Requests run or wait, a step is in flight, or the inbox is not empty.
    pub fn has_work(&self) -> bool {
        !self.state.is_idle() || !self.inbox.is_empty()
    }

    pub fn take_calls(&mut self) -> Vec<Call> {
        std::mem::take(&mut self.calls)
    }

    pub fn reply(&self, client: ClientId, call_id: u64, body: Vec<u8>) {
        self.outbox.post(client, Outbound::Reply { call_id, body });
    }

    /// Refuses requests from now on.
    pub fn drain(&mut self) {
        self.state.is_draining = true;
    }

    pub fn reset_prefix_cache(&mut self) -> bool {
        self.state.blocked = None;
        self.state.cache.reset()
    }

    pub fn stats(&mut self) -> EngineStats {
        self.state.refresh_stats();
        self.state.stats
    }

    /// Names the first broken invariant.
    pub fn check(&self) -> Result<(), String> {
        self.state.check()
    }

    pub fn dump(&self) -> String {
        format!("{}last plan: {:?}\n", self.state.dump(), self.last_plan)
    }
}
