//! Who waits, in which order, and who is refused because too many do.
//!
//! The order is a key: priority, then the tenant's turn (`tenants`), then arrival. Sequences that ran before (preempted
//! ones) keep their key, hence their turn; bounds (`queue_load`) and deadlines are for requests that have not started.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::time::{Duration, Instant};

use crate::config::Policy;
use crate::ids::{SeqIdx, TenantId};
use crate::queue_load::{QueueBounds, QueueLoad, RequestSize};
use crate::tenants::{Bill, Payer, Tenants};

/// The turn of a sequence; the least is served first and preempted last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct QueueKey {
    /// 0 under FCFS.
    pub priority: i32,
    /// Start tag of the request among all tenants'.
    pub tag: u64,
    /// Number of the request in order of arrival.
    pub arrival: u64,
    /// Which of the request's n sequences.
    pub index: u32,
}

impl QueueKey {
    pub fn new(policy: Policy, priority: i32, tag: u64, arrival: u64, index: u32) -> Self {
        let priority = match policy {
            Policy::Fcfs => 0,
            Policy::Priority => priority,
        };
        Self {
            priority,
            tag,
            arrival,
            index,
        }
    }
}

/// A request that has not started: counted, and bounded by a deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Newcomer {
    pub size: RequestSize,
    pub tenant: TenantId,
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

/// The queue is full, or as good as full for this tenant.
#[derive(Clone, Debug, PartialEq)]
pub struct QueueFull {
    pub message: String,
    pub retry_after_s: f32,
}

#[derive(Debug)]
pub struct Queue {
    order: BTreeMap<QueueKey, SeqIdx>,
    /// Newcomers that can't start yet: counted like the others, but out of the order.
    held: BTreeMap<QueueKey, SeqIdx>,
    newcomers: BTreeMap<QueueKey, Newcomer>,
    deadlines: BTreeSet<(Instant, QueueKey)>,
    load: QueueLoad,
    bounds: QueueBounds,
    tenants: Tenants,
    pace: Pace,
}

impl Queue {
    pub fn new(bounds: QueueBounds) -> Self {
        Self {
            order: BTreeMap::new(),
            held: BTreeMap::new(),
            newcomers: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            load: QueueLoad::default(),
            bounds,
            tenants: Tenants::default(),
            pace: Pace::default(),
        }
    }

    /// Those that are held included.
    pub fn len(&self) -> usize {
        self.order.len() + self.held.len()
    }

    /// Whether nobody could start.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Whether one more request may wait.
    pub fn check_room(&self, tenant: TenantId, size: RequestSize) -> Result<(), QueueFull> {
        let refused = |message: String| {
            Err(QueueFull {
                message,
                retry_after_s: self.retry_after_s(),
            })
        };
        if !self.bounds.has_room(self.load, size) {
            return refused(self.bounds.refusal());
        }
        let own = self.tenants.waiting(tenant);
        if tenant != TenantId::NOBODY && !self.bounds.leaves_room(self.load, own, size) {
            return refused(format!(
                "{} requests of yours wait, and what is left of the queue is for others; try again later",
                own.num_requests
            ));
        }
        Ok(())
    }

    /// Charges a tenant for a request for `n` outputs that is about to be queued; its tag goes into the key.
    pub fn charge(&mut self, payer: Payer, size: RequestSize, n: u32, max_output: u32) -> Bill {
        self.tenants.arrive(payer, size, n, max_output)
    }

    /// A request that was charged has ended (see `Tenants::end`).
    pub fn settle(&mut self, bill: Bill, num_output: u64, n: Option<u32>) {
        self.tenants.end(bill, num_output, n);
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
        self.count(key, newcomer);
    }

    /// The first sequence of a new request that can't start before `release`.
    pub fn hold_new(&mut self, key: QueueKey, seq: SeqIdx, newcomer: Newcomer) {
        self.held.insert(key, seq);
        self.count(key, newcomer);
    }

    /// A sequence that was held takes its turn.
    pub fn release(&mut self, key: QueueKey) {
        if let Some(seq) = self.held.remove(&key) {
            self.push(key, seq);
        }
    }

    pub fn held(&self) -> impl Iterator<Item = (QueueKey, SeqIdx)> {
        self.held.iter().map(|(key, seq)| (*key, *seq))
    }

    fn count(&mut self, key: QueueKey, newcomer: Newcomer) {
        self.load.add(newcomer.size);
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
        let is_new = self.newcomers.contains_key(&key);
        self.remove(key);
        if is_new {
            self.pace.started(now);
            let first_waiting = self.newcomers.keys().next().map(|key| key.tag);
            self.tenants.start(key.tag, first_waiting);
        }
    }

    /// Takes a sequence out because it ends.
    pub fn remove(&mut self, key: QueueKey) {
        let seq = self.order.remove(&key).or_else(|| self.held.remove(&key));
        assert!(seq.is_some(), "{key:?} is not queued");
        if let Some(newcomer) = self.newcomers.remove(&key) {
            self.load.remove(newcomer.size);
            self.tenants.leave_queue(newcomer.tenant, newcomer.size);
            if let Some(deadline) = newcomer.deadline {
                self.deadlines.remove(&(deadline, key));
            }
        }
    }

    /// A new request whose deadline has passed, if there is one.
    pub fn expired(&self, now: Instant) -> Option<SeqIdx> {
        let (deadline, key) = self.deadlines.first()?;
        let seq = self.order.get(key).or_else(|| self.held.get(key)).copied();
        seq.filter(|_| *deadline < now)
    }

    pub fn iter(&self) -> impl Iterator<Item = (QueueKey, SeqIdx)> {
        self.order.iter().map(|(key, seq)| (*key, *seq))
    }

    /// Whether the counters agree with the entries, and with the number of requests that have not ended.
    pub fn check(&self, num_requests: u64) -> Result<(), String> {
        let mut load = QueueLoad::default();
        for newcomer in self.newcomers.values() {
            load.add(newcomer.size);
        }
        self.tenants.check(num_requests, load)?;
        let deadlines = self
            .newcomers
            .values()
            .filter(|n| n.deadline.is_some())
            .count();
        if load != self.load || deadlines != self.deadlines.len() {
            return Err("the queue's counters disagree with its entries".into());
        }
        match self
            .newcomers
            .keys()
            .find(|key| !self.order.contains_key(key) && !self.held.contains_key(key))
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

    fn queue(max_requests: u64, max_tokens: u64) -> Queue {
        Queue::new(QueueBounds {
            max_requests,
            max_tokens,
            max_bytes: 1000,
        })
    }

    fn key(policy: Policy, priority: i32, arrival: u64) -> QueueKey {
        QueueKey::new(policy, priority, 0, arrival, 0)
    }

    fn size(num_tokens: u32) -> RequestSize {
        RequestSize {
            num_tokens,
            num_bytes: 0,
        }
    }

    fn push_new(queue: &mut Queue, key: QueueKey, seq: u32, deadline: Option<Instant>) {
        let payer = Payer {
            tenant: TenantId::NOBODY,
            weight: 1000,
        };
        queue.charge(payer, size(10), 1, 1);
        let newcomer = Newcomer {
            size: size(10),
            tenant: TenantId::NOBODY,
            deadline,
        };
        queue.push_new(key, SeqIdx(seq), newcomer);
    }

    fn has_room(queue: &Queue, num_tokens: u32) -> bool {
        queue.check_room(TenantId::NOBODY, size(num_tokens)).is_ok()
    }

    #[test]
    fn priority_goes_before_arrival_only_under_its_policy() {
        for (policy, first) in [(Policy::Fcfs, 0), (Policy::Priority, 1)] {
            let mut queue = queue(8, 100);
            push_new(&mut queue, key(policy, 5, 0), 0, None);
            push_new(&mut queue, key(policy, -5, 1), 1, None);
            assert_eq!(queue.first().unwrap().1, SeqIdx(first));
        }
    }

    #[test]
    fn bounds_count_only_requests_that_have_not_started() {
        let mut queue = queue(2, 25);
        assert!(has_room(&queue, 1000));
        push_new(&mut queue, key(Policy::Fcfs, 0, 0), 0, None);
        assert!(has_room(&queue, 15));
        assert!(!has_room(&queue, 16));
        push_new(&mut queue, key(Policy::Fcfs, 0, 1), 1, None);
        let full = queue.check_room(TenantId::NOBODY, size(1)).unwrap_err();
        assert!((1.0..=60.0).contains(&full.retry_after_s));
        queue.start(key(Policy::Fcfs, 0, 0), Instant::now());
        queue.push(key(Policy::Fcfs, 0, 0), SeqIdx(0));
        assert!(has_room(&queue, 15));
        queue.check(2).unwrap();
    }

    #[test]
    fn deadlines_are_noticed_until_the_start() {
        let now = Instant::now();
        let late = now + Duration::from_secs(5);
        let mut queue = queue(8, 100);
        let deadline = deadline_after(now, 1.0);
        push_new(&mut queue, key(Policy::Fcfs, 0, 0), 0, deadline);
        push_new(&mut queue, key(Policy::Fcfs, 0, 1), 1, deadline);
        assert_eq!(queue.expired(now), None);
        queue.start(key(Policy::Fcfs, 0, 0), now);
        assert_eq!(queue.expired(late), Some(SeqIdx(1)));
        queue.remove(key(Policy::Fcfs, 0, 1));
        assert_eq!(queue.expired(late), None);
        assert_eq!(deadline_after(now, 0.0), None);
        assert_eq!(deadline_after(now, f64::NAN), None);
    }
}
