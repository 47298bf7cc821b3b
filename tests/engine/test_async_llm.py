"""`AsyncLLM` with a real engine process (fake runner): streams, aborts, calls, and how it ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import uvloop

from octavo import LLM, AsyncLLM, SamplingParams
from octavo.engine.request import Terms
from octavo.errors import ConfigError, EngineDeadError, ModelError, OverloadError, RequestError

from .conftest import ended, fake_config

ENDLESS = SamplingParams(max_tokens=None)


@pytest.fixture
async def llm() -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(config=fake_config()) as llm:
        yield llm


@pytest.fixture
async def slow_llm() -> AsyncIterator[AsyncLLM]:
    """Steps take 10 ms: a request of 200 tokens runs for two seconds, unless it is aborted."""
    async with AsyncLLM(config=fake_config(fake_step_ms=10, max_num_seqs=4)) as llm:
        yield llm


async def assert_idle(llm: AsyncLLM) -> None:
    """Calls are answered between steps: a few steps after the frames sent before, all blocks are back."""
    for _ in range(4):
        stats = await llm.call("stats")
    assert stats["num_running"] + stats["num_waiting"] == 0
    assert stats["num_free_blocks"] == stats["num_blocks"]


async def test_deltas_add_up_to_the_cumulative_and_the_final_output(slow_llm: AsyncLLM) -> None:
    llm = slow_llm
    params = SamplingParams(max_tokens=20, n=2, logprobs=1)
    deltas: dict[int, list[int]] = {0: [], 1: []}
    async for output in llm.generate([1, 2], params, stream="delta"):
        for completion in output.outputs:
            assert completion.token_ids
            assert completion.logprobs is not None
            assert len(completion.logprobs) == len(completion.token_ids)
            deltas[completion.index] += completion.token_ids
    cumulative = [output async for output in llm.generate([1, 2], params, stream="cumulative")]
    final = [output async for output in llm.generate([1, 2], params, stream="final")]
    assert len(final) == 1
    assert final[0].finished
    assert [completion.token_ids for completion in final[0].outputs] == [deltas[0], deltas[1]]
    assert [completion.token_ids for completion in cumulative[-1].outputs] == [deltas[0], deltas[1]]
    assert not cumulative[0].finished
    lengths = [len(output.outputs[0].token_ids) for output in cumulative]
    assert lengths == sorted(lengths)
    assert final[0].outputs[0].cumulative_logprob == pytest.approx(20 * -0.6931, abs=1e-2)


async def test_many_at_once(llm: AsyncLLM) -> None:
    async def final(i: int) -> list[int]:
        params = SamplingParams(max_tokens=1 + i % 40)
        async for output in llm.generate([i + 1], params, f"r{i}", stream="final"):
            assert output.request_id == f"r{i}"
            return output.outputs[0].token_ids
        raise AssertionError

    found = await asyncio.gather(*map(final, range(200)))
    assert [len(ids) for ids in found] == [1 + i % 40 for i in range(200)]
    await assert_idle(llm)
    assert llm.stats is not None
    assert llm.stats.num_finished == 200


async def test_leaving_the_loop_aborts(slow_llm: AsyncLLM) -> None:
    async for _ in slow_llm.generate([1], ENDLESS):
        break
    stream = slow_llm.submit([1], ENDLESS)
    async with aclosing(stream.__aiter__()) as batches:  # type: ignore[type-var]
        async for _ in batches:
            break
    await assert_idle(slow_llm)
    assert (await slow_llm.call("stats"))["num_aborted"] == 2


async def test_cancelling_the_reader_aborts(slow_llm: AsyncLLM) -> None:
    started = asyncio.Event()

    async def read() -> None:
        async for _ in slow_llm.generate([1], ENDLESS):
            started.set()

    reader = asyncio.create_task(read())
    await asyncio.wait_for(started.wait(), 20)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await assert_idle(slow_llm)


async def test_abort_by_id_ends_the_iterator(slow_llm: AsyncLLM) -> None:
    reasons = []
    async for output in slow_llm.generate([1], ENDLESS, "mine"):
        reasons.append(output.outputs[0].finish_reason)
        if len(reasons) == 1:
            assert await slow_llm.abort("mine")
    assert reasons[-1] == "abort"
    assert not await slow_llm.abort("mine")
    await assert_idle(slow_llm)


async def test_abort_of_a_request_that_waits(slow_llm: AsyncLLM) -> None:
    running = [slow_llm.submit([1], ENDLESS) for _ in range(4)]
    waiting = slow_llm.submit([2], ENDLESS, request_id="waiting")
    assert await slow_llm.abort("waiting")
    batches = [batch async for batch in waiting]
    assert [delta.finish_reason for batch in batches for delta in batch] == ["abort"]
    for stream in running:
        stream.close()
    await assert_idle(slow_llm)


async def test_a_request_id_is_used_once_at_a_time(slow_llm: AsyncLLM) -> None:
    first = slow_llm.submit([1], ENDLESS, request_id="a")
    with pytest.raises(RequestError, match="'a' is in use"):
        slow_llm.submit([1], ENDLESS, request_id="a")
    first.close()
    second = slow_llm.submit([1], SamplingParams(max_tokens=1), request_id="a")
    assert [len(delta.token_ids) async for batch in second for delta in batch] == [1]


async def test_invalid_requests_never_leave(llm: AsyncLLM) -> None:
    for prompt in ([], [1] * 256, [32000]):
        with pytest.raises(RequestError):
            llm.submit(prompt, SamplingParams())
    with pytest.raises(RequestError, match="stream must be one of delta, cumulative, final"):
        async for _ in llm.generate([1], stream="all"):  # type: ignore[arg-type]
            pass
    with pytest.raises(RequestError, match=r"sampling_params must be SamplingParams\(…\), not dict"):
        async for _ in llm.generate([1], {"max_tokens": 3}):  # type: ignore[arg-type]
            pass
    assert (await llm.call("stats"))["num_steps"] == 0


async def test_a_full_queue_refuses_with_a_time() -> None:
    async with AsyncLLM(config=fake_config(max_queued_requests=3, max_num_seqs=1, fake_step_ms=5)) as llm:
        streams = [llm.submit([1], ENDLESS) for _ in range(12)]
        refused: list[float] = []
        for stream in streams:
            try:
                async for _ in stream:
                    break
            except OverloadError as error:
                refused.append(error.retry_after_s)
            stream.close()
        assert len(refused) >= 8
        assert min(refused) > 0
        await assert_idle(llm)


async def test_a_deadline_in_the_queue_refuses(slow_llm: AsyncLLM) -> None:
    running = [slow_llm.submit([1], ENDLESS) for _ in range(4)]
    late = slow_llm.submit([2], ENDLESS, terms=Terms(deadline_s=0.02))
    with pytest.raises(OverloadError, match="deadline"):
        async for _ in late:
            pass
    for stream in running:
        stream.close()


async def test_calls(llm: AsyncLLM) -> None:
    assert await llm.call("ping") == {"num_steps": 0}
    assert await llm.call("reset_prefix_cache") == {"complete": True}
    with pytest.raises(ValueError, match="unknown call"):
        await llm.call("shutdown_the_universe")


async def test_drain_lets_requests_finish_and_refuses_others(slow_llm: AsyncLLM) -> None:
    pid = slow_llm.engine_pid
    assert pid is not None
    stream = slow_llm.submit([1], SamplingParams(max_tokens=30))
    closing = asyncio.create_task(slow_llm.close(drain_timeout_s=30))
    await asyncio.sleep(0)  # let it begin
    assert slow_llm.state == "draining"
    with pytest.raises(OverloadError, match="shutting down"):
        slow_llm.submit([1], ENDLESS)
    assert sum([len(delta.token_ids) async for batch in stream for delta in batch]) == 30
    assert await closing == 0
    assert slow_llm.state == "dead"
    await ended(pid)


async def test_drain_cuts_off_what_does_not_finish(slow_llm: AsyncLLM) -> None:
    stream = slow_llm.submit([1], ENDLESS)
    assert await slow_llm.close(drain_timeout_s=0.05) == 1
    with pytest.raises(EngineDeadError, match="shut down"):
        async for _ in stream:
            pass
    with pytest.raises(EngineDeadError, match="the engine was closed"):
        slow_llm.submit([1], ENDLESS)
    assert await slow_llm.close() == 0


async def test_errors_of_the_start_come_back(tmp_path: Path) -> None:
    llm = AsyncLLM("./no/such/model")
    with pytest.raises(ModelError, match="no/such/model") as caught:
        await llm.start()
    assert caught.value.exit_code == 2
    assert llm.state == "dead"
    await llm.close()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        await AsyncLLM(str(tmp_path)).start()
    with pytest.raises(ConfigError, match="did you mean"):
        AsyncLLM("m", max_num_seq=3)


async def test_a_broken_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        await AsyncLLM(str(tmp_path), runner="fake", max_model_len=64).start()
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        LLM(str(tmp_path), runner="fake", max_model_len=64)


async def test_before_the_start() -> None:
    llm = AsyncLLM(config=fake_config())
    assert (llm.state, llm.facts, llm.stats, llm.tokenizer) == ("starting", None, None, None)
    with pytest.raises(EngineDeadError, match="not been started"):
        llm.submit([1], ENDLESS)
    assert await llm.close() == 0


async def test_close_during_the_start(tiny_llama: Path) -> None:
    loading = asyncio.Event()
    llm = AsyncLLM(str(tiny_llama), device="cpu", dtype="float32")
    start = asyncio.create_task(llm.start(lambda stage, fraction: loading.set()))
    await asyncio.wait_for(loading.wait(), 60)
    pid = llm.engine_pid
    assert pid is not None
    await llm.close()
    with pytest.raises(EngineDeadError, match="before it was ready"):
        await start
    await ended(pid)
    assert llm.state == "dead"


async def test_progress_is_reported() -> None:
    seen: list[tuple[str, float]] = []
    llm = AsyncLLM(config=fake_config())
    await llm.start(lambda stage, fraction: seen.append((stage, fraction)))
    assert seen
    assert llm.progress == seen[-1]
    await llm.close()


async def test_text(tiny_llama: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "cpu_threads": 1}
    async with AsyncLLM(str(tiny_llama), **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        text, token_ids = "", []
        async for output in llm.generate("Wörld", params):
            assert output.prompt == "Wörld"
            text += output.outputs[0].text
            token_ids += output.outputs[0].token_ids
        assert llm.tokenizer is not None
        assert text == llm.tokenizer.decode(token_ids, True)
        hello = [{"role": "user", "content": "Hi"}]
        pieces = [output async for output in llm.chat(hello, params)]
        (whole,) = [output async for output in llm.chat(hello, params, stream="final")]
        assert whole.prompt == "<|user|>Hi<|a|>"
        assert "".join(piece.outputs[0].text for piece in pieces) == whole.outputs[0].text
        own: dict[str, Any] = {"chat_template": "{{ messages[0].content }}", "add_generation_prompt": False}
        async for output in llm.chat(hello, params, **own):
            assert output.prompt_token_ids == list(b"Hi")
            break
        await assert_idle(llm)
        long = "long prompt " * 500
        with pytest.raises(RequestError, match="more than the context of 512 tokens can hold"):
            async for _ in llm.generate(long, params):
                pass


def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import asyncio
from octavo import AsyncLLM, SamplingParams
async def work():
    async with AsyncLLM("fake", runner="fake", max_model_len=64) as llm:
        async for output in llm.generate([1], SamplingParams(max_tokens=3), stream="final"):
            print(len(output.outputs[0].token_ids))
asyncio.run(work())
""")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("3\n", "")


def test_it_runs_on_uvloop() -> None:
    async def work() -> tuple[list[int], int]:
        async with AsyncLLM(config=fake_config()) as llm:
            stream = llm.submit([1], SamplingParams(max_tokens=30))
            lengths = [len(delta.token_ids) async for batch in stream for delta in batch]
            async for _ in llm.generate([2], ENDLESS):
                break
            await assert_idle(llm)
            pid = llm.engine_pid
            assert pid is not None
        await ended(pid)
        return lengths, pid

    lengths, _ = uvloop.run(work())
    assert sum(lengths) == 30
