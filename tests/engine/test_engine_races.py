"""Starts and ends that overlap: the engine dies, its client is closed or cancelled, between any two lines of the start.
Nothing hangs, nothing is left behind, nothing is told wrongly.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from octavo import AsyncLLM, SamplingParams
from octavo._core import Tokenizer
from octavo.engine import spawn
from octavo.engine.client import EngineClient
from octavo.engine.handle import EngineHandle, describe_exit
from octavo.engine.spawn import EngineProcess
from octavo.errors import EngineDeadError, ModelError
from octavo.protocol import ModelFacts

from .conftest import ended, fake_config

Open = Callable[[EngineProcess], Any]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where engines make their private folders."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(spawn, "MAX_TEMP_PATH", 1000)  # no engine of these tests gets as far as its socket
    return tmp_path


async def test_an_engine_that_dies_while_its_tokenizer_is_loaded_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = AsyncLLM(config=fake_config())
    lost = threading.Event()
    on_lost = EngineClient._on_lost

    def noticed(client: EngineClient, handle: EngineHandle) -> None:
        on_lost(client, handle)
        lost.set()

    def dying(facts: ModelFacts) -> Tokenizer | None:
        assert llm.engine_pid is not None
        os.kill(llm.engine_pid, signal.SIGKILL)
        assert lost.wait(30)
        return None

    monkeypatch.setattr(EngineClient, "_on_lost", noticed)
    monkeypatch.setattr("octavo.engine.client.load_tokenizer", dying)
    with pytest.raises(EngineDeadError, match="before it was ready"):
        await llm.start()
    assert llm.state == "dead"
    handle = llm._client._handle
    assert handle is not None
    on_lost(llm._client, handle)  # it may come last, too
    assert llm.state == "dead"


async def test_close_before_the_process_is_known_ends_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()
    open_handle: Open = EngineHandle.open

    async def slow(process: EngineProcess) -> EngineHandle:
        reached.set()
        await go_on.wait()
        handle: EngineHandle = await open_handle(process)
        return handle

    monkeypatch.setattr(EngineHandle, "open", slow)
    llm = AsyncLLM(config=fake_config())
    start = asyncio.create_task(llm.start())
    await reached.wait()
    await llm.close()
    go_on.set()
    with pytest.raises(EngineDeadError, match="closed"):
        await asyncio.wait_for(start, 30)
    assert llm.engine_pid is not None
    await ended(llm.engine_pid)
    assert llm.state == "dead"


async def test_a_start_that_is_cancelled_before_the_process_is_known_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: asyncio.Future[EngineProcess] = asyncio.get_running_loop().create_future()

    async def endless(process: EngineProcess) -> EngineHandle:
        reached.set_result(process)
        await asyncio.Event().wait()
        raise AssertionError("nobody sets this event")

    monkeypatch.setattr(EngineHandle, "open", endless)
    start = asyncio.create_task(AsyncLLM(config=fake_config()).start())
    process = await reached
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert process.popen.returncode == -signal.SIGKILL
    assert not Path(process.socket_path).parent.exists()
    process.control.close()


async def test_a_close_that_is_cancelled_still_ends_the_engine() -> None:
    llm = AsyncLLM(config=fake_config(fake_step_ms=10))
    await llm.start()
    assert llm.engine_pid is not None
    llm.submit([1], SamplingParams(max_tokens=None))
    close = asyncio.create_task(llm.close(drain_timeout_s=1000))
    await llm.reached("draining")
    close.cancel()
    with pytest.raises(asyncio.CancelledError):
        await close
    await ended(llm.engine_pid)


def test_asking_a_process_that_is_gone_to_stop_is_no_error() -> None:
    async def work() -> None:
        handle = await EngineHandle.open(EngineProcess(fake_config()))
        handle.kill()
        await handle.ended()
        with contextlib.suppress(ConnectionError):
            await handle._writer.wait_closed()
        handle.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work())


def test_a_child_without_a_parent_says_nothing() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-c", f"from octavo.engine.process import main; main({theirs.fileno()})"]
        child = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stderr=subprocess.PIPE)
    ours.close()
    _, said = child.communicate(timeout=60)
    assert (child.returncode, said) == (0, b"")


def test_a_process_that_can_not_be_started_leaves_nothing(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(*args: Any, **kwargs: Any) -> None:
        raise BlockingIOError("no more processes")

    num_open = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(subprocess, "Popen", no_more)
    with pytest.raises(BlockingIOError):
        EngineProcess(fake_config())
    assert list(folders.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == num_open


async def test_a_process_that_ends_before_it_is_told_anything(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.wait(60)

    with monkeypatch.context() as patch:
        patch.setattr(spawn, "BOOT", "import os; os._exit(3)")
        patch.setattr(subprocess, "Popen", Short)
        process = EngineProcess(fake_config())
    with pytest.raises(EngineDeadError, match=r"before it was ready \(exit code 3\)"):
        await AsyncLLM(config=fake_config(), process=process).start()
    assert list(folders.iterdir()) == []


LONG_ERROR = """
import socket, sys
from octavo.engine import control
from octavo.errors import ModelError
pipe = socket.socket(fileno=int(sys.argv[1]))
pipe.sendall(control.error_message(ModelError("x" * 200000)))
"""


async def test_an_error_may_be_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "BOOT", LONG_ERROR)
    with pytest.raises(ModelError, match=r"x{200000}"):
        await AsyncLLM(config=fake_config()).start()


def test_every_end_of_a_process_has_words() -> None:
    assert [describe_exit(code) for code in (3, -9, -40)] == ["exit code 3", "killed by SIGKILL", "killed by signal 40"]
