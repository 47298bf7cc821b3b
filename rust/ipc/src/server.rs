//! The engine's end of the sockets: accepts clients, waits for readiness with `poll`, moves frames. One thread.
//!
//! Not here: the bytes of one client (`connection`).

use std::fmt::Arguments;
use std::fs;
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use octavo_core::ids::ClientId;
use octavo_core::mailbox::{Inbox, Outbox};
use octavo_core::protocol::{Inbound, Outbound};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::connection::{Closed, Connection};
use crate::wake::{self, Sleeper, Wake};

/// Bytes taken from one client before the others get their turn.
const READ_BYTES: usize = 256 << 10;
/// At close, clients get this long to take what was already said.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How long no client is accepted after accepting failed (out of file descriptors).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How often one looks whether the engine has taken what a client sent, who is not read from meanwhile.
const READ_PAUSE: Duration = Duration::from_millis(5);

/// One line on standard error, if there is one: a closed one must not end the thread, as `eprintln!` would.
fn complain(text: Arguments<'_>) {
    let _ = writeln!(io::stderr(), "octavo: {text}");
}

/// A listening socket with its IO thread; closed on drop.
#[derive(Debug)]
pub struct Server {
    path: PathBuf,
    wake: Arc<Wake>,
    is_closing: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens on `path` and moves frames from then on. Every client is sent `hello` first and gets the next
    /// `ClientId` from 1; `Inbound::Disconnected` follows its last message.
    ///
    /// A socket file that nobody listens on any more is replaced; one in use is an error.
    pub fn start(
        path: &Path,
        hello: Vec<u8>,
        inbox: Arc<Inbox>,
        outbox: Arc<Outbox>,
    ) -> io::Result<Self> {
        let listener = bind(path)?;
        listener.set_nonblocking(true)?;
        let (wake, sleeper) = wake::pair()?;
        let waker = Arc::clone(&wake);
        outbox.set_waker(Some(Box::new(move || waker.wake())));
        let is_closing = Arc::new(AtomicBool::new(false));
        let io_loop = IoLoop {
            listener,
            sleeper,
            is_closing: Arc::clone(&is_closing),
            hello: Outbound::Hello(hello),
            inbox,
            outbox,
            clients: Vec::new(),
            next_client: ClientId::LOCAL.0 + 1,
            scratch: vec![0; READ_BYTES],
            accept_after: None,
        };
        let thread = std::thread::Builder::new()
            .name("octavo-io".to_owned())
            .spawn(move || io_loop.run())?;
        Ok(Self {
            path: path.to_owned(),
            wake,
            is_closing,
            thread: Some(thread),
        })
    }

    /// Sends what is in the outbox (within a second), hangs up, removes the socket. A second call does nothing.
    pub fn close(&mut self) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        self.is_closing.store(true, Ordering::Release);
        self.wake.wake();
        if thread.join().is_err() {
            complain(format_args!("the IO thread had panicked"));
        }
        if let Err(error) = fs::remove_file(&self.path) {
            complain(format_args!(
                "can't remove {}: {error}",
                self.path.display()
            ));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.close();
    }
}

/// A listener on `path` that only this user can connect to.
fn bind(path: &Path) -> io::Result<UnixListener> {
    let listener = match UnixListener::bind(path) {
        Err(error) if error.kind() == ErrorKind::AddrInUse && is_stale(path) => {
            fs::remove_file(path)?;
            UnixListener::bind(path)
        }
        other => other,
    }?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

fn is_stale(path: &Path) -> bool {
    matches!(UnixStream::connect(path), Err(error) if error.kind() == ErrorKind::ConnectionRefused)
}

/// What the IO thread owns.
struct IoLoop {
    listener: UnixListener,
    sleeper: Sleeper,
    is_closing: Arc<AtomicBool>,
    hello: Outbound,
    inbox: Arc<Inbox>,
    outbox: Arc<Outbox>,
    clients: Vec<(ClientId, Connection)>,
    next_client: u32,
    /// Where received bytes land first.
    scratch: Vec<u8>,
    /// Set after a failed accept.
    accept_after: Option<Instant>,
}

impl IoLoop {
    fn run(mut self) {
        while !self.is_closing.load(Ordering::Acquire) {
            let ready = match self.wait() {
                Ok(ready) => ready,
                Err(error) => {
                    complain(format_args!(
                        "the IO thread can't wait for sockets: {error}"
                    ));
                    break;
                }
            };
            if ready.is_woken {
                self.sleeper.clear();
                self.deliver();
            }
            for (client, flags) in ready.clients {
                self.serve(client, flags);
            }
            if ready.can_accept {
                self.accept();
            }
        }
        self.outbox.set_waker(None);
        self.say_last_words();
    }

    /// Sleeps until there is something to do.
    fn wait(&mut self) -> io::Result<Ready> {
        let is_paused = self
            .accept_after
            .is_some_and(|after| Instant::now() < after);
        let accepting = if is_paused {
            PollFlags::empty()
        } else {
            PollFlags::IN
        };
        let crowded = |client: &ClientId| self.inbox.is_crowded_by(*client);
        let crowd: Vec<ClientId> = self
            .clients
            .iter()
            .map(|(id, _)| *id)
            .filter(crowded)
            .collect();
        let timeout = match (crowd.is_empty(), is_paused) {
            (false, _) => Some(timespec(READ_PAUSE)),
            (true, true) => Some(timespec(ACCEPT_PAUSE)),
            (true, false) => None,
        };
        let mut fds = vec![
            PollFd::new(&self.sleeper.reader, PollFlags::IN),
            PollFd::new(&self.listener, accepting),
        ];
        fds.extend(self.clients.iter().map(|(client, connection)| {
            let reading = if crowd.contains(client) {
                PollFlags::empty()
            } else {
                PollFlags::IN
            };
            poll_fd(connection, reading)
        }));
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let clients = self.clients.iter().zip(&fds[2..]);
        Ok(Ready {
            is_woken: !fds[0].revents().is_empty(),
            can_accept: fds[1].revents().contains(PollFlags::IN),
            clients: clients
                .filter(|(_, fd)| !fd.revents().is_empty())
                .map(|((client, _), fd)| (*client, fd.revents()))
                .collect(),
        })
    }

    /// Sends what the engine has put in the outbox. Messages of clients that are gone are dropped.
    fn deliver(&mut self) {
        for (client, message) in self.outbox.take_remote() {
            self.with_client(client, |connection, _, _| connection.send(&message));
        }
    }

    /// Reads from and writes to a client whose socket is ready.
    fn serve(&mut self, client: ClientId, flags: PollFlags) {
        let outbox = Arc::clone(&self.outbox);
        self.with_client(client, |connection, inbox, scratch| {
            if flags.contains(PollFlags::OUT) {
                connection.flush()?;
            }
            if flags.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
                connection.receive(scratch, |message| inbox.offer(client, message, &outbox))?;
            }
            Ok(())
        });
    }

    /// Runs `action` on a client's connection and ends the connection when that fails.
    fn with_client(
        &mut self,
        client: ClientId,
        action: impl FnOnce(&mut Connection, &Inbox, &mut [u8]) -> Result<(), Closed>,
    ) {
        let Some(at) = self.clients.iter().position(|(id, _)| *id == client) else {
            return;
        };
        let Err(reason) = action(&mut self.clients[at].1, &self.inbox, &mut self.scratch) else {
            return;
        };
        if !matches!(reason, Closed::Gone) {
            complain(format_args!("client {} is cut off: {reason}", client.0));
        }
        self.clients.remove(at);
        self.inbox.push(client, Inbound::Disconnected);
        self.accept_after = None;
    }

    fn accept(&mut self) {
        let accepted = self.listener.accept().and_then(|(stream, _)| {
            stream.set_nonblocking(true)?;
            Ok(stream)
        });
        match accepted {
            Ok(stream) => {
                let client = ClientId(self.next_client);
                self.next_client += 1;
                let hello = self.hello.clone();
                self.clients.push((client, Connection::new(stream)));
                self.with_client(client, |connection, _, _| connection.send(&hello));
            }
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => {
                complain(format_args!("can't accept a client: {error}"));
                self.accept_after = Some(Instant::now() + ACCEPT_PAUSE);
            }
        }
    }

    /// Sends what is left, as far as the clients take it in time.
    fn say_last_words(&mut self) {
        self.deliver();
        let end = Instant::now() + LAST_WORDS;
        loop {
            self.clients
                .retain(|(_, connection)| connection.has_output());
            let left = end.saturating_duration_since(Instant::now());
            if self.clients.is_empty() || left.is_zero() {
                return;
            }
            let mut fds: Vec<_> = self
                .clients
                .iter()
                .map(|(_, connection)| poll_fd(connection, PollFlags::empty()))
                .collect();
            if poll(&mut fds, Some(&timespec(left))).is_err() {
                return;
            }
            self.clients
                .retain_mut(|(_, connection)| connection.flush().is_ok());
        }
    }
}

/// What `IoLoop::wait` found.
struct Ready {
    is_woken: bool,
    can_accept: bool,
    clients: Vec<(ClientId, PollFlags)>,
}

fn poll_fd(connection: &Connection, mut flags: PollFlags) -> PollFd<'_> {
    flags.set(PollFlags::OUT, connection.has_output());
    PollFd::new(&connection.stream, flags)
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: duration.as_secs() as i64,
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}
