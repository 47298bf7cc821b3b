//! Who waits, in which order, and who is refused because too many do.
//!
//! The order is a key, so another policy (weighted fairness between tenants: a virtual start time in front of the
//! arrival) is another key. Sequences that ran before (preempted ones) keep their key, hence their turn; bounds and
//! deadlines are for requests that have not started.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::time::{Duration, Instant};

use crate::config::Policy;
use crate::sequence::SeqIdx;

/// The turn of a sequence; the least is served first and preempted last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct QueueKey {
    /// 0 under FCFS.
    pub priority: i32,
    /// Number of the request in order of arrival.
    pub arrival: u64,
    /// Which of the request's n sequences.
    pub index: u32,
}

impl QueueKey {
    pub fn new(policy: Policy, priority: i32, arrival: u64, index: u32) -> Self {
        let priority = match policy {
            Policy::Fcfs => 0,
            Policy::Priority => priority,
        };
        Self {
            priority,
            arrival,
            index,
        }
    }
}

/// A request that has not started: counted, and bounded by a deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Newcomer {
    pub num_tokens: u32,
    pub deadline: Option<Instant>,
}

/// Smoothed time between two starts, for Retry-After.
#[derive(Debug, Default)]
struct Pace {
    last_start: Option<Instant>,
    interval_s: f64,
}

impl Pace {
    const WEIGHT: f64 = 0.1;

    fn started(&mut self, now: Instant) {
        if let Some(last) = self.last_start {
            let interval_s = now.duration_since(last).as_secs_f64();
            self.interval_s += Self::WEIGHT * (interval_s - self.interval_s);
        }
        self.last_start = Some(now);
    }

    /// Time until a tenth of the queue has started, within 1 and 60 seconds.
    fn retry_after_s(&self, num_waiting: usize) -> f32 {
        (self.interval_s * num_waiting as f64 / 10.0).clamp(1.0, 60.0) as f32
    }
}

/// The queue is full.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueueFull {
    pub retry_after_s: f32,
}

/// How many requests may wait, and how many prompt tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueBounds {
    pub max_requests: u64,
    pub max_tokens: u64,
}

impl QueueBounds {
    /// Whether one more request of `num_tokens` may wait beside those of `load`. An empty queue takes any.
    pub fn has_room(&self, load: QueueLoad, num_tokens: u32) -> bool {
        let tokens = load.num_tokens.saturating_add(u64::from(num_tokens));
        load.num_requests == 0
            || (load.num_requests < self.max_requests && tokens <= self.max_tokens)
    }

    /// What a refused client is told.
    pub fn refusal(&self) -> String {
        format!(
            "too many requests wait (--max-queued-requests {}, --max-queued-tokens {}); try again later",
            self.max_requests, self.max_tokens
        )
    }
}

/// Requests that have not started, and their prompt tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueLoad {
    pub num_requests: u64,
    pub num_tokens: u64,
}

impl QueueLoad {
    pub fn add(&mut self, num_tokens: u32) {
        self.num_requests += 1;
        self.num_tokens += u64::from(num_tokens);
    }

    pub fn remove(&mut self, num_tokens: u32) {
        self.num_requests -= 1;
        self.num_tokens -= u64::from(num_tokens);
    }
}

#[derive(Debug)]
pub struct Queue {
    order: BTreeMap<QueueKey, SeqIdx>,
    newcomers: BTreeMap<QueueKey, Newcomer>,
    deadlines: BTreeSet<(Instant, QueueKey)>,
    load: QueueLoad,
    bounds: QueueBounds,
    pace: Pace,
}

impl Queue {
    pub fn new(bounds: QueueBounds) -> Self {
        Self {
            order: BTreeMap::new(),
            newcomers: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            load: QueueLoad::default(),
            bounds,
            pace: Pace::default(),
        }
    }

    pub fn len(&self) -> usize {
        self.order.len()
    }

    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Whether one more request of `num_tokens` may wait.
    pub fn check_room(&self, num_tokens: u32) -> Result<(), QueueFull> {
        if self.bounds.has_room(self.load, num_tokens) {
            return Ok(());
        }
        Err(QueueFull {
            retry_after_s: self.retry_after_s(),
        })
    }

    pub fn bounds(&self) -> QueueBounds {
        self.bounds
    }

    /// What bounds are compared with.
    pub fn load(&self) -> QueueLoad {
        self.load
    }

    /// When a refused client should try again.
    pub fn retry_after_s(&self) -> f32 {
        self.pace.retry_after_s(self.newcomers.len())
    }

    /// The first sequence of a new request.
    pub fn push_new(&mut self, key: QueueKey, seq: SeqIdx, newcomer: Newcomer) {
        self.push(key, seq);
        self.load.add(newcomer.num_tokens);
        if let Some(deadline) = newcomer.deadline {
            self.deadlines.insert((deadline, key));
        }
        self.newcomers.insert(key, newcomer);
    }

    /// A sequence whose request has started.
    pub fn push(&mut self, key: QueueKey, seq: SeqIdx) {
        let previous = self.order.insert(key, seq);
        assert!(previous.is_none(), "{key:?} is queued twice");
    }

    pub fn first(&self) -> Option<(QueueKey, SeqIdx)> {
        self.order.first_key_value().map(|(key, seq)| (*key, *seq))
    }

    /// The one whose turn follows that of `key`.
    pub fn after(&self, key: QueueKey) -> Option<(QueueKey, SeqIdx)> {
        let mut later = self.order.range((Bound::Excluded(key), Bound::Unbounded));
        later.next().map(|(key, seq)| (*key, *seq))
    }

    /// Takes a sequence out because it starts to run.
    pub fn start(&mut self, key: QueueKey, now: Instant) {
        if self.newcomers.contains_key(&key) {
            self.pace.started(now);
        }
        self.remove(key);
    }

    /// Takes a sequence out because it ends.
    pub fn remove(&mut self, key: QueueKey) {
        let seq = self.order.remove(&key);
        assert!(seq.is_some(), "{key:?} is not queued");
        if let Some(newcomer) = self.newcomers.remove(&key) {
            self.load.remove(newcomer.num_tokens);
            if let Some(deadline) = newcomer.deadline {
                self.deadlines.remove(&(deadline, key));
            }
        }
    }

    /// A new request whose deadline has passed, if there is one.
    pub fn expired(&self, now: Instant) -> Option<SeqIdx> {
        let (deadline, key) = self.deadlines.first()?;
        (*deadline < now).then(|| self.order[key])
    }

    pub fn iter(&self) -> impl Iterator<Item = (QueueKey, SeqIdx)> {
        self.order.iter().map(|(key, seq)| (*key, *seq))
    }

    /// Whether the counters agree with the entries.
    pub fn check(&self) -> Result<(), String> {
        let tokens: u64 = self
            .newcomers
            .values()
            .map(|n| u64::from(n.num_tokens))
            .sum();
        let deadlines = self
            .newcomers
            .values()
            .filter(|n| n.deadline.is_some())
            .count();
        let load = QueueLoad {
            num_requests: self.newcomers.len() as u64,
            num_tokens: tokens,
        };
        if load != self.load || deadlines != self.deadlines.len() {
            return Err("the queue's counters disagree with its entries".into());
        }
        match self
            .newcomers
            .keys()
            .find(|key| !self.order.contains_key(key))
        {
            Some(key) => Err(format!("{key:?} is counted as new but does not wait")),
            None => Ok(()),
        }
    }
}

/// When a request that arrived `now` must have started; `None` = it may wait for ever.
pub fn deadline_after(now: Instant, deadline_s: f64) -> Option<Instant> {
    let wait = Duration::try_from_secs_f64(deadline_s).ok()?;
    (deadline_s > 0.0).then(|| now.checked_add(wait)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_LIMIT: Newcomer = Newcomer {
        num_tokens: 10,
        deadline: None,
    };

    fn queue(max_requests: u64, max_tokens: u64) -> Queue {
        Queue::new(QueueBounds {
            max_requests,
            max_tokens,
        })
    }

    fn key(policy: Policy, priority: i32, arrival: u64) -> QueueKey {
        QueueKey::new(policy, priority, arrival, 0)
    }

    #[test]
    fn priority_goes_before_arrival_only_under_its_policy() {
        for (policy, first) in [(Policy::Fcfs, 0), (Policy::Priority, 1)] {
            let mut queue = queue(8, 100);
            queue.push_new(key(policy, 5, 0), SeqIdx(0), NO_LIMIT);
            queue.push_new(key(policy, -5, 1), SeqIdx(1), NO_LIMIT);
            assert_eq!(queue.first().unwrap().1, SeqIdx(first));
        }
    }

    #[test]
    fn bounds_count_only_requests_that_have_not_started() {
        let mut queue = queue(2, 25);
        assert!(queue.check_room(1000).is_ok());
        queue.push_new(key(Policy::Fcfs, 0, 0), SeqIdx(0), NO_LIMIT);
        assert!(queue.check_room(15).is_ok());
        assert!(queue.check_room(16).is_err());
        queue.push_new(key(Policy::Fcfs, 0, 1), SeqIdx(1), NO_LIMIT);
        let full = queue.check_room(1).unwrap_err();
        assert!((1.0..=60.0).contains(&full.retry_after_s));
        queue.start(key(Policy::Fcfs, 0, 0), Instant::now());
        queue.push(key(Policy::Fcfs, 0, 0), SeqIdx(0));
        assert!(queue.check_room(15).is_ok());
        queue.check().unwrap();
    }

    #[test]
    fn deadlines_are_noticed_until_the_start() {
        let now = Instant::now();
        let late = now + Duration::from_secs(5);
        let mut queue = queue(8, 100);
        let newcomer = Newcomer {
            num_tokens: 1,
            deadline: deadline_after(now, 1.0),
        };
        queue.push_new(key(Policy::Fcfs, 0, 0), SeqIdx(0), newcomer);
        queue.push_new(key(Policy::Fcfs, 0, 1), SeqIdx(1), newcomer);
        assert_eq!(queue.expired(now), None);
        queue.start(key(Policy::Fcfs, 0, 0), now);
        assert_eq!(queue.expired(late), Some(SeqIdx(1)));
        queue.remove(key(Policy::Fcfs, 0, 1));
        assert_eq!(queue.expired(late), None);
        assert_eq!(deadline_after(now, 0.0), None);
        assert_eq!(deadline_after(now, f64::NAN), None);
    }
}
