//! A few threads that sleep until there is a job, then run one function each. Not a work queue: jobs share their work
//! through an atomic counter of their own.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

type Job = &'static (dyn Fn() + Sync);

/// What workers and the caller share.
#[derive(Default)]
struct State {
    /// Raised by one for every job.
    epoch: u64,
    job: Option<Job>,
    /// Workers that still have to start this epoch's job.
    wanted: usize,
    /// Workers that have started and not finished.
    running: usize,
    panic: Option<Box<dyn Any + Send>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    start: Condvar,
    done: Condvar,
}

impl Shared {
    /// No code runs under the lock that can leave the state broken, so a poisoned lock is as good as any.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut seen = 0;
        let mut state = self.lock();
        loop {
            if state.epoch == seen || state.wanted == 0 {
                seen = state.epoch;
                state = self
                    .start
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            seen = state.epoch;
            state.wanted -= 1;
            state.running += 1;
            let job = state.job;
            drop(state);
            let result = job.map_or(Ok(()), |job| catch_unwind(AssertUnwindSafe(job)));
            state = self.lock();
            state.running -= 1;
            if let Err(panic) = result {
                state.panic = Some(panic);
            }
            if state.running == 0 && state.wanted == 0 {
                self.done.notify_one();
            }
        }
    }
}

/// Threads that live as long as the process. Callers take turns: `run` needs `&mut`.
#[derive(Default)]
pub struct Pool {
    shared: Arc<Shared>,
    num_workers: usize,
}

impl Pool {
    /// Run `f` on the calling thread and on up to `num_threads - 1` others, and return when all are done.
    ///
    /// `f` must share out its work itself, and must do all of it if it runs once: workers that could not be spawned are
    /// gone without, and the caller takes back the calls that no worker has started when it is through.
    pub fn run(&mut self, num_threads: usize, f: &(dyn Fn() + Sync)) {
        let wanted = self.grow(num_threads.saturating_sub(1));
        if wanted == 0 {
            return f();
        }
        // SAFETY: only the lifetime changes; this function does not return before all workers are done with `f` and the
        // reference is forgotten.
        let job: Job = unsafe { std::mem::transmute::<&(dyn Fn() + Sync), Job>(f) };
        {
            let mut state = self.shared.lock();
            state.epoch += 1;
            state.job = Some(job);
            state.wanted = wanted;
        }
        if wanted == 1 && self.num_workers == 1 {
            self.shared.start.notify_one();
        } else {
            self.shared.start.notify_all();
        }
        let own = catch_unwind(AssertUnwindSafe(f));
        let panic = {
            let mut state = self.shared.lock();
            state.wanted = 0;
            while state.running > 0 {
                state = self
                    .shared
                    .done
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            state.job = None;
            state.panic.take()
        };
        if let Some(panic) = own.err().or(panic) {
            resume_unwind(panic);
        }
    }

    /// Have up to `count` workers; the number that there is.
    fn grow(&mut self, count: usize) -> usize {
        while self.num_workers < count {
            let shared = Arc::clone(&self.shared);
            let name = format!("octavo-cpu-{}", self.num_workers + 1);
            if thread::Builder::new()
                .name(name)
                .spawn(move || shared.work())
                .is_err()
            {
                break;
            }
            self.num_workers += 1;
        }
        count.min(self.num_workers)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn all_work_is_done_whatever_the_number_of_threads() {
        let mut pool = Pool::default();
        for num_threads in [1, 2, 5, 3, 1, 8] {
            for _ in 0..200 {
                let (next, sum) = (AtomicUsize::new(0), AtomicUsize::new(0));
                pool.run(num_threads, &|| {
                    loop {
                        let i = next.fetch_add(1, Ordering::Relaxed);
                        if i >= 100 {
                            break;
                        }
                        sum.fetch_add(i, Ordering::Relaxed);
                    }
                });
                assert_eq!(sum.into_inner(), 4950);
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives() {
        let mut pool = Pool::default();
        let result = catch_unwind(AssertUnwindSafe(|| pool.run(3, &|| panic!("boom"))));
        assert!(result.is_err());
        let count = AtomicUsize::new(0);
        pool.run(3, &|| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert!(count.into_inner() >= 1);
    }
}
