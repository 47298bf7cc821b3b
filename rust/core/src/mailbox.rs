//! Where the engine loop and the IO thread meet: an inbox that the loop empties once a step, and an outbox.
//!
//! Not here: sockets (octavo-ipc) and bytes (`frames`). Messages are moved, never copied; the outbox is encoded by
//! whoever takes it, so that the loop does not pay for it.

use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::ids::{ClientId, RequestId};
use crate::protocol::{EngineStats, Inbound, Outbound, OutputFrame, Refusal, RefusalKind};
use crate::queue_load::{QueueBounds, QueueLoad, RequestSize};

/// A panic of another thread while it held the lock leaves a queue of whole messages: safe to go on with.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A client that has sent more than so many bytes since the last step is not read from until the next one.
pub const MAX_UNREAD_BYTES: usize = 64 << 20;

/// What the queue looked like after the last step: what decides who is refused before the next one.
#[derive(Clone, Copy, Debug)]
pub struct QueueView {
    pub bounds: QueueBounds,
    pub load: QueueLoad,
    pub retry_after_s: f32,
    pub stats: EngineStats,
}

impl QueueView {
    fn refuse(&self, request_id: RequestId) -> OutputFrame {
        OutputFrame {
            stats: self.stats,
            refusals: vec![Refusal {
                request_id,
                kind: RefusalKind::QueueFull,
                message: self.bounds.refusal(),
                retry_after_s: self.retry_after_s,
            }],
            ..OutputFrame::default()
        }
    }
}

#[derive(Default)]
struct Arrivals {
    messages: VecDeque<(ClientId, Inbound)>,
    unread_bytes: HashMap<ClientId, usize>,
    /// Requests refused here, and whose they were.
    refused: Vec<ClientId>,
    /// `None` = nothing is refused here.
    view: Option<QueueView>,
    /// Something else than a message is to be looked at.
    is_nudged: bool,
}

/// Messages from all clients, in the order of arrival. It is bounded between two steps: requests beyond what the queue
/// takes are refused at once, however long the step is, and a client with too many bytes unread has to wait.
#[derive(Default)]
pub struct Inbox {
    arrivals: Mutex<Arrivals>,
    arrived: Condvar,
}

impl Inbox {
    /// Puts a message in, whatever is there already.
    pub fn push(&self, client: ClientId, message: Inbound) {
        let arrivals = &mut *lock(&self.arrivals);
        *arrivals.unread_bytes.entry(client).or_default() += num_bytes(&message);
        arrivals.messages.push_back((client, message));
        self.arrived.notify_all();
    }

    /// Puts a message in, or answers it: a request that the queue would refuse.
    pub fn offer(&self, client: ClientId, message: Inbound, outbox: &Outbox) {
        match self.refusal(client, &message) {
            Some(frame) => outbox.post(client, Outbound::Output(frame)),
            None => self.push(client, message),
        }
    }

    fn refusal(&self, client: ClientId, message: &Inbound) -> Option<OutputFrame> {
        let Inbound::Add(request) = message else {
            return None;
        };
        let arrivals = &mut *lock(&self.arrivals);
        let view = arrivals.view.as_mut()?;
        let size = RequestSize::of(request);
        if view.bounds.has_room(view.load, size) {
            view.load.add(size);
            return None;
        }
        arrivals.refused.push(client);
        Some(view.refuse(request.request_id))
    }

    /// Wakes whoever waits, without a message.
    pub fn nudge(&self) {
        lock(&self.arrivals).is_nudged = true;
        self.arrived.notify_all();
    }

    /// A step is over; what arrives from now on is held against this.
    pub fn set_view(&self, view: QueueView) {
        let arrivals = &mut *lock(&self.arrivals);
        let mut view = view;
        for (_, message) in &arrivals.messages {
            if let Inbound::Add(request) = message {
                view.load.add(RequestSize::of(request));
            }
        }
        arrivals.view = Some(view);
    }

    /// Whether to stop reading from this client until the next step.
    pub fn is_crowded_by(&self, client: ClientId) -> bool {
        let unread = lock(&self.arrivals).unread_bytes.get(&client).copied();
        unread.is_some_and(|bytes| bytes > MAX_UNREAD_BYTES)
    }

    /// Takes everything that has arrived.
    pub fn take(&self) -> VecDeque<(ClientId, Inbound)> {
        let arrivals = &mut *lock(&self.arrivals);
        arrivals.unread_bytes.clear();
        arrivals.is_nudged = false;
        std::mem::take(&mut arrivals.messages)
    }

    /// Takes the clients whose requests were refused here, one entry a request.
    pub fn take_refused(&self) -> Vec<ClientId> {
        std::mem::take(&mut lock(&self.arrivals).refused)
    }

    pub fn is_empty(&self) -> bool {
        lock(&self.arrivals).messages.is_empty()
    }

    /// Sleeps until there is a message or a nudge; false on timeout.
    pub fn wait(&self, timeout: Duration) -> bool {
        let guard = lock(&self.arrivals);
        let (guard, _) = self
            .arrived
            .wait_timeout_while(guard, timeout, |arrivals| {
                arrivals.messages.is_empty() && !arrivals.is_nudged
            })
            .unwrap_or_else(PoisonError::into_inner);
        !guard.messages.is_empty() || guard.is_nudged
    }
}

/// About what a message holds in memory.
fn num_bytes(message: &Inbound) -> usize {
    let content = match message {
        Inbound::Add(request) => {
            let token_ids = request.prompt_token_ids.len() + request.stop_token_ids.len();
            let bytes = request.params.len() + request.grammar.len();
            4 * token_ids + bytes + request.cache_salt.len()
        }
        Inbound::Call { body, .. } => body.len(),
        Inbound::Abort(_) | Inbound::Disconnected => 0,
    };
    content + size_of::<(ClientId, Inbound)>()
}

/// Called after something was put in for a remote client; must be cheap (write to an eventfd) and must not block.
pub type Waker = Box<dyn Fn() + Send + Sync>;

/// Messages to clients: those of `ClientId::LOCAL` are taken by the engine's own process, the others by the IO thread.
#[derive(Default)]
pub struct Outbox {
    local: Mutex<Vec<Outbound>>,
    remote: Mutex<Vec<(ClientId, Outbound)>>,
    waker: Mutex<Option<Waker>>,
}

impl Outbox {
    /// Names whom to wake when there is something for `take_remote`. `None` = nobody.
    pub fn set_waker(&self, waker: Option<Waker>) {
        *lock(&self.waker) = waker;
    }

    /// Puts one message in. Those of one client stay in order.
    pub fn post(&self, client: ClientId, message: Outbound) {
        if client == ClientId::LOCAL {
            lock(&self.local).push(message);
            return;
        }
        lock(&self.remote).push((client, message));
        if let Some(waker) = &*lock(&self.waker) {
            waker();
        }
    }

    pub fn take_local(&self) -> Vec<Outbound> {
        std::mem::take(&mut *lock(&self.local))
    }

    /// Takes what waits for remote clients; messages of clients that are gone are the taker's to drop.
    pub fn take_remote(&self) -> Vec<(ClientId, Outbound)> {
        std::mem::take(&mut *lock(&self.remote))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    fn call(call_id: u64) -> Inbound {
        Inbound::Call {
            call_id,
            body: vec![],
        }
    }

    #[test]
    fn a_waiting_reader_is_woken() {
        let inbox = Arc::new(Inbox::default());
        let writer = Arc::clone(&inbox);
        let thread = std::thread::spawn(move || writer.push(ClientId(3), call(7)));
        assert!(inbox.wait(Duration::from_secs(30)));
        thread.join().unwrap();
        assert_eq!(inbox.take(), [(ClientId(3), call(7))]);
        assert!(inbox.is_empty());
        assert!(!inbox.wait(Duration::ZERO));
    }

    #[test]
    fn only_remote_messages_wake_the_io_thread() {
        let outbox = Outbox::default();
        let woken = Arc::new(AtomicU32::new(0));
        let counter = Arc::clone(&woken);
        outbox.set_waker(Some(Box::new(move || {
            counter.fetch_add(1, Ordering::Relaxed);
        })));
        outbox.post(ClientId::LOCAL, Outbound::Hello(vec![1]));
        assert_eq!(woken.load(Ordering::Relaxed), 0);
        outbox.post(ClientId(1), Outbound::Hello(vec![2]));
        assert_eq!(woken.load(Ordering::Relaxed), 1);
        assert_eq!(outbox.take_local(), [Outbound::Hello(vec![1])]);
        assert_eq!(
            outbox.take_remote(),
            [(ClientId(1), Outbound::Hello(vec![2]))]
        );
        assert!(outbox.take_local().is_empty());
    }
}
