//! The server against real sockets: order, garbage, abrupt ends, slow readers, latency.
#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use octavo_core::frames::{decode_outbound, encode_inbound};
use octavo_core::ids::{ClientId, RequestId, TenantId};
use octavo_core::mailbox::{Inbox, MAX_UNREAD_BYTES, Outbox, QueueView};
use octavo_core::protocol::{Abort, AddRequest, EngineStats, Inbound, Outbound, RefusalKind};
use octavo_core::queue_load::{QueueBounds, QueueLoad};
use octavo_ipc::{MAX_BUFFERED_BYTES, MAX_FRAME_BYTES, Server};

const PATIENCE: Duration = Duration::from_secs(30);

struct Engine {
    server: Server,
    path: PathBuf,
    inbox: Arc<Inbox>,
    outbox: Arc<Outbox>,
    received: VecDeque<(ClientId, Inbound)>,
}

impl Engine {
    fn start() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("octavo-ipc-{}-{number}.sock", std::process::id());
        Self::start_on(std::env::temp_dir().join(name))
    }

    fn start_on(path: PathBuf) -> Self {
        let inbox = Arc::new(Inbox::default());
        let outbox = Arc::new(Outbox::default());
        let server = Server::start(
            &path,
            b"facts".to_vec(),
            Arc::clone(&inbox),
            Arc::clone(&outbox),
        )
        .unwrap();
        Self {
            server,
            path,
            inbox,
            outbox,
            received: VecDeque::new(),
        }
    }

    fn client(&self) -> Client {
        let stream = UnixStream::connect(&self.path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut client = Client(stream);
        assert_eq!(client.receive(), Outbound::Hello(b"facts".to_vec()));
        client
    }

    fn receive(&mut self) -> (ClientId, Inbound) {
        while self.received.is_empty() {
            assert!(self.inbox.wait(PATIENCE), "nothing has arrived");
            self.received.extend(self.inbox.take());
        }
        self.received.pop_front().unwrap()
    }

    fn reply(&self, client: u32, call_id: u64, body: Vec<u8>) {
        self.outbox
            .post(ClientId(client), Outbound::Reply { call_id, body });
    }
}

struct Client(UnixStream);

impl Client {
    fn send_bytes(&mut self, body: &[u8]) {
        self.0
            .write_all(&(body.len() as u32).to_le_bytes())
            .unwrap();
        self.0.write_all(body).unwrap();
    }

    fn send(&mut self, message: &Inbound) {
        self.send_bytes(&encode_inbound(message));
    }

    fn receive(&mut self) -> Outbound {
        let mut prefix = [0; 4];
        self.0.read_exact(&mut prefix).unwrap();
        let mut body = vec![0; u32::from_le_bytes(prefix) as usize];
        self.0.read_exact(&mut body).unwrap();
        decode_outbound(&body).unwrap()
    }

    fn is_cut_off(&mut self) -> bool {
        let mut rest = Vec::new();
        match self.0.read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

fn abort(id: u64) -> Inbound {
    Inbound::Abort(Abort {
        request_id: RequestId(id),
        index: None,
    })
}

fn add(id: u64) -> Inbound {
    Inbound::Add(AddRequest {
        request_id: RequestId(id),
        prompt_token_ids: vec![1; 50],
        n: 1,
        max_tokens: 1,
        min_tokens: 0,
        stop_token_ids: vec![],
        priority: 0,
        tenant: TenantId::NOBODY,
        weight: 1000,
        cache_salt: vec![],
        deadline_s: 0.0,
        logprobs: -1,
        prompt_logprobs: -1,
        grammar: vec![],
        params: vec![],
        media: vec![],
        media_data: vec![],
    })
}

fn call(call_id: u64, body: Vec<u8>) -> Inbound {
    Inbound::Call { call_id, body }
}

fn reply(call_id: u64, body: &[u8]) -> Outbound {
    Outbound::Reply {
        call_id,
        body: body.to_vec(),
    }
}

#[test]
fn clients_are_told_apart_and_messages_stay_in_order() {
    let mut engine = Engine::start();
    let mut first = engine.client();
    let mut second = engine.client();
    for id in 0..100 {
        first.send(&abort(id));
        assert_eq!(engine.receive(), (ClientId(1), abort(id)));
        second.send(&abort(1000 + id));
        assert_eq!(engine.receive(), (ClientId(2), abort(1000 + id)));
    }
    for id in 0..100 {
        engine.reply(2, id, vec![2]);
        engine.reply(1, id, vec![1]);
    }
    for id in 0..100 {
        assert_eq!(first.receive(), reply(id, &[1]));
        assert_eq!(second.receive(), reply(id, &[2]));
    }
}

#[test]
fn frames_arrive_whole_whatever_their_pieces() {
    let mut engine = Engine::start();
    let mut client = engine.client();
    let big = call(7, vec![5; 3_000_000]);
    client.send(&big);
    assert_eq!(engine.receive(), (ClientId(1), big));
    let body = encode_inbound(&abort(9));
    let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
    bytes.extend(&body);
    let twice = [bytes.clone(), bytes].concat();
    for piece in twice.chunks(3) {
        client.0.write_all(piece).unwrap();
    }
    assert_eq!(engine.receive(), (ClientId(1), abort(9)));
    assert_eq!(engine.receive(), (ClientId(1), abort(9)));
}

#[test]
fn garbage_ends_its_own_connection_only() {
    let mut engine = Engine::start();
    let mut good = engine.client();
    let mut bad = engine.client();
    let mut huge = engine.client();
    bad.send(&abort(1));
    assert_eq!(engine.receive(), (ClientId(2), abort(1)));
    bad.send_bytes(&[77, 77, 77]);
    assert!(bad.is_cut_off());
    assert_eq!(engine.receive(), (ClientId(2), Inbound::Disconnected));
    huge.0
        .write_all(&(MAX_FRAME_BYTES as u32 + 1).to_le_bytes())
        .unwrap();
    assert!(huge.is_cut_off());
    assert_eq!(engine.receive(), (ClientId(3), Inbound::Disconnected));
    good.send(&abort(2));
    assert_eq!(engine.receive(), (ClientId(1), abort(2)));
    engine.reply(2, 1, vec![]);
    engine.reply(1, 2, vec![]);
    assert_eq!(good.receive(), reply(2, &[]));
}

#[test]
fn a_client_that_goes_in_the_middle_of_a_frame_is_reported_once() {
    let mut engine = Engine::start();
    let mut client = engine.client();
    client.send(&abort(3));
    client.0.write_all(&[200, 0, 0, 0, 1]).unwrap();
    drop(client);
    assert_eq!(engine.receive(), (ClientId(1), abort(3)));
    assert_eq!(engine.receive(), (ClientId(1), Inbound::Disconnected));
    let mut next = engine.client();
    next.send(&abort(4));
    assert_eq!(engine.receive(), (ClientId(2), abort(4)));
}

#[test]
fn a_slow_reader_is_cut_off_and_nobody_waits_for_it() {
    let mut engine = Engine::start();
    let mut slow = engine.client();
    let mut quick = engine.client();
    let size = MAX_BUFFERED_BYTES / 4;
    let start = Instant::now();
    for id in 0..8 {
        engine.reply(1, id, vec![0; size]);
    }
    assert!(
        start.elapsed() < Duration::from_secs(2),
        "posting must not wait for the reader"
    );
    engine.reply(2, 1, vec![1]);
    assert_eq!(quick.receive(), reply(1, &[1]));
    assert_eq!(engine.receive(), (ClientId(1), Inbound::Disconnected));
    assert!(slow.is_cut_off());
}

#[test]
fn a_reader_within_the_limit_gets_everything() {
    let engine = Engine::start();
    let mut client = engine.client();
    for id in 0..3 {
        engine.reply(1, id, vec![id as u8; MAX_BUFFERED_BYTES / 4]);
    }
    for id in 0..3 {
        assert_eq!(
            client.receive(),
            reply(id, &vec![id as u8; MAX_BUFFERED_BYTES / 4])
        );
    }
}

#[test]
fn a_flood_of_requests_is_refused_while_the_engine_is_busy() {
    let mut engine = Engine::start();
    let bounds = QueueBounds {
        max_requests: 100,
        max_tokens: 1 << 40,
        max_bytes: 1 << 30,
    };
    engine.inbox.set_view(QueueView {
        bounds,
        load: QueueLoad {
            num_requests: 40,
            num_tokens: 400,
            num_bytes: 0,
        },
        retry_after_s: 3.0,
        stats: EngineStats::default(),
    });
    let mut client = engine.client();
    let mut writer = Client(client.0.try_clone().unwrap());
    let flood = std::thread::spawn(move || (0..2000).for_each(|id| writer.send(&add(id))));
    for id in 60..2000 {
        let Outbound::Output(frame) = client.receive() else {
            panic!("no refusal");
        };
        let refusal = &frame.refusals[0];
        assert_eq!((refusal.request_id.0, refusal.retry_after_s), (id, 3.0));
        assert_eq!(refusal.kind, RefusalKind::QueueFull);
    }
    flood.join().unwrap();
    for id in 0..60 {
        assert_eq!(engine.receive(), (ClientId(1), add(id)));
    }
    assert!(engine.received.is_empty() && engine.inbox.is_empty());
    assert_eq!(engine.inbox.take_refused().len(), 1940);
}

#[test]
fn a_client_with_too_much_unread_has_to_wait() {
    let mut engine = Engine::start();
    let mut heavy = engine.client();
    let mut light = engine.client();
    let size = MAX_UNREAD_BYTES / 8;
    let flood = std::thread::spawn(move || {
        (0..32).for_each(|id| heavy.send(&call(id, vec![1; size])));
        heavy
    });
    let start = Instant::now();
    while !engine.inbox.is_crowded_by(ClientId(1)) {
        assert!(start.elapsed() < PATIENCE, "never crowded");
        std::thread::yield_now();
    }
    // The IO thread goes round often enough to read all of it, and serves the other one meanwhile.
    for id in 0..1000 {
        engine.reply(2, id, vec![]);
        assert_eq!(light.receive(), reply(id, &[]));
    }
    engine.received.extend(engine.inbox.take());
    let num_unread = engine.received.len();
    assert!(num_unread <= 9, "{num_unread} messages were read");
    for id in 0..32 {
        assert_eq!(engine.receive(), (ClientId(1), call(id, vec![1; size])));
    }
    drop(flood.join().unwrap());
}

#[test]
fn closing_says_the_last_words_and_removes_the_socket() {
    let mut engine = Engine::start();
    let mut client = engine.client();
    engine.reply(1, 5, vec![9; 1_000_000]);
    let reader = std::thread::spawn(move || (client.receive(), client.is_cut_off()));
    engine.server.close();
    assert!(!engine.path.exists());
    assert_eq!(
        reader.join().unwrap(),
        (reply(5, &vec![9; 1_000_000]), true)
    );
    engine.server.close();
}

#[test]
fn a_stale_socket_is_replaced_but_not_one_in_use() {
    let engine = Engine::start();
    let in_use = Server::start(&engine.path, vec![], Arc::default(), Arc::default());
    assert_eq!(in_use.unwrap_err().kind(), std::io::ErrorKind::AddrInUse);
    engine.client();
    let stale = engine.path.with_extension("stale");
    drop(std::os::unix::net::UnixListener::bind(&stale).unwrap());
    assert!(stale.exists());
    Engine::start_on(stale).client();
}

#[test]
fn a_reply_takes_well_under_a_millisecond() {
    let mut engine = Engine::start();
    let mut client = engine.client();
    let mut times: Vec<Duration> = (0..200)
        .map(|id| {
            let start = Instant::now();
            client.send(&call(id, vec![0; 2000]));
            let (from, _) = engine.receive();
            engine.reply(from.0, id, vec![0; 10_000]);
            client.receive();
            start.elapsed()
        })
        .collect();
    times.sort();
    println!("round trip: median {:?}, p95 {:?}", times[100], times[190]);
    assert!(
        times[100] < Duration::from_millis(2),
        "median round trip {:?}",
        times[100]
    );
}
