//! Every invariant between the parts, checked the slow way; and the state as text for a crash report.

use std::collections::HashMap;
use std::fmt::Write;

use crate::groups::Keep;
use crate::holding::Holding;
use crate::ids::{SeqIdx, SlotId};
use crate::sequence::{Sequence, State};
use crate::state::EngineState;

impl EngineState {
    /// Names the first broken invariant. O(blocks + sequences).
    pub fn check(&self) -> Result<(), String> {
        self.check_blocks()?;
        self.check_slots()?;
        self.check_order()?;
        self.check_flights()?;
        self.queue.check(self.table.num_requests() as u64)?;
        for (_, sequence) in self.table.sequences() {
            sequence.check()?;
        }
        self.check_requests()
    }

    fn check_blocks(&self) -> Result<(), String> {
        let mut references = vec![0; self.config.num_blocks as usize];
        for (_, sequence) in self.table.sequences() {
            if let Some(holding) = sequence.holding() {
                for block in holding.held() {
                    references[block.0 as usize] += 1;
                }
                self.check_groups(holding)?;
            }
        }
        if references[0] != 0 {
            return Err("a sequence holds the null block".into());
        }
        self.cache.check(&references)
    }

    /// Every group's table reaches as far as the holding says, and tables of windows start where they should at latest.
    fn check_groups(&self, holding: &Holding) -> Result<(), String> {
        let slot = holding.slot.0;
        if holding.tables.len() != self.config.groups.len() {
            return Err(format!("slot {slot} has {} tables", holding.tables.len()));
        }
        for (table, keep) in holding.tables.iter().zip(&self.config.groups) {
            let end = table.blocks.len() as u32 * self.config.block_size;
            let is_whole = *keep != Keep::All || table.first == 0;
            if end < holding.capacity || table.first > table.blocks.len() || !is_whole {
                return Err(format!(
                    "slot {slot}: a table of {keep:?} from block {} on ends at {end}",
                    table.first
                ));
            }
        }
        Ok(())
    }

    fn check_slots(&self) -> Result<(), String> {
        let owners: HashMap<SlotId, SeqIdx> = self.slots.owners().collect();
        let mut held = 0;
        for (seq, sequence) in self.table.sequences() {
            if let Some(holding) = sequence.holding() {
                held += 1;
                if owners.get(&holding.slot) != Some(&seq) {
                    return Err(format!("{:?}: its slot is not its own", sequence.key));
                }
            }
        }
        let total = self.config.max_running();
        if owners.len() != held || held as u32 + self.slots.num_free() != total {
            return Err(format!(
                "{held} slots held, {} owned, {} free of {total}",
                owners.len(),
                self.slots.num_free()
            ));
        }
        Ok(())
    }

    fn check_order(&self) -> Result<(), String> {
        let keys: Vec<_> = self
            .running
            .iter()
            .map(|seq| self.table.seq(*seq).key)
            .collect();
        if !keys.is_sorted() {
            return Err("the running sequences are out of order".into());
        }
        if !self.running.iter().all(|seq| self.table.is_running(*seq)) {
            return Err("a sequence in the running list does not run".into());
        }
        for (key, seq) in self.queue.iter() {
            let sequence = self.table.seq(seq);
            if sequence.key != key || !matches!(sequence.state, State::Waiting) {
                return Err(format!("{key:?} is queued, but does not wait"));
            }
        }
        let count = |wanted: fn(&State) -> bool| {
            let sequences = self.table.sequences();
            sequences.filter(|(_, s)| wanted(&s.state)).count()
        };
        let waiting = count(|state| matches!(state, State::Waiting));
        let running = count(|state| matches!(state, State::Running(_)));
        if waiting != self.queue.len() || running != self.running.len() {
            return Err(format!(
                "{waiting} sequences wait and {running} run, but {} are queued and {} listed",
                self.queue.len(),
                self.running.len()
            ));
        }
        Ok(())
    }

    fn check_flights(&self) -> Result<(), String> {
        let (mut rows, mut sampled) = (HashMap::new(), HashMap::new());
        let mut drafted = HashMap::new();
        for step in &self.in_flight {
            for (index, row) in step.rows.iter().enumerate() {
                *rows.entry(row.seq).or_insert(0) += 1;
                *drafted.entry(row.seq).or_insert(0) += row.num_drafted;
                *sampled.entry(row.seq).or_insert(0) +=
                    u32::from(index < step.num_sampled as usize);
            }
        }
        for (seq, sequence) in self.table.sequences() {
            let expected = rows.remove(&seq).unwrap_or(0);
            if sequence.in_flight != expected {
                return Err(format!(
                    "{:?} counts {} rows in flight, there are {expected}",
                    sequence.key, sequence.in_flight
                ));
            }
            let pending = sampled.get(&seq).copied().unwrap_or(0);
            if sequence.is_running() && sequence.num_pending != pending {
                return Err(format!(
                    "{:?} counts {} pending tokens, there are {pending}",
                    sequence.key, sequence.num_pending
                ));
            }
            let drafted = drafted.get(&seq).copied().unwrap_or(0);
            if sequence.is_running() && sequence.drafting.num_in_flight != drafted {
                return Err(format!(
                    "{:?} counts {} drafted tokens, there are {drafted}",
                    sequence.key, sequence.drafting.num_in_flight
                ));
            }
            if matches!(sequence.state, State::Ending(_)) && expected == 0 {
                return Err(format!("{:?} has ended but is still held", sequence.key));
            }
        }
        if rows.is_empty() {
            Ok(())
        } else {
            Err("a row in flight belongs to no sequence".into())
        }
    }

    fn check_requests(&self) -> Result<(), String> {
        for (_, request) in self.table.requests() {
            let live: Vec<&Sequence> = request
                .sequences
                .iter()
                .flatten()
                .map(|seq| self.table.seq(*seq))
                .collect();
            if live.is_empty() || live.len() as u32 != request.num_live {
                return Err(format!(
                    "request {:?} counts {} living sequences, there are {}",
                    request.request_id,
                    request.num_live,
                    live.len()
                ));
            }
            let parked = live.iter().any(|s| matches!(s.state, State::Parked));
            if parked && !live.iter().any(|s| s.leads) {
                return Err(format!(
                    "request {:?} has parked sequences without a leading one",
                    request.request_id
                ));
            }
        }
        Ok(())
    }

    /// The state for people, one line a sequence.
    pub fn dump(&self) -> String {
        let mut text = String::new();
        let _ = writeln!(text, "{:?}", self.config);
        let _ = writeln!(text, "{:?}", self.stats);
        let _ = writeln!(
            text,
            "{} free blocks, {} free slots, {} queued",
            self.cache.num_free(),
            self.slots.num_free(),
            self.queue.len()
        );
        for (seq, s) in self.table.sequences() {
            let state = match &s.state {
                State::Parked => "parked".to_owned(),
                State::Waiting => "waiting".to_owned(),
                State::Running(h) => format!("running in slot {} with {:?}", h.slot.0, h.tables),
                State::Ending(h) => format!("ending in slot {} with {:?}", h.slot.0, h.tables),
            };
            let _ = writeln!(
                text,
                "sequence {}: {:?} of {:?}, prompt {}, output {} + {}, computed {}, committed {}, in flight {}, {state}",
                seq.0,
                s.key,
                s.client,
                s.prompt.len(),
                s.output.len(),
                s.num_pending,
                s.num_computed,
                s.num_committed,
                s.in_flight,
            );
        }
        for step in &self.in_flight {
            let _ = writeln!(text, "in flight: {step:?}");
        }
        text
    }
}
