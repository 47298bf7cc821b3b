//! Checks one call's indices (sizes: args.rs). How rows are cut into work items: items.rs.
//!
//! Everything that kernels later use as an index is copied here after it has been checked, so nobody can change it in
//! between.

use std::ops::Range;

use super::args::{AttentionArgs, check_sizes};
use crate::error::KernelError;
use crate::simd::GROUP;

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
    /// Its first query in `Plan::queries`.
    pub first_query: usize,
    /// Where its keys are seen by several items.
    pub parts: Option<Parts>,
}

/// Results of a row for each segment of its keys, to be merged in the segments' order.
#[derive(Clone, Copy, Debug, Default)]
pub struct Parts {
    /// Where they start in the partials' buffer: `[kv heads, pairs, num_segments]` of `len` floats each: the unscaled output
    /// in whole vectors, the greatest score, the sum of weights.
    pub partial: usize,
    pub first_segment: usize,
    pub num_segments: usize,
    /// Of its first KV head in `Plan::counts`.
    pub counter: usize,
}

impl Parts {
    /// Floats of a pair's result of one segment.
    pub fn len(head_dim: usize) -> usize {
        Parts::greatest(head_dim) + 2
    }

    /// Where among them the greatest score is; the sum follows. No vector of the output reaches what other threads write.
    pub fn greatest(head_dim: usize) -> usize {
        head_dim.next_multiple_of(GROUP)
    }

    /// Where the result of a pair (counted from the row's first) of a segment starts.
    pub fn place(
        &self,
        args: &AttentionArgs,
        row: &Row,
        (kv_head, pair): (usize, usize),
        segment: usize,
    ) -> usize {
        let num_pairs = row.num_queries * (args.num_heads / args.num_kv_heads);
        let line = (kv_head * num_pairs + pair) * self.num_segments;
        self.partial + (line + segment - self.first_segment) * Parts::len(args.head_dim)
    }
}

/// A query, in the order of the plan's rows.
#[derive(Clone, Copy, Debug)]
pub struct Query {
    pub row: usize,
    pub token: usize,
    pub position: usize,
}

/// What one thread does at a time: some (query, head) pairs of one KV head against a range of keys that they all have.
#[derive(Clone, Copy, Debug)]
pub struct Item {
    /// Whose table says where the keys are.
    pub row: usize,
    pub kv_head: usize,
    /// Pairs [first, last): pair p is query p / group of `Plan::queries`, head `kv_head` * group + p % group.
    pub first: usize,
    pub last: usize,
    /// Positions [low, high) of the keys.
    pub low: usize,
    pub high: usize,
}

impl Item {
    pub fn num_pairs(&self) -> usize {
        self.last - self.first
    }
}

/// A checked call. Reused, so that a steady state allocates nothing.
#[derive(Default)]
pub struct Plan {
    /// Those that share their first keys follow each other.
    pub rows: Vec<Row>,
    pub blocks: Vec<usize>,
    pub queries: Vec<Query>,
    pub items: Vec<Item>,
    /// Of each row with parts and KV head: the items that see its keys.
    pub counts: Vec<usize>,
    /// Floats that partial results need.
    pub partials: usize,
    /// Tokens from here on belong to no row.
    pub num_used_tokens: usize,
    /// Of each row but the last: segments of keys that it shares with the next.
    pub(super) common: Vec<usize>,
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
        self.cut(args);
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
            first_query: 0,
            parts: None,
        });
        Ok(())
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
pub fn first_visible(position: usize, window: usize) -> usize {
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
