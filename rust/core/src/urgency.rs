//! Under the priority policy: takes slots and blocks from the least urgent sequences for more urgent ones that wait.
//!
//! Only a strictly more urgent sequence pushes another one out, and only when that makes it fit; the one pushed out
//! waits behind it and can't push back. So nobody is pushed to and fro, and equal priorities (all of FCFS) never meet
//! here. A sequence with rows in flight is withheld from plans until they have retired.

use std::collections::HashMap;

use crate::holding::Holding;
use crate::ids::{BlockId, SeqIdx};
use crate::queue::QueueKey;
use crate::scheduler::Planner;

/// What newcomers may count on.
struct Room {
    num_slots: usize,
    num_blocks: u32,
    /// Running sequences from here on are pushed out.
    end: usize,
    /// How many references to a block those pushed out give back.
    given: HashMap<BlockId, u32>,
}

impl Planner<'_> {
    /// How many of the running sequences may have rows in this step; the others are pushed out as soon as they can be.
    pub fn make_room(&mut self) -> usize {
        let mut room = Room {
            // Slots of sequences that have ended come back by themselves.
            num_slots: self.state.config.max_running() as usize - self.state.running.len(),
            num_blocks: self.state.cache.num_free(),
            end: self.state.running.len(),
            given: HashMap::new(),
        };
        let mut budget = self.state.config.max_num_batched_tokens;
        let mut next = self.state.queue.first();
        while let Some((key, seq)) = next
            && budget > 0
            && self.is_less_urgent(room.end, key)
            && self.comes_soon(&room, seq)
        {
            let Some(end) = self.fit(&mut room, key, seq) else {
                break;
            };
            room.end = end;
            budget = budget.saturating_sub(self.state.table.seq(seq).num_remaining());
            next = self.state.queue.after(key);
        }
        for at in (room.end..self.state.running.len()).rev() {
            let victim = self.state.running[at];
            if self.state.table.seq(victim).in_flight == 0 {
                self.state.preempt(victim);
                self.state.running.remove(at);
            }
        }
        room.end
    }

    /// Whether the last of the first `end` running sequences is less urgent than `key`.
    fn is_less_urgent(&self, end: usize, key: QueueKey) -> bool {
        let last = end.checked_sub(1).map(|at| self.state.running[at]);
        last.is_some_and(|seq| self.state.table.seq(seq).key.priority > key.priority)
    }

    /// Whether a waiting sequence would get tokens: the first running prompt is not before it, or is longer.
    fn comes_soon(&self, room: &Room, seq: SeqIdx) -> bool {
        let table = &self.state.table;
        let waiting = table.seq(seq);
        let running = self.state.running[..room.end].iter();
        let mut prompts = running
            .map(|other| table.seq(*other))
            .filter(|other| other.num_remaining() > 1);
        prompts.next().is_none_or(|first| {
            waiting.key < first.key || waiting.num_remaining() < first.num_remaining()
        })
    }

    /// Finds room for a waiting sequence; who must go for it, as a new end of the running ones. `None`: it can't be.
    fn fit(&mut self, room: &mut Room, key: QueueKey, seq: SeqIdx) -> Option<usize> {
        let needed = self.demand(seq).needed;
        let mut end = room.end;
        while (room.num_slots == 0 || room.num_blocks < needed) && self.is_less_urgent(end, key) {
            end -= 1;
            room.num_slots += 1;
            let holding = self.state.table.seq(self.state.running[end]).holding();
            for block in holding.into_iter().flat_map(Holding::held) {
                let given = room.given.entry(block).or_insert(0);
                *given += 1;
                room.num_blocks += u32::from(*given == self.state.cache.num_references(block));
            }
        }
        if room.num_slots == 0 || room.num_blocks < needed {
            return None;
        }
        room.num_slots -= 1;
        room.num_blocks -= needed;
        Some(end)
    }
}
