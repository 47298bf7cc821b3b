//! Work on many guides at once, on a few threads: taking tokens in, and filling masks.
//!
//! Guides of one lane share caches behind a lock, so a lane is the unit of work: no thread waits for another.

use std::slice::ChunksExactMut;

use rayon::{ThreadPool, ThreadPoolBuilder};

use super::guide::Guide;
use super::lanes::num_lanes;
use crate::ids::TokenId;

/// Parsers recurse over what a client wrote.
const STACK_BYTES: usize = 16 << 20;

/// Microseconds of work from which on it is worth waking threads.
const PARALLEL_WEIGHT: usize = 150;

/// One guide's share of a batch.
pub struct Task<'a> {
    /// The caller's number for it; tasks are sorted by lane.
    pub index: usize,
    pub guide: Box<Guide>,
    /// What may follow, and what may follow each token of the draft; `None`: only tokens are taken in.
    pub masks: Option<ChunksExactMut<'a, i32>>,
    pub draft: &'a [TokenId],
}

impl Task<'_> {
    /// About how many microseconds it takes.
    fn weight(&self) -> usize {
        if self.masks.is_some() {
            20 * (1 + self.draft.len())
        } else {
            2
        }
    }

    fn run(&mut self) {
        match &mut self.masks {
            Some(masks) => self.guide.fill_drafted(masks, self.draft),
            None => self.guide.advance(),
        }
    }
}

/// The threads; started when first needed.
#[derive(Default)]
pub struct MaskPool {
    pool: Option<ThreadPool>,
}

impl std::fmt::Debug for MaskPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("MaskPool")
    }
}

impl MaskPool {
    /// Runs every task; few of them on the caller's thread.
    pub fn run(&mut self, tasks: &mut [Task<'_>]) {
        let num_lanes = num_lanes();
        let is_little = tasks.iter().map(Task::weight).sum::<usize>() < PARALLEL_WEIGHT;
        if is_little || num_lanes == 1 {
            tasks.iter_mut().for_each(Task::run);
            return;
        }
        if self.pool.is_none() {
            let builder = ThreadPoolBuilder::new()
                .num_threads(num_lanes - 1)
                .stack_size(STACK_BYTES)
                .thread_name(|index| format!("octavo-mask-{index}"));
            // Without threads the caller does it all.
            self.pool = builder.build().ok();
        }
        let Some(pool) = &self.pool else {
            tasks.iter_mut().for_each(Task::run);
            return;
        };
        tasks.sort_by_key(|task| task.guide.lane());
        let mut lanes = tasks.chunk_by_mut(|a, b| a.guide.lane() == b.guide.lane());
        let first = lanes.next();
        pool.in_place_scope(|scope| {
            for lane in lanes {
                scope.spawn(|_| lane.iter_mut().for_each(Task::run));
            }
            // The caller need not be woken.
            first.into_iter().flatten().for_each(Task::run);
        });
    }
}
