//! Threads that run one parallel region at a time, and the team that a region's function sees: its index, barriers,
//! its share of the work. Not a work queue.
//!
//! A whole decoder step is meant to be one region with barriers inside. Whoever waits spins for a moment first (signal.rs
//! says how long), then sleeps; an idle pool uses no processor time.

use std::any::Any;
use std::cell::Cell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::signal::{Patience, Signal};

/// A wait at a barrier was for a thread that did not run if it is as long, and so many times as long as the waiting
/// thread's own work before it.
const STALL: Duration = Duration::from_micros(500);
const STALL_RATIO: u32 = 4;

/// A region's function. No reference: workers that are not of the region read it when the function may be gone.
#[derive(Clone, Copy)]
struct Job(*const (dyn Fn(&Team<'_>) + Sync));

// SAFETY: what it points to is `Sync`, and only threads of its region use it, while it lives.
unsafe impl Send for Job {}

/// The region that runs, as workers read it.
#[derive(Clone, Copy)]
struct Region {
    /// Value of `start` from which it runs.
    epoch: u64,
    /// None: stop.
    job: Option<Job>,
    num_threads: usize,
}

struct Crew {
    /// Read by workers after `start` moved.
    region: Mutex<Region>,
    start: Signal,
    /// Workers of the region that are not through.
    running: AtomicUsize,
    finished: Signal,
    meeting: Meeting,
    /// The first panic of a region.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// Where the threads of a region wait for each other.
#[derive(Default)]
struct Meeting {
    arrived: AtomicUsize,
    released: Signal,
    /// A thread of the region panicked and will not arrive.
    broken: AtomicBool,
    patience: Patience,
}

impl Meeting {
    /// `begun`: when the thread began what it has done since the last barrier.
    fn wait(&self, num_threads: usize, begun: Instant) {
        let seen = self.released.value();
        // Whoever broke it up before moved the signal before, too: no other move would come.
        self.check();
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == num_threads {
            self.arrived.store(0, Ordering::Relaxed);
            self.released.advance();
        } else if self.released.spin_beyond(seen, self.patience.spins()) {
            self.patience.met();
        } else {
            let work = begun.elapsed();
            let start = Instant::now();
            self.released.sleep_beyond(seen);
            let waited = start.elapsed();
            if waited > STALL && waited > STALL_RATIO * work {
                self.patience.stalled();
            } else {
                self.patience.met();
            }
        }
        self.check();
    }

    fn check(&self) {
        assert!(
            !self.broken.load(Ordering::Acquire),
            "another thread of the team panicked"
        );
    }

    fn break_up(&self) {
        self.broken.store(true, Ordering::Release);
        self.released.advance();
    }

    /// For a new region; nobody waits.
    fn reset(&self) {
        self.arrived.store(0, Ordering::Relaxed);
        self.broken.store(false, Ordering::Relaxed);
    }
}

/// What a thread of a region knows of the others.
pub struct Team<'a> {
    index: usize,
    num_threads: usize,
    meeting: Option<&'a Meeting>,
    /// When it left the last barrier. A cell: not for other threads.
    begun: Cell<Instant>,
}

impl Team<'_> {
    /// A team of one: kernels run whole on the calling thread.
    pub fn solo() -> Team<'static> {
        Team {
            index: 0,
            num_threads: 1,
            meeting: None,
            begun: Cell::new(Instant::now()),
        }
    }

    /// 0 is the thread that called `run`.
    pub fn index(&self) -> usize {
        self.index
    }

    pub fn num_threads(&self) -> usize {
        self.num_threads
    }

    /// Wait until every thread of the team is here; what they wrote before is visible after.
    ///
    /// # Panics
    /// When another thread of the team has panicked.
    pub fn barrier(&self) {
        if let Some(meeting) = self.meeting
            && self.num_threads > 1
        {
            meeting.wait(self.num_threads, self.begun.get());
            self.begun.set(Instant::now());
        }
    }

    /// This thread's part of `0..total`, cut at multiples of `unit`; the parts of all threads cover it once.
    pub fn share(&self, total: usize, unit: usize) -> Range<usize> {
        share(total, unit, self.index, self.num_threads)
    }
}

/// Part `index` of `parts` of `0..total`, cut at multiples of `unit`.
pub fn share(total: usize, unit: usize, index: usize, parts: usize) -> Range<usize> {
    let units = total.div_ceil(unit);
    let at = |i: usize| (units * i / parts * unit).min(total);
    at(index)..at(index + 1)
}

/// Threads that live as long as the pool.
pub struct ThreadPool {
    crew: Arc<Crew>,
    workers: Vec<JoinHandle<()>>,
    /// Callers take turns.
    turn: Mutex<()>,
}

impl ThreadPool {
    /// A pool of `num_threads` threads, of which the one that calls `run` is one. Threads that the system refuses are
    /// gone without.
    pub fn new(num_threads: usize) -> ThreadPool {
        ThreadPool::with(num_threads, |_| ())
    }

    /// The same, worker i pinned to `cpus[i]` where the system can; the caller's thread (number 0) is left alone.
    pub fn pinned(cpus: Vec<usize>) -> ThreadPool {
        ThreadPool::with(cpus.len(), move |index| {
            crate::affinity::pin_thread(cpus[index]);
        })
    }

    fn with(num_threads: usize, begin: impl Fn(usize) + Clone + Send + 'static) -> ThreadPool {
        let crew = Arc::new(Crew {
            region: Mutex::new(Region {
                epoch: 0,
                job: None,
                num_threads: 0,
            }),
            start: Signal::default(),
            running: AtomicUsize::new(0),
            finished: Signal::default(),
            meeting: Meeting::default(),
            panic: Mutex::new(None),
        });
        let spawn = |index: usize| {
            let (crew, begin) = (Arc::clone(&crew), begin.clone());
            thread::Builder::new()
                .name(format!("octavo-cpu-{index}"))
                .spawn(move || {
                    begin(index);
                    crew.work(index);
                })
        };
        let workers = (1..num_threads).map_while(|i| spawn(i).ok()).collect();
        ThreadPool {
            crew,
            workers,
            turn: Mutex::new(()),
        }
    }

    /// Threads of a region, the caller's included.
    pub fn num_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Run `f` once on every thread, and return when all are through.
    ///
    /// # Panics
    /// With the panic of the first thread that panicked; the pool can be used on.
    pub fn run(&self, f: &(dyn Fn(&Team<'_>) + Sync)) {
        self.run_on(self.num_threads(), f);
    }

    /// The same on `num_threads` of the threads (at least one, at most all).
    ///
    /// # Panics
    /// As `run`.
    pub fn run_on(&self, num_threads: usize, f: &(dyn Fn(&Team<'_>) + Sync)) {
        let num_threads = num_threads.clamp(1, self.num_threads());
        if num_threads == 1 {
            return f(&Team::solo());
        }
        let turn = lock(&self.turn);
        let crew = &*self.crew;
        crew.meeting.reset();
        #[allow(clippy::transmute_ptr_to_ptr)] // a cast cannot change the lifetime
        // SAFETY: only the lifetime changes; this function does not return before all threads of the region are through
        // with `f`, and other workers do not use it.
        let job = Job(unsafe {
            std::mem::transmute::<
                *const (dyn Fn(&Team<'_>) + Sync + '_),
                *const (dyn Fn(&Team<'_>) + Sync + 'static),
            >(f)
        });
        let seen = crew.finished.value();
        crew.running.store(num_threads - 1, Ordering::Relaxed);
        *lock(&crew.region) = Region {
            epoch: crew.start.value() + 1,
            job: Some(job),
            num_threads,
        };
        crew.start.advance();
        crew.take_part(f, 0, num_threads);
        while crew.running.load(Ordering::Acquire) > 0 {
            crew.finished
                .wait_beyond(seen, crew.meeting.patience.spins());
        }
        let panic = lock(&crew.panic).take();
        drop(turn);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        lock(&self.crew.region).job = None;
        self.crew.start.advance();
        for worker in self.workers.drain(..) {
            // A worker catches its panics, so there is none to hand on.
            let _ = worker.join();
        }
    }
}

impl Crew {
    fn work(&self, index: usize) {
        let mut seen = 0;
        loop {
            self.start.wait_beyond(seen, self.meeting.patience.spins());
            // A worker that was in no hurry may find a later region than the one it was woken for.
            let region = *lock(&self.region);
            let Some(job) = region.job else { return };
            let new = region.epoch > seen;
            seen = region.epoch;
            if new && index < region.num_threads {
                // SAFETY: this worker is of the region, whose caller waits for it.
                self.take_part(unsafe { &*job.0 }, index, region.num_threads);
                if self.running.fetch_sub(1, Ordering::AcqRel) == 1 {
                    self.finished.advance();
                }
            }
        }
    }

    fn take_part(&self, job: &(dyn Fn(&Team<'_>) + Sync), index: usize, num_threads: usize) {
        let team = Team {
            index,
            num_threads,
            meeting: Some(&self.meeting),
            begun: Cell::new(Instant::now()),
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(&team))) {
            lock(&self.panic).get_or_insert(panic);
            self.meeting.break_up();
        }
    }
}

/// No code runs under these locks that can leave what they guard broken.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thread_runs_once_and_barriers_order_what_they_write() {
        let pool = ThreadPool::new(4);
        let cells: Vec<AtomicUsize> = (0..4).map(|_| AtomicUsize::new(0)).collect();
        for round in 1..500 {
            pool.run(&|team| {
                for phase in 0..3 {
                    let own = &cells[team.index()];
                    own.store(round * 3 + phase, Ordering::Relaxed);
                    team.barrier();
                    for cell in &cells {
                        assert_eq!(cell.load(Ordering::Relaxed), round * 3 + phase);
                    }
                    team.barrier();
                }
            });
        }
    }

    #[test]
    fn a_region_may_use_some_of_the_threads() {
        let pool = ThreadPool::new(5);
        for num_threads in [1, 2, 5, 3, 1, 4, 9, 0].repeat(50) {
            let (count, most) = (AtomicUsize::new(0), num_threads.clamp(1, 5));
            pool.run_on(num_threads, &|team| {
                assert_eq!(team.num_threads(), most);
                count.fetch_add(1 << (8 * team.index()), Ordering::Relaxed);
                team.barrier();
            });
            let each = (0..most).map(|i| 1 << (8 * i)).sum::<usize>();
            assert_eq!(count.into_inner(), each);
        }
    }

    #[test]
    fn shares_cover_everything_once_at_multiples_of_the_unit() {
        for (total, unit, parts) in [(0, 4, 3), (1, 16, 2), (100, 16, 7), (64, 32, 2), (5, 1, 9)] {
            let mut next = 0;
            for index in 0..parts {
                let part = share(total, unit, index, parts);
                assert_eq!(part.start, next);
                assert!(part.end == total || part.end.is_multiple_of(unit));
                next = part.end;
            }
            assert_eq!(next, total);
        }
    }

    #[test]
    fn who_comes_to_a_barrier_after_a_panic_does_not_wait() {
        let pool = ThreadPool::new(3);
        let run = || {
            pool.run(&|team| {
                assert_ne!(team.index(), 1, "boom");
                while !pool.crew.meeting.broken.load(Ordering::Acquire) {
                    thread::yield_now();
                }
                while pool.crew.meeting.released.value() == 0 {
                    thread::yield_now();
                }
                team.barrier();
            });
        };
        assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
    }

    #[test]
    fn a_panic_reaches_the_caller_past_barriers_and_the_pool_lives() {
        let pool = ThreadPool::new(3);
        for victim in 0..3 {
            let run = || {
                pool.run(&|team| {
                    assert_ne!(team.index(), victim, "boom");
                    team.barrier();
                    team.barrier();
                });
            };
            assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
            let count = AtomicUsize::new(0);
            pool.run(&|team| {
                team.barrier();
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.into_inner(), 3);
        }
    }
}
