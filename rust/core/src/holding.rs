//! What a sequence holds on the device: its slot, and its blocks in every cache group.
//!
//! A group's table grows at its end and is given back from its start, when its layers read that no more. Which blocks
//! come and go is decided in `scheduler` and `admission`; here are the sums.

use crate::groups::Keep;
use crate::ids::{BlockId, SlotId};

/// A sequence's blocks in one group: `blocks[i]` has the positions from `i * block_size` on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockTable {
    /// Those before `first` are not held (any more); their ids mean nothing.
    pub blocks: Vec<BlockId>,
    pub first: usize,
}

impl BlockTable {
    pub fn held(&self) -> &[BlockId] {
        &self.blocks[self.first..]
    }

    /// The blocks that layers which keep `keep` read no more once `num_committed` tokens are done; out of the table.
    fn cut(&mut self, keep: Keep, num_committed: u32, block_size: u32) -> Vec<BlockId> {
        let first = (keep.first_read(num_committed) / block_size) as usize;
        let first = first.min(self.blocks.len());
        if first <= self.first {
            return Vec::new();
        }
        let given = self.blocks[self.first..first].to_vec();
        self.first = first;
        given
    }
}

#[derive(Debug)]
pub struct Holding {
    pub slot: SlotId,
    /// One a group.
    pub tables: Vec<BlockTable>,
    /// Positions that have a block in every group, from those on that it reads.
    pub capacity: u32,
}

impl Holding {
    pub fn new(slot: SlotId, tables: Vec<BlockTable>, block_size: u32) -> Self {
        let mut holding = Self {
            slot,
            tables,
            capacity: 0,
        };
        holding.count(block_size);
        holding
    }

    /// Brings `capacity` up to date.
    pub fn count(&mut self, block_size: u32) {
        let ends = self.tables.iter().map(|table| table.blocks.len());
        self.capacity = ends.min().map_or(0, |end| end as u32 * block_size);
    }

    /// Blocks of all groups.
    pub fn held(&self) -> impl Iterator<Item = BlockId> {
        self.tables.iter().flat_map(BlockTable::held).copied()
    }

    pub fn num_held(&self) -> usize {
        self.tables.iter().map(|table| table.held().len()).sum()
    }

    /// Blocks that it lacks for its first `end` positions.
    pub fn num_lacking(&self, end: u32, block_size: u32) -> u32 {
        let wanted = end.div_ceil(block_size);
        let lacking = |table: &BlockTable| wanted.saturating_sub(table.blocks.len() as u32);
        self.tables.iter().map(lacking).sum()
    }

    /// Takes the blocks out that no later row reads.
    pub fn cut(&mut self, groups: &[Keep], num_committed: u32, block_size: u32) -> Vec<BlockId> {
        let mut given = Vec::new();
        for (table, keep) in self.tables.iter_mut().zip(groups) {
            if *keep != Keep::All {
                given.append(&mut table.cut(*keep, num_committed, block_size));
            }
        }
        given
    }
}
