//! Cuts a plan's rows into work items, and says whose results are to be merged.
//!
//! Rows of few queries whose sequences begin with the same blocks (prompts with a common beginning) see those keys
//! together, as one row of as many queries would: each key is read once for all of them. That, and rows that are cut for
//! idle threads, leave a result for each segment (segment.rs), so that nobody sees who shared what.

use std::ops::Range;

use super::args::AttentionArgs;
use super::plan::{Item, Parts, Plan, Query, Row, first_visible};
use super::segment::{SEGMENT, segments};
use crate::scratch::MAX_ROWS;

/// Work items per thread below which long rows are split.
const ITEMS_PER_THREAD: usize = 4;
/// Pairs of a row and KV head up to which it shares: more fill the kernels' tiles by themselves.
const MAX_SHARING: usize = MAX_ROWS / 2;

impl Plan {
    /// Cut the rows, which are checked.
    pub(super) fn cut(&mut self, args: &AttentionArgs) {
        self.items.clear();
        self.order(args);
        let mut start = 0;
        while start < self.rows.len() {
            let mut end = start + 1;
            while end < self.rows.len() && self.beginning(end) == self.beginning(start) {
                end += 1;
            }
            // One KV head after the other, so that the keys that the rows share stay in the second-level cache.
            for kv_head in 0..args.num_kv_heads {
                self.add_items(args, kv_head, start..end, 0);
            }
            start = end;
        }
        self.split_long(args);
        self.count_parts(args);
    }

    /// What rows have in common that share any keys.
    fn beginning(&self, row: usize) -> (usize, Option<usize>) {
        let row = &self.rows[row];
        (row.first_block, self.blocks.get(row.block_start).copied())
    }

    /// Have rows that share keys follow each other, see how many they share, and list their queries.
    fn order(&mut self, args: &AttentionArgs) {
        let group = args.num_heads / args.num_kv_heads;
        let is_large = |row: &Row| row.num_queries * group > MAX_SHARING;
        let blocks = &self.blocks;
        // What the row found: whole blocks before its first query.
        let found = |row: &Row| {
            let end = row.position / args.block_size;
            &blocks[row.block_start..][..end.saturating_sub(row.first_block)]
        };
        let key = |row: &Row| (is_large(row), row.first_block, found(row), row.token);
        self.rows.sort_unstable_by(|a, b| key(a).cmp(&key(b)));
        self.common.clear();
        for pair in self.rows.windows(2) {
            let shared = if args.window > 0 || pair.iter().any(is_large) {
                0
            } else {
                let pairs = found(&pair[0]).iter().zip(found(&pair[1]));
                pairs.take_while(|(a, b)| a == b).count()
            };
            self.common.push(shared * args.block_size / SEGMENT);
        }
        self.queries.clear();
        for (index, row) in self.rows.iter_mut().enumerate() {
            row.first_query = self.queries.len();
            self.queries.extend((0..row.num_queries).map(|query| Query {
                row: index,
                token: row.token + query,
                position: row.position + query,
            }));
        }
    }

    /// Items of some rows that share `from` segments or more, which are done: what they all share besides, then what some of
    /// them do.
    fn add_items(&mut self, args: &AttentionArgs, kv_head: usize, rows: Range<usize>, from: usize) {
        let Some(&shared) = self.common[rows.start..rows.end - 1].iter().min() else {
            return self.add_lone(args, kv_head, rows.start, from);
        };
        if shared > from {
            let group = args.num_heads / args.num_kv_heads;
            let last = &self.rows[rows.end - 1];
            let end = (last.first_query + last.num_queries) * group;
            let start = self.rows[rows.start].first_query * group;
            for segment in from..shared {
                for first in (start..end).step_by(MAX_ROWS) {
                    self.items.push(Item {
                        row: rows.start,
                        kv_head,
                        first,
                        last: end.min(first + MAX_ROWS),
                        low: segment * SEGMENT,
                        high: (segment + 1) * SEGMENT,
                    });
                }
            }
            for row in &mut self.rows[rows.clone()] {
                row.parts = Some(Parts::default());
            }
        }
        let mut start = rows.start;
        for row in rows.clone() {
            if row + 1 == rows.end || self.common[row] == shared {
                self.add_items(args, kv_head, start..row + 1, shared);
                start = row + 1;
            }
        }
    }

    /// Items of one row behind its first `from` segments.
    fn add_lone(&mut self, args: &AttentionArgs, kv_head: usize, index: usize, from: usize) {
        let group = args.num_heads / args.num_kv_heads;
        let row = &self.rows[index];
        let num_pairs = row.num_queries * group;
        let start = row.first_query * group;
        // Late tiles see the most keys: first, so that no thread is left with a long one at the end.
        for tile in (0..num_pairs.div_ceil(MAX_ROWS)).rev() {
            let (first, last) = (tile * MAX_ROWS, num_pairs.min((tile + 1) * MAX_ROWS));
            let visible = first_visible(row.position + first / group, args.window);
            self.items.push(Item {
                row: index,
                kv_head,
                first: start + first,
                last: start + last,
                low: visible.max(from * SEGMENT),
                high: row.position + (last - 1) / group + 1,
            });
        }
    }

    /// With fewer items than keep all threads busy, cut those with many keys into their segments.
    fn split_long(&mut self, args: &AttentionArgs) {
        let count = self.items.len();
        if args.num_threads == 1 || count >= ITEMS_PER_THREAD * args.num_threads {
            return;
        }
        for index in 0..count {
            let item = self.items[index];
            if segments(item.low, item.high).count() < 2 {
                continue;
            }
            for positions in segments(item.low, item.high) {
                let part = Item {
                    low: positions.start,
                    high: positions.end,
                    ..item
                };
                if positions.start == item.low {
                    self.items[index] = part;
                } else {
                    self.items.push(part);
                }
            }
            self.rows[item.row].parts = Some(Parts::default());
        }
    }

    /// Give rows with parts their places, and count the items that fill them.
    fn count_parts(&mut self, args: &AttentionArgs) {
        let group = args.num_heads / args.num_kv_heads;
        self.partials = 0;
        self.counts.clear();
        for row in &mut self.rows {
            let Some(parts) = &mut row.parts else {
                continue;
            };
            let first_segment = first_visible(row.position, args.window) / SEGMENT;
            let end = (row.position + row.num_queries).div_ceil(SEGMENT);
            *parts = Parts {
                partial: self.partials,
                first_segment,
                num_segments: end - first_segment,
                counter: self.counts.len(),
            };
            let num_results = args.num_heads * row.num_queries * parts.num_segments;
            self.partials += num_results * Parts::len(args.head_dim);
            self.counts.resize(parts.counter + args.num_kv_heads, 0);
        }
        for item in &self.items {
            for row in self.rows_of(item, group) {
                if let Some(parts) = &self.rows[row].parts {
                    self.counts[parts.counter + item.kv_head] += 1;
                }
            }
        }
    }

    /// Rows that an item's pairs are of.
    pub fn rows_of(&self, item: &Item, group: usize) -> Range<usize> {
        let row = |pair: usize| self.queries[pair / group].row;
        row(item.first)..row(item.last - 1) + 1
    }
}
