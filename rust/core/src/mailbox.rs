//! Where the engine loop and the IO thread meet: an inbox that the loop empties once a step, and an outbox.
//!
//! Not here: sockets (octavo-ipc) and bytes (`frames`). Messages are moved, never copied; the outbox is encoded by
//! whoever takes it, so that the loop does not pay for it.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::ids::ClientId;
use crate::protocol::{Inbound, Outbound};

/// A panic of another thread while it held the lock leaves a queue of whole messages: safe to go on with.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Messages from all clients, in the order of arrival.
#[derive(Default)]
pub struct Inbox {
    messages: Mutex<VecDeque<(ClientId, Inbound)>>,
    arrived: Condvar,
}

impl Inbox {
    pub fn push(&self, client: ClientId, message: Inbound) {
        lock(&self.messages).push_back((client, message));
        self.arrived.notify_all();
    }

    /// Takes everything that has arrived.
    pub fn take(&self) -> VecDeque<(ClientId, Inbound)> {
        std::mem::take(&mut *lock(&self.messages))
    }

    pub fn is_empty(&self) -> bool {
        lock(&self.messages).is_empty()
    }

    /// Sleeps until there is a message; false on timeout.
    pub fn wait(&self, timeout: Duration) -> bool {
        let guard = lock(&self.messages);
        let (guard, _) = self
            .arrived
            .wait_timeout_while(guard, timeout, |messages| messages.is_empty())
            .unwrap_or_else(PoisonError::into_inner);
        !guard.is_empty()
    }
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
