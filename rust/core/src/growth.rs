//! Gives running sequences the blocks of their next tokens. Who is pushed out when there are none is `scheduler`'s
//! business; what a sequence starts with `admission`'s.

use crate::ids::SeqIdx;
use crate::scheduler::Planner;

impl Planner<'_> {
    /// Blocks that a running sequence lacks for its first `end` positions.
    pub fn num_lacking(&self, seq: SeqIdx, end: u32) -> u32 {
        let holding = self.state.table.seq(seq).holding();
        let holding = holding.expect("a running sequence");
        holding.num_lacking(end, self.state.config.block_size)
    }

    /// Gives a running sequence the blocks of its first `end` positions, which must be there.
    pub fn extend(&mut self, seq: SeqIdx, end: u32) {
        let state = &mut *self.state;
        let block_size = state.config.block_size;
        let wanted = end.div_ceil(block_size) as usize;
        let holding = state.table.seq_mut(seq).running_mut();
        for (group, table) in holding.tables.iter_mut().enumerate() {
            while table.blocks.len() < wanted {
                let block = state.cache.take().expect("a free block");
                let index = table.blocks.len() as u32;
                self.writer.block_update(group, holding.slot, index, block);
                table.blocks.push(block);
            }
        }
        holding.count(block_size);
    }

    /// How many of the next `len` tokens of a prompt can have blocks; they have them then. Only groups of windows may
    /// lack any; they give back what they read no more, and get at least as much.
    pub fn make_way(&mut self, seq: SeqIdx, len: u32) -> u32 {
        let sequence = self.state.table.seq_mut(seq);
        let start = sequence.num_computed;
        let end = start + len;
        let capacity = sequence.running_mut().capacity;
        if end <= capacity {
            return len;
        }
        let before = self.state.cache.num_free();
        self.state.cut(seq);
        let free = self.state.cache.num_free();
        let most = (free - before).max(free.saturating_sub(self.reserve()));
        self.reach(seq, end, most) - start
    }

    /// As far as a running sequence can have blocks of its first `end` positions, of which `most` may be taken; it has
    /// them then.
    pub fn reach(&mut self, seq: SeqIdx, end: u32, most: u32) -> u32 {
        let most = most.min(self.writer.block_updates_left());
        let block_size = self.state.config.block_size;
        let capacity = self.state.table.seq_mut(seq).running_mut().capacity;
        let mut fit = end;
        while fit > capacity && self.num_lacking(seq, fit) > most {
            fit = (fit - 1) / block_size * block_size;
        }
        if fit > capacity {
            self.extend(seq, fit);
        }
        fit.max(capacity).min(end)
    }
}
