//! A counter that threads wait for: they spin for a moment, then sleep until it moves.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;

/// Looks at the counter before a waiting thread lets others run: tens of microseconds.
const SPINS: usize = 2000;
/// Looks with a yield in between before it sleeps.
const YIELDS: usize = 200;

#[derive(Default)]
pub struct Signal {
    value: AtomicU64,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    moved: Condvar,
}

impl Signal {
    pub fn value(&self) -> u64 {
        self.value.load(Ordering::Acquire)
    }

    /// Move the counter and wake who sleeps; what was written before is visible to who sees it.
    pub fn advance(&self) {
        self.value.fetch_add(1, Ordering::SeqCst);
        // A sleeper counts itself before its last look at the value, so one of the two sees the other.
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.moved.notify_all();
        }
    }

    /// Wait until the value is greater than `seen`; the value.
    pub fn wait_beyond(&self, seen: u64) -> u64 {
        for round in 0..SPINS + YIELDS {
            let value = self.value();
            if value > seen {
                return value;
            }
            if round < SPINS {
                spin_loop();
            } else {
                thread::yield_now();
            }
        }
        self.sleep_beyond(seen)
    }

    #[cold]
    fn sleep_beyond(&self, seen: u64) -> u64 {
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let value = loop {
            let value = self.value.load(Ordering::SeqCst);
            if value > seen {
                break value;
            }
            guard = self
                .moved
                .wait(guard)
                .unwrap_or_else(PoisonError::into_inner);
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        value
    }
}
