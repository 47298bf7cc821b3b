"""The engine's socket as asyncio clients see it: several at once, garbage, abrupt ends, slow readers."""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from octavo import _core

HELLO = b'{"model": "none"}'
MAX_BUFFERED_BYTES = 64 << 20


class EchoEngine:
    """A core without a model whose loop answers every call with its body, and keeps what it was asked."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.core = _core.Core(
            _core.CoreConfig(
                block_size=16,
                num_blocks=8,
                max_num_seqs=2,
                max_num_batched_tokens=32,
                max_model_len=64,
                vocab_size=100,
            )
        )
        arenas = [np.zeros(self.core.arena_layout.num_ints, np.int32) for _ in range(2)]
        outputs = [np.zeros(self.core.output_layout.num_ints, np.int32) for _ in range(2)]
        self.core.register(arenas, outputs)
        self.core.serve(self.path, HELLO)
        self.calls: list[tuple[int, int, bytes]] = []
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._loop)
        self._thread.start()

    def _loop(self) -> None:
        while not self._is_closing.is_set():
            self.core.wait(0.05)
            self.core.step(None)
            for client, call_id, body in self.core.take_calls():
                self.calls.append((client, call_id, body))
                self.core.reply(client, call_id, body)

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join()
        self.core.close()


class Client:
    """One connection; the first frame, the facts, has been read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.decoder = _core.OutputProcessor(None, [])

    @classmethod
    async def connect(cls, engine: EchoEngine) -> Client:
        client = cls(*await asyncio.open_unix_connection(engine.path))
        hello = await client.receive()
        assert (hello.kind, hello.body) == ("hello", HELLO)
        return client

    def send(self, body: bytes) -> None:
        self.writer.write(struct.pack("<I", len(body)) + body)

    async def receive(self) -> _core.Frame:
        (length,) = struct.unpack("<I", await self.reader.readexactly(4))
        return self.decoder.process(await self.reader.readexactly(length))

    async def call(self, call_id: int, body: bytes) -> bytes:
        self.send(_core.encode_call(call_id, body))
        frame = await self.receive()
        assert (frame.kind, frame.call_id) == ("reply", call_id)
        return frame.body

    async def is_cut_off(self) -> bool:
        try:
            while await self.reader.read(1 << 20):
                pass
        except ConnectionResetError:
            pass
        return True


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EchoEngine]:
    engine = EchoEngine(tmp_path / "engine.sock")
    yield engine
    engine.close()


async def test_many_clients_get_their_own_answers(engine: EchoEngine) -> None:
    clients = [await Client.connect(engine) for _ in range(8)]

    async def talk(client: Client, name: int) -> None:
        for call_id in range(50):
            body = b"%d:%d" % (name, call_id)
            assert await client.call(call_id, body) == body

    await asyncio.gather(*(talk(client, name) for name, client in enumerate(clients)))
    assert sorted({client for client, _, _ in engine.calls}) == list(range(1, 9))
    assert len(engine.calls) == 400


async def test_many_calls_at_once_are_answered_in_order(engine: EchoEngine) -> None:
    client = await Client.connect(engine)
    for call_id in range(2000):
        client.send(_core.encode_call(call_id, b"x" * (call_id % 50)))
    assert [(await client.receive()).call_id for _ in range(2000)] == list(range(2000))


async def test_a_large_frame_comes_back(engine: EchoEngine) -> None:
    client = await Client.connect(engine)
    body = bytes(range(256)) * 40_000
    assert await client.call(1, body) == body


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", struct.pack("<I", 2**32 - 1), struct.pack("<IB", 1, 1), struct.pack("<I", 0)],
    ids=["http", "huge", "short", "empty"],
)
async def test_garbage_harms_nobody_else(engine: EchoEngine, garbage: bytes) -> None:
    good = await Client.connect(engine)
    bad = await Client.connect(engine)
    assert await bad.call(1, b"before") == b"before"
    bad.writer.write(garbage)
    assert await bad.is_cut_off()
    assert await good.call(2, b"after") == b"after"
    assert await (await Client.connect(engine)).call(3, b"new") == b"new"


async def test_a_client_may_vanish(engine: EchoEngine) -> None:
    good = await Client.connect(engine)
    for call_id in range(20):
        rude = await Client.connect(engine)
        rude.send(_core.encode_call(call_id, b"x" * 100_000))
        rude.writer.write(b"\xff\x00\x00\x00 half a frame")
        rude.writer.transport.abort()
    assert await good.call(99, b"still here") == b"still here"


async def test_a_refusal_reaches_its_client(engine: EchoEngine) -> None:
    other = await Client.connect(engine)
    client = await Client.connect(engine)
    request = {"n": 1, "max_tokens": 4, "min_tokens": 0, "priority": 0, "deadline_s": 0.0}
    nothing = {"prompt_token_ids": [], "stop_token_ids": [], "cache_salt": b"", "params": b"{}"}
    client.send(_core.encode_add(request_id=5, logprobs=-1, prompt_logprobs=-1, **request, **nothing))
    frame = await client.receive()
    assert [(refusal.request_id, refusal.kind) for refusal in frame.refusals] == [(5, "invalid")]
    assert await other.call(1, b"nothing else") == b"nothing else"


async def test_a_slow_reader_is_cut_off_and_holds_up_nobody(
    engine: EchoEngine, capfd: pytest.CaptureFixture[str]
) -> None:
    slow = await Client.connect(engine)
    quick = await Client.connect(engine)
    slow.reader._transport.pause_reading()  # type: ignore[attr-defined]
    for call_id in range(8):
        engine.core.reply(1, call_id, bytes(MAX_BUFFERED_BYTES // 4))
    assert await quick.call(1, b"now") == b"now"
    slow.reader._transport.resume_reading()  # type: ignore[attr-defined]
    assert await slow.is_cut_off()
    assert "client 1 is cut off" in capfd.readouterr().err


def test_closing_removes_the_socket(tmp_path: Path) -> None:
    engine = EchoEngine(tmp_path / "engine.sock")
    with pytest.raises(OSError, match="in use"):
        engine.core.serve(engine.path, HELLO)
    engine.close()
    assert not (tmp_path / "engine.sock").exists()
    engine.core.close()


def test_a_path_that_cannot_be_bound_is_an_os_error(tmp_path: Path) -> None:
    engine = EchoEngine(tmp_path / "engine.sock")
    with pytest.raises(OSError):
        engine.core.serve(str(tmp_path / "no such folder" / "engine.sock"), HELLO)
    engine.close()
