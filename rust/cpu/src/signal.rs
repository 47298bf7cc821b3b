//! A counter that threads wait for: they spin for a moment, then sleep until it moves; and how long the moment is.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

/// Looks at a counter before a waiting thread sleeps: about a tenth of a millisecond, or less than sleeping costs.
const PATIENT: usize = 8192;
const HASTY: usize = 64;
/// Waits in a row without a stall after which patience is tried again: at first, and at most.
const CALM: u32 = 256;
const MOST_CALM: u32 = 1 << 14;
/// Waits after which a stall is taken for the first of its kind.
const FORGOTTEN: u32 = 4 * MOST_CALM;

/// How long threads spin, learned from what they meet.
///
/// Where processors are idle, whoever is waited for is about to arrive, and sleeping would cost more than it takes. Where
/// they are busy with something else, it may be waiting for the very processor that is spun on, and sleeping at once
/// gives it that. (Yielding does not: the system then runs the something else, for milliseconds.)
pub struct Patience {
    spins: AtomicUsize,
    /// Waits since the last stall, and those that are needed.
    calm: AtomicU32,
    needed: AtomicU32,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            spins: AtomicUsize::new(PATIENT),
            calm: AtomicU32::new(0),
            needed: AtomicU32::new(CALM),
        }
    }
}

impl Patience {
    /// Looks before the next wait sleeps.
    pub fn spins(&self) -> usize {
        self.spins.load(Ordering::Relaxed)
    }

    /// A wait was for a thread that did not run.
    pub fn stalled(&self) {
        if self.spins.swap(HASTY, Ordering::Relaxed) == PATIENT {
            let needed = self.needed.load(Ordering::Relaxed);
            let needed = if self.calm.load(Ordering::Relaxed) >= FORGOTTEN {
                CALM
            } else {
                MOST_CALM.min(2 * needed)
            };
            self.needed.store(needed, Ordering::Relaxed);
        }
        self.calm.store(0, Ordering::Relaxed);
    }

    /// A wait was no stall.
    pub fn met(&self) {
        let calm = self.calm.load(Ordering::Relaxed);
        if calm < FORGOTTEN {
            // Racing threads may count too few: it is no more than a moment.
            self.calm.store(calm + 1, Ordering::Relaxed);
            if calm + 1 >= self.needed.load(Ordering::Relaxed) {
                self.spins.store(PATIENT, Ordering::Relaxed);
            }
        }
    }
}

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

    /// Look at the value so often; whether it became greater than `seen`.
    pub fn spin_beyond(&self, seen: u64, spins: usize) -> bool {
        for _ in 0..spins {
            if self.value() > seen {
                return true;
            }
            spin_loop();
        }
        false
    }

    /// Wait until the value is greater than `seen`.
    pub fn wait_beyond(&self, seen: u64, spins: usize) {
        if !self.spin_beyond(seen, spins) {
            self.sleep_beyond(seen);
        }
    }

    /// The same without spinning.
    #[cold]
    pub fn sleep_beyond(&self, seen: u64) {
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while self.value.load(Ordering::SeqCst) <= seen {
            guard = self
                .moved
                .wait(guard)
                .unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_makes_hasty_and_calm_makes_patient_again_ever_later() {
        let patience = Patience::default();
        let waits_until_patient = || {
            patience.stalled();
            assert_eq!(patience.spins(), HASTY);
            let met = |_: &u32| {
                patience.met();
                patience.spins() == PATIENT
            };
            (1..=FORGOTTEN).find(met)
        };
        assert_eq!(waits_until_patient(), Some(2 * CALM));
        assert_eq!(waits_until_patient(), Some(4 * CALM));
        (0..10).for_each(|_| assert!(waits_until_patient() <= Some(MOST_CALM)));
        assert_eq!(waits_until_patient(), Some(MOST_CALM));
        (0..FORGOTTEN).for_each(|_| patience.met());
        assert_eq!(waits_until_patient(), Some(CALM));
    }
}
