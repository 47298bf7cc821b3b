"""Engines beyond the block in which they were made: forked processes, other event loops, the interpreter's end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo import LLM, AsyncLLM, SamplingParams
from octavo.errors import ConfigError, EngineDeadError, ModelError

from .conftest import ended, fake_config


def test_an_engine_in_a_forked_process_says_so() -> None:
    """Its threads stayed behind: it would wait for ever."""
    code = """
import multiprocessing as mp
from octavo import LLM, SamplingParams
from octavo.errors import EngineDeadError
llm = LLM("fake", runner="fake", max_model_len=64)
llm._lifetime.turns.acquire()  # as if another thread generated
def child(results):
    try:
        llm.generate([[1]], SamplingParams(max_tokens=3))
    except EngineDeadError as error:
        results.put(str(error))
    llm.close()
    with LLM("fake", runner="fake", max_model_len=64) as own:
        results.put(len(own.generate([[1]], SamplingParams(max_tokens=3))))
context = mp.get_context("fork")
results = context.Queue()
process = context.Process(target=child, args=(results,))
process.start()
print(results.get(timeout=20))
print(results.get(timeout=20))
process.join(20)
print(process.exitcode)
llm._lifetime.turns.release()
print(len(llm.generate([[1]], SamplingParams(max_tokens=3))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("this engine belongs to the process that this one was forked from"), done.stderr
    assert lines[1:] == ["1", "0", "1"]


def test_a_daemon_thread_that_generates_ends_with_the_interpreter() -> None:
    """Left alone it would come back into a finalizing interpreter, which aborts the process."""
    code = """
import atexit, threading
left, started = threading.Event(), threading.Event()
atexit.register(lambda: print(left.wait(5)))  # registered first, it runs last
from octavo import LLM, SamplingParams
from octavo.errors import EngineDeadError
llm = LLM("fake", runner="fake", max_model_len=4096, fake_step_ms=10)
launch = llm._loop.runner.launch
llm._loop.runner.launch = lambda plan: (launch(plan), started.set())
def work():
    try:
        llm.generate([[1]], SamplingParams(max_tokens=4000))
    except EngineDeadError as error:
        assert "the interpreter is ending" in str(error)
        left.set()
threading.Thread(target=work, daemon=True).start()
started.wait(20)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_an_async_engine_in_another_event_loop_says_so() -> None:
    llm = AsyncLLM(config=fake_config())

    async def work() -> int | None:
        async for output in llm.generate([1], SamplingParams(max_tokens=3), stream="final"):
            assert len(output.outputs[0].token_ids) == 3
        return llm.engine_pid

    async def end(pid: int) -> None:
        assert await llm.close() == 0
        await ended(pid)

    pid = asyncio.run(work())
    assert pid is not None
    with pytest.raises(EngineDeadError, match="another event loop"):
        asyncio.run(asyncio.wait_for(work(), 20))
    asyncio.run(end(pid))


def test_public_names_are_shown() -> None:
    import octavo

    assert {"LLM", "AsyncLLM", "SamplingParams", "RequestOutput", "__version__"} <= set(dir(octavo))


def test_close_after_a_fork_leaves_the_parents_engine_alone() -> None:
    with LLM(config=fake_config()) as llm:
        pid = os.fork()
        if pid == 0:
            llm.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert len(llm.generate([1], SamplingParams(max_tokens=2))) == 1


def test_what_never_started_starts_in_any_event_loop(tmp_path: Path) -> None:
    """Each time it is said what is wrong with the model."""
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    llm = AsyncLLM(tmp_path, device="cpu")
    for _ in range(2):
        with pytest.raises((ModelError, ConfigError)):
            asyncio.run(llm.start())
