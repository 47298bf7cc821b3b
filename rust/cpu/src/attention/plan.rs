//! Checks one call's indices (sizes: args.rs), and cuts it into work items.
//!
//! Everything that kernels later use as an index is copied here after it has been checked, so nobody can change it in
//! between.

use std::ops::Range;

use super::args::{AttentionArgs, check_sizes};
use super::segment::segments;
use crate::error::KernelError;
use crate::scratch::MAX_ROWS;

/// Work items per thread below which long rows are split.
const ITEMS_PER_THREAD: usize = 4;

/// One row of the batch, checked.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Index of its first token.
    pub token: usize,
    pub num_queries: usize,
    /// Position of its first query.
    pub position: usize,
    /// Its entry for block `first_block` of its table is `Plan::blocks[block_start]`.
    pub block_start: usize,
    pub first_block: usize,
}

/// What one thread does at a time: some (query, head) pairs of one row and KV head against a range of keys.
#[derive(Clone, Copy, Debug)]
pub struct Item {
    pub row: usize,
    pub kv_head: usize,
    /// Pairs [first, last) of the row: pair p is query p / group, head `kv_head` * group + p % group.
    pub first: usize,
    pub last: usize,
    /// Positions [low, high) of the keys.
    pub low: usize,
    pub high: usize,
    /// The split that this is part of.
    pub split: Option<usize>,
    /// Where its partial result starts in the partials' buffer.
    pub partial: usize,
}

impl Item {
    pub fn num_pairs(&self) -> usize {
        self.last - self.first
    }

    /// Floats of a partial result: per pair its unscaled output, then per pair the maximum, then the sum.
    pub fn partial_len(&self, head_dim: usize) -> usize {
        self.num_pairs() * (head_dim + 2)
    }
}

/// Items that share pairs and each see some of the keys.
#[derive(Clone, Copy, Debug)]
pub struct Split {
    /// Where their partial results start in the partials' buffer; part i is i * `partial_len` behind.
    pub partial: usize,
    pub num_parts: usize,
}

/// A checked call. Reused, so that a steady state allocates nothing.
#[derive(Default)]
pub struct Plan {
    pub rows: Vec<Row>,
    pub blocks: Vec<usize>,
    pub items: Vec<Item>,
    pub splits: Vec<Split>,
    /// Floats that partial results need.
    pub partials: usize,
    /// Tokens from here on belong to no row.
    pub num_used_tokens: usize,
}

impl Plan {
    /// Check `args` and fill the plan. Nothing is read but the four index arrays.
    ///
    /// # Safety
    /// The index arrays hold as many numbers as the sizes in `args` say.
    pub unsafe fn fill(&mut self, args: &AttentionArgs) -> Result<(), KernelError> {
        check_sizes(args)?;
        self.rows.clear();
        self.blocks.clear();
        self.items.clear();
        self.splits.clear();
        self.partials = 0;
        let mut token = 0;
        for row in 0..args.num_rows {
            // SAFETY: query_start holds num_rows + 1 numbers.
            let (start, end) =
                unsafe { (*args.query_start.add(row), *args.query_start.add(row + 1)) };
            if usize::try_from(start) != Ok(token) {
                return Err(query_start_error(row, start, args));
            }
            let end = usize::try_from(end)
                .ok()
                .filter(|&end| (token..=args.num_tokens).contains(&end));
            // SAFETY: as above.
            let end = end.ok_or_else(|| {
                query_start_error(row + 1, unsafe { *args.query_start.add(row + 1) }, args)
            })?;
            if end > token {
                // SAFETY: the index arrays are as long as the sizes say.
                unsafe { self.add_row(args, row, token, end - token)? };
                token = end;
            }
        }
        self.num_used_tokens = token;
        self.add_items(args);
        self.split_long(args);
        Ok(())
    }

    /// Check row `row`, of `num_queries` queries from `token` on.
    ///
    /// # Safety
    /// As `fill`.
    unsafe fn add_row(
        &mut self,
        args: &AttentionArgs,
        row: usize,
        token: usize,
        num_queries: usize,
    ) -> Result<(), KernelError> {
        // SAFETY: row < num_rows.
        let (slot, length) = unsafe { read_row(args, row, num_queries)? };
        let position = length - num_queries;
        let first_block = first_visible(position, args.window) / args.block_size;
        let block_start = self.blocks.len();
        // SAFETY: slot < num_slots, and the row fits its table.
        unsafe { self.add_blocks(args, slot, first_block..length.div_ceil(args.block_size))? };
        self.rows.push(Row {
            token,
            num_queries,
            position,
            block_start,
            first_block,
        });
        Ok(())
    }

    /// Cut the rows into items, row by row; those that begin with the same block one KV head after the other, so that the
    /// keys that they share stay in the second-level cache.
    fn add_items(&mut self, args: &AttentionArgs) {
        let group = args.num_heads / args.num_kv_heads;
        let block = |row: &Row| (row.first_block, self.blocks.get(row.block_start));
        let mut index = 0;
        for rows in self.rows.chunk_by(|a, b| block(a) == block(b)) {
            for kv_head in 0..args.num_kv_heads {
                for (i, row) in rows.iter().enumerate() {
                    // Late tiles see the most keys: first, so that no thread is left with a long one at the end.
                    let num_pairs = row.num_queries * group;
                    for tile in (0..num_pairs.div_ceil(MAX_ROWS)).rev() {
                        let (first, last) = (tile * MAX_ROWS, num_pairs.min((tile + 1) * MAX_ROWS));
                        self.items.push(Item {
                            row: index + i,
                            kv_head,
                            first,
                            last,
                            low: first_visible(row.position + first / group, args.window),
                            high: row.position + (last - 1) / group + 1,
                            split: None,
                            partial: 0,
                        });
                    }
                }
            }
            index += rows.len();
        }
    }

    /// Copy entries of a slot's table, checked.
    ///
    /// # Safety
    /// As `fill`; slot < `num_slots` and the range is within `max_blocks_per_slot`.
    unsafe fn add_blocks(
        &mut self,
        args: &AttentionArgs,
        slot: usize,
        indices: Range<usize>,
    ) -> Result<(), KernelError> {
        for index in indices {
            let entry = slot * args.max_blocks_per_slot + index;
            // SAFETY: the caller's.
            let block = i64::from(unsafe { *args.block_table.add(entry) });
            match usize::try_from(block) {
                Ok(id) if id < args.num_blocks => self.blocks.push(id),
                _ => {
                    return Err(KernelError::Block {
                        slot,
                        index,
                        block,
                        num_blocks: args.num_blocks,
                    });
                }
            }
        }
        Ok(())
    }

    /// With fewer items than keep all threads busy, cut those with many keys into their segments.
    fn split_long(&mut self, args: &AttentionArgs) {
        let count = self.items.len();
        if args.num_threads == 1 || count >= ITEMS_PER_THREAD * args.num_threads {
            return;
        }
        for index in 0..count {
            let item = self.items[index];
            let num_parts = segments(item.low, item.high).count();
            if num_parts < 2 {
                continue;
            }
            let split = self.splits.len();
            self.splits.push(Split {
                partial: self.partials,
                num_parts,
            });
            for positions in segments(item.low, item.high) {
                let part = Item {
                    low: positions.start,
                    high: positions.end,
                    split: Some(split),
                    partial: self.partials,
                    ..item
                };
                self.partials += item.partial_len(args.head_dim);
                if positions.start == item.low {
                    self.items[index] = part;
                } else {
                    self.items.push(part);
                }
            }
        }
    }
}

/// (slot, kv length) of a row, checked.
///
/// # Safety
/// row < `num_rows`, and the arrays are that long.
unsafe fn read_row(
    args: &AttentionArgs,
    row: usize,
    num_queries: usize,
) -> Result<(usize, usize), KernelError> {
    // SAFETY: the caller's.
    let (slot, kv_len) = unsafe { (*args.row_slot.add(row), *args.kv_len.add(row)) };
    let (slot, kv_len) = (i64::from(slot), i64::from(kv_len));
    let capacity = args.max_blocks_per_slot * args.block_size;
    let fits = |n: &usize| (num_queries..=capacity).contains(n);
    let num_slots = args.num_slots;
    let known = usize::try_from(slot).ok().filter(|&s| s < num_slots);
    let length = usize::try_from(kv_len).ok().filter(fits);
    Ok((
        known.ok_or(KernelError::Slot {
            row,
            slot,
            num_slots,
        })?,
        length.ok_or(KernelError::KvLen {
            row,
            kv_len,
            num_queries,
            capacity,
        })?,
    ))
}

/// The first position that a query at `position` sees.
fn first_visible(position: usize, window: usize) -> usize {
    if window == 0 {
        0
    } else {
        (position + 1).saturating_sub(window)
    }
}

fn query_start_error(index: usize, value: i32, args: &AttentionArgs) -> KernelError {
    KernelError::QueryStart {
        index,
        value: i64::from(value),
        num_tokens: args.num_tokens,
    }
}
