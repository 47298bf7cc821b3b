//! Everything that the control plane knows between two steps, and the moves that more than one part makes: a sequence
//! gets a slot, is preempted, ends, retires.

use std::collections::VecDeque;

use crate::arena::{ArenaLayout, OutputLayout};
use crate::cache::Cache;
use crate::config::CoreConfig;
use crate::errors::ConfigError;
use crate::grammar::compiler::Grammars;
use crate::groups::Keep;
use crate::holding::Holding;
use crate::ids::{RequestIdx, SeqIdx, SlotId};
use crate::mask_rows::Masks;
use crate::outputs::Outputs;
use crate::plan::InFlight;
use crate::protocol::EngineStats;
use crate::queue::{Queue, QueueKey};
use crate::request::Table;
use crate::sequence::State;
use crate::step_cost::StepCost;

/// Which sequence sits in which slot.
#[derive(Debug)]
pub struct Slots {
    free: Vec<SlotId>,
    owner: Vec<Option<SeqIdx>>,
}

impl Slots {
    /// Low slots are taken first, so that few rows sit close together.
    fn new(num_slots: u32) -> Self {
        Self {
            free: (0..num_slots).rev().map(SlotId).collect(),
            owner: vec![None; num_slots as usize],
        }
    }

    pub fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    pub fn take(&mut self, seq: SeqIdx) -> Option<SlotId> {
        let slot = self.free.pop()?;
        self.owner[slot.0 as usize] = Some(seq);
        Some(slot)
    }

    fn release(&mut self, slot: SlotId) {
        let owner = self.owner[slot.0 as usize].take();
        assert!(owner.is_some(), "slot {} released twice", slot.0);
        self.free.push(slot);
    }

    pub fn owner(&self, slot: SlotId) -> Option<SeqIdx> {
        self.owner.get(slot.0 as usize).copied().flatten()
    }

    pub fn num_free(&self) -> u32 {
        self.free.len() as u32
    }

    pub fn owners(&self) -> impl Iterator<Item = (SlotId, SeqIdx)> {
        (0..)
            .zip(&self.owner)
            .filter_map(|(slot, owner)| owner.map(|seq| (SlotId(slot), seq)))
    }
}

#[derive(Debug)]
pub struct EngineState {
    pub config: CoreConfig,
    pub arena_layout: ArenaLayout,
    pub output_layout: OutputLayout,
    pub cache: Cache,
    pub slots: Slots,
    pub table: Table,
    /// Sequences in state `Running`, in the order of their keys.
    pub running: Vec<SeqIdx>,
    pub queue: Queue,
    pub in_flight: VecDeque<InFlight>,
    pub outputs: Outputs,
    pub stats: EngineStats,
    pub step_cost: StepCost,
    pub num_arrivals: u64,
    /// `media_data` of all requests that have not ended.
    pub media_bytes: u64,
    /// The newcomer that was tried last did not fit; not tried again before so many blocks are free.
    pub blocked: Option<(QueueKey, u32)>,
    pub is_draining: bool,
    /// `None`: no tokenizer was named, and constrained requests are refused.
    pub grammars: Option<Grammars>,
    pub masks: Masks,
}

impl EngineState {
    pub fn new(config: CoreConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self {
            arena_layout: ArenaLayout::new(&config)?,
            output_layout: OutputLayout::new(&config)?,
            cache: Cache::new(&config),
            slots: Slots::new(config.max_running()),
            table: Table::default(),
            running: Vec::new(),
            queue: Queue::new(config.queue_bounds()),
            in_flight: VecDeque::new(),
            outputs: Outputs::default(),
            stats: EngineStats::default(),
            step_cost: StepCost::default(),
            num_arrivals: 0,
            media_bytes: 0,
            blocked: None,
            is_draining: false,
            grammars: None,
            masks: Masks::new(&config),
            config,
        })
    }

    /// Nothing runs, waits or is in flight.
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_empty() && self.table.num_requests() == 0
    }

    /// Brings the gauges up to date.
    pub fn refresh_stats(&mut self) {
        self.stats.num_running = self.running.len() as u32;
        self.stats.num_waiting = self.queue.len() as u32;
        self.stats.num_blocks = self.config.num_blocks - 1;
        self.stats.num_free_blocks = self.cache.num_free();
    }

    /// Puts a sequence that has its slot and blocks among the running ones.
    pub fn insert_running(&mut self, seq: SeqIdx) {
        let key = self.table.seq(seq).key;
        let at = self
            .running
            .partition_point(|other| self.table.seq(*other).key < key);
        self.running.insert(at, seq);
    }

    /// Takes the blocks and the slot of a running sequence without rows in flight, and queues it in its old turn. The
    /// caller takes it out of `running`.
    pub fn preempt(&mut self, seq: SeqIdx) {
        let sequence = self.table.seq_mut(seq);
        assert_eq!(
            sequence.in_flight, 0,
            "preempting {:?} in flight",
            sequence.key
        );
        let state = std::mem::replace(&mut sequence.state, State::Waiting);
        let key = sequence.key;
        sequence.forget_computed();
        if let State::Running(holding) = state {
            self.release(holding);
        }
        self.queue.push(key, seq);
        self.stats.num_preemptions += 1;
    }

    /// Gives back the blocks of a running sequence that no later row of its reads.
    pub fn cut(&mut self, seq: SeqIdx) {
        let groups = self.cache.groups();
        if groups == [Keep::All] {
            return;
        }
        let block_size = self.config.block_size;
        let sequence = self.table.seq_mut(seq);
        let num_committed = sequence.num_committed;
        let given = sequence
            .running_mut()
            .cut(groups, num_committed, block_size);
        self.cache.release(&given);
    }

    fn release(&mut self, holding: Holding) {
        for table in &holding.tables {
            self.cache.release(table.held());
        }
        self.slots.release(holding.slot);
    }

    /// Ends a sequence, whatever its state. What it holds is free once its last row in flight has retired. Sequences
    /// that were parked behind it are queued. A running one stays in `running` until `drop_ended`.
    pub fn end(&mut self, seq: SeqIdx) {
        let sequence = self.table.seq_mut(seq);
        let (key, request, leads) = (sequence.key, sequence.request, sequence.leads);
        sequence.leads = false;
        let state = std::mem::replace(&mut sequence.state, State::Waiting);
        let in_flight = sequence.in_flight > 0;
        if leads {
            self.queue_parked(request);
        }
        match state {
            State::Parked => {}
            State::Waiting => self.queue.remove(key),
            State::Ending(_) => panic!("{key:?} ends twice"),
            State::Running(holding) if in_flight => {
                self.table.seq_mut(seq).state = State::Ending(holding);
            }
            State::Running(holding) => self.release(holding),
        }
        if let Some(request) = self.table.end_sequence(seq) {
            self.media_bytes -= request.media_data.len() as u64;
            let n = request.started.map(|_| request.sequences.len() as u32);
            self.queue.settle(request.bill, request.num_output, n);
        }
        if !in_flight {
            self.table.remove_sequence(seq);
        }
    }

    /// The last row in flight of an ended sequence has retired.
    pub fn retire(&mut self, seq: SeqIdx) {
        if let State::Ending(holding) = self.table.remove_sequence(seq).state {
            self.release(holding);
        }
    }

    /// Takes sequences that have ended out of `running`; before any place in the table is used again.
    pub fn drop_ended(&mut self) {
        let table = &self.table;
        self.running.retain(|seq| table.is_running(*seq));
    }

    /// Lets the sequences that waited for their request's first one take their turns.
    pub fn queue_parked(&mut self, request: RequestIdx) {
        let sequences = self.table.request(request).sequences.clone();
        for seq in sequences.into_iter().flatten() {
            let sequence = self.table.seq_mut(seq);
            if matches!(sequence.state, State::Parked) {
                sequence.state = State::Waiting;
                self.queue.push(sequence.key, seq);
            }
        }
    }
}
