"""Deaths: of the engine process, of its parent, and of both by crash; nothing hangs and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from octavo import AsyncLLM, SamplingParams
from octavo.config import make_engine_config
from octavo.engine.client import State
from octavo.engine.handle import EngineHandle
from octavo.engine.spawn import EngineProcess
from octavo.errors import EngineDeadError

from .conftest import ended, fake_config

ENDLESS = SamplingParams(max_tokens=None)


@pytest.fixture
async def llm() -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(config=fake_config(fake_step_ms=10), max_engine_restarts=2) as llm:
        yield llm


def engine_pid(llm: AsyncLLM) -> int:
    assert llm.engine_pid is not None
    return llm.engine_pid


async def state(llm: AsyncLLM, wanted: State) -> None:
    """Wait until the engine is in a state."""
    await asyncio.wait_for(llm.reached(wanted), 30)


async def test_a_killed_engine_fails_its_requests_and_is_replaced(llm: AsyncLLM) -> None:
    first = engine_pid(llm)
    readers = [llm.submit([i + 1], ENDLESS) for i in range(3)]
    call = asyncio.create_task(llm.call("ping"))
    await call
    os.kill(first, signal.SIGKILL)
    for stream in readers:
        with pytest.raises(EngineDeadError, match="ended while the request was in flight"):
            async for _ in stream:
                pass
    assert llm.state == "restarting"
    with pytest.raises(EngineDeadError, match="being restarted"):
        llm.submit([1], ENDLESS)
    await state(llm, "ready")
    assert engine_pid(llm) != first
    stream = llm.submit([1], SamplingParams(max_tokens=5))
    assert sum([len(delta.token_ids) async for batch in stream for delta in batch]) == 5
    await ended(first)


async def test_a_call_in_flight_fails_too(llm: AsyncLLM) -> None:
    os.kill(engine_pid(llm), signal.SIGSTOP)
    call = asyncio.create_task(llm.call("ping"))
    await asyncio.sleep(0)  # let it be sent
    os.kill(engine_pid(llm), signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        await call
    await state(llm, "ready")


async def test_restarts_are_bounded(llm: AsyncLLM) -> None:
    for _ in range(2):
        os.kill(engine_pid(llm), signal.SIGKILL)
        await state(llm, "restarting")
        await state(llm, "ready")
    os.kill(engine_pid(llm), signal.SIGKILL)
    await state(llm, "dead")
    with pytest.raises(EngineDeadError, match="the engine is dead"):
        llm.submit([1], ENDLESS)
    await ended(engine_pid(llm))


async def test_signals_to_the_group_do_not_end_the_engine(llm: AsyncLLM) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(engine_pid(llm), number)
    stream = llm.submit([1], SamplingParams(max_tokens=5))
    assert sum([len(delta.token_ids) async for batch in stream for delta in batch]) == 5


async def test_close_ends_a_stopped_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.engine.client.STOP_TIMEOUT_S", 0.1)
    llm = AsyncLLM(config=fake_config())
    await llm.start()
    os.kill(engine_pid(llm), signal.SIGSTOP)
    await llm.close()
    await ended(engine_pid(llm))


PARENT = """
import asyncio, sys
from octavo import AsyncLLM, SamplingParams
async def work():
    llm = AsyncLLM("fake", runner="fake", max_model_len=256, fake_step_ms=5.0)
    await llm.start()
    stream = llm.submit([1], SamplingParams(max_tokens=None))
    print(llm.engine_pid, llm._client._handle.socket_path, flush=True)
    async for _ in stream:
        pass
    await asyncio.Event().wait()
asyncio.run(work())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
async def test_the_engine_ends_with_its_parent(number: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert parent.stdout is not None
    pid, path = (await asyncio.to_thread(parent.stdout.readline)).split()
    assert Path(path.decode()).exists()
    parent.send_signal(number)
    await asyncio.to_thread(parent.wait, 30)
    await ended(int(pid))
    assert not Path(path.decode()).parent.exists()


async def test_a_parent_that_leaves_while_the_engine_loads(tiny_llama: Path) -> None:
    config = make_engine_config({"model": str(tiny_llama), "device": "cpu"})
    handle = await EngineHandle.open(EngineProcess(config))
    handle._writer.close()
    await ended(handle.pid)
    assert not Path(handle.socket_path).parent.exists()


BROKEN_STEP = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from octavo.worker.fake import FakeRunner
def sample(self, plan):
    raise RuntimeError("device on fire")
FakeRunner.sample = sample
from octavo.engine.process import main
main(int(sys.argv[1]))
"""


async def test_a_broken_step_ends_the_process_with_a_report(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("octavo.engine.spawn.BOOT", BROKEN_STEP)
    async with AsyncLLM(config=fake_config(), max_engine_restarts=0) as llm:
        with pytest.raises(EngineDeadError):
            async for _ in llm.submit([1], ENDLESS):
                pass
        await state(llm, "dead")
        await ended(engine_pid(llm))
    lines = capfd.readouterr().err.splitlines()
    assert "octavo: the engine broke: RuntimeError: device on fire" in lines
    assert any("num_rows" in line or "plan" in line for line in lines)


FAILING_START = """
import os, sys
os._exit(3)
"""


async def test_an_engine_that_ends_while_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.engine.spawn.BOOT", FAILING_START)
    llm = AsyncLLM(config=fake_config())
    with pytest.raises(EngineDeadError, match=r"ended before it was ready \(exit code 3\)"):
        await llm.start()
    assert llm.state == "dead"
