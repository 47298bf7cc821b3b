//! How many threads fill masks: a lane of parsers each.

use std::sync::OnceLock;

/// More threads than that only take cores from the runner.
const MAX_THREADS: usize = 8;

/// How many lanes a grammar has: as many as threads.
pub fn num_lanes() -> usize {
    // The answer is read from files: too slow for every step.
    static NUM_LANES: OnceLock<usize> = OnceLock::new();
    *NUM_LANES.get_or_init(|| {
        std::thread::available_parallelism().map_or(1, |cores| cores.get().min(MAX_THREADS))
    })
}
