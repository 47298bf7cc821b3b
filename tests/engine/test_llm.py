"""`LLM` in this process: the forms of its arguments, the order of its outputs, and what a failure leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, EngineDeadError, ModelError, RequestError
from octavo.protocol import RequestOutput

from .conftest import fake_config


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(config=fake_config()) as llm:
        yield llm


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


def is_idle(llm: LLM) -> bool:
    stats = llm.stats()
    return stats["num_free_blocks"] == stats["num_blocks"] and stats["num_running"] + stats["num_waiting"] == 0


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[i + 1] * (1 + i % 7) for i in range(40)]
    params = [SamplingParams(max_tokens=1 + (i * 13) % 29) for i in range(40)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [p.max_tokens for p in params]
    assert [int(output.request_id) for output in outputs] == list(range(40))
    assert all(output.finished for output in outputs)
    alone = [llm.generate(prompt, one)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert tokens(alone) == tokens(outputs)
    assert is_idle(llm)


def test_forms_of_a_prompt_are_equal(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4)
    expected = tokens(llm.generate([3, 4], params))
    assert tokens(llm.generate([[3, 4]], params)) == expected
    assert tokens(llm.generate({"prompt_token_ids": [3, 4]}, params)) == expected
    assert tokens(llm.generate([{"prompt_token_ids": [3, 4]}], [params])) == expected
    assert llm.generate([], params) == []


def test_token_ids_of_numpy_are_pythons_afterwards(llm: LLM) -> None:
    given = np.array([3, 4, 5])
    for prompt in (list(given), {"prompt_token_ids": given}):
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=2))
        assert json.dumps(output.prompt_token_ids) == "[3, 4, 5]"


def test_n_sequences_and_metrics(llm: LLM) -> None:
    (output,) = llm.generate([1, 2, 3], SamplingParams(n=3, max_tokens=6))
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    assert {completion.finish_reason for completion in output.outputs} == {"length"}
    metrics = output.metrics
    assert metrics is not None
    assert metrics.queue_s is not None
    assert metrics.first_token_s is not None
    assert metrics.finished_s is not None
    assert 0 <= metrics.queue_s <= metrics.first_token_s <= metrics.finished_s


def test_logprobs_have_the_token_first(llm: LLM) -> None:
    (output,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=4, logprobs=3, prompt_logprobs=2))
    completion = output.outputs[0]
    assert completion.logprobs is not None
    for token_id, entries in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(entries)) == token_id
        assert [entry.rank for entry in entries.values()] == [1, 2, 3]
    chosen = [
        entries[token_id].logprob for token_id, entries in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    assert completion.cumulative_logprob == pytest.approx(sum(chosen))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [next(iter(entries or {})) for entries in output.prompt_logprobs[1:]] == [2, 3]
    (plain,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=4))
    assert plain.outputs[0].logprobs is None
    assert plain.outputs[0].cumulative_logprob is None
    assert plain.prompt_logprobs is None


def test_a_repeated_prompt_is_cached(llm: LLM) -> None:
    prompt = list(range(1, 100))
    assert llm.generate(prompt, SamplingParams(max_tokens=2))[0].num_cached_tokens == 0
    assert llm.generate(prompt, SamplingParams(max_tokens=2))[0].num_cached_tokens == 96
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, SamplingParams(max_tokens=2))[0].num_cached_tokens == 0


def test_more_prompts_than_a_server_would_queue() -> None:
    with LLM(config=fake_config(max_queued_requests=2, max_queued_tokens=10)) as llm:
        assert len(llm.generate([[1, 2, 3]] * 50, SamplingParams(max_tokens=2))) == 50


def test_nothing_runs_when_one_prompt_is_wrong(llm: LLM) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.generate([[1], []], SamplingParams())
    with pytest.raises(RequestError, match="3 entries for 2 prompts"):
        llm.generate([[1], [2]], [SamplingParams()] * 3)
    for other in ({"max_tokens": 3}, [{"max_tokens": 3}], "max_tokens=3"):
        with pytest.raises(RequestError, match=r"sampling_params must be SamplingParams\(…\)"):
            llm.generate([[1]], other)  # type: ignore[arg-type]
    for encoded in (b"text", [b"text"], bytearray(b"x"), {"prompt": b"text"}):  # integers, but no token ids
        with pytest.raises(RequestError, match=r"not bytes|not bytearray|keys 'prompt'"):
            llm.generate(encoded, SamplingParams())
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.generate("text", SamplingParams())
    assert llm.stats()["num_steps"] == 0


def test_wrong_options_are_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'max_model_length' \(did you mean max_model_len\?\)"):
        LLM("fake", runner="fake", max_model_length=3)
    with pytest.raises(ConfigError, match="not both"):
        LLM("fake", config=fake_config())
    with pytest.raises(ModelError, match="no/such/folder"):
        LLM("./no/such/folder")


def test_ctrl_c_aborts_and_leaves_the_engine_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = llm._loop.runner
    launch, launched = runner.launch, 0

    def interrupted_launch(plan: Any) -> None:
        nonlocal launched
        launched += 1
        if launched == 5:
            os.kill(os.getpid(), signal.SIGINT)
        launch(plan)

    monkeypatch.setattr(runner, "launch", interrupted_launch)
    expected = tokens(llm.generate([[7]], SamplingParams(max_tokens=3)))
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[i + 1] for i in range(20)], SamplingParams(max_tokens=200))
    assert launched >= 5
    assert is_idle(llm)
    assert llm.stats()["num_aborted"] == 20
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert tokens(llm.generate([[7]], SamplingParams(max_tokens=3))) == expected


def test_threads_take_turns(llm: LLM) -> None:
    expected = tokens(llm.generate([[5]], SamplingParams(max_tokens=50)))
    found: list[list[list[int]]] = []

    def work() -> None:
        found.append(tokens(llm.generate([[5]], SamplingParams(max_tokens=50))))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [expected] * 8


def test_a_broken_step_is_reported_and_ends_the_engine(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(plan: Any) -> None:
        raise RuntimeError("device on fire")

    monkeypatch.setattr(llm._loop.runner, "sample", broken)
    with pytest.raises(EngineDeadError, match="device on fire"):
        llm.generate([1], SamplingParams())
    assert "octavo: the engine broke: RuntimeError: device on fire" in capsys.readouterr().err
    with pytest.raises(EngineDeadError, match="can't be used any more: RuntimeError: device on fire"):
        llm.generate([1], SamplingParams())


def test_two_engines_and_one_after_another() -> None:
    params = SamplingParams(max_tokens=3)
    with LLM(config=fake_config()) as first, LLM(config=fake_config(block_size=32)) as second:
        assert tokens(first.generate([1], params)) == tokens(second.generate([1], params))
    first.close()
    with pytest.raises(EngineDeadError, match="it was closed"):
        first.generate([1], params)
    with LLM(config=fake_config()) as third:
        assert len(third.generate([[1], [2]], params)) == 2


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_depth_changes_no_token(depth: int) -> None:
    prompts = [[i + 1] * (1 + i * 5) for i in range(20)]
    params = [SamplingParams(max_tokens=1 + 3 * i, stop_token_ids=[i * 7]) for i in range(20)]
    found = []
    for overlap_depth in (1, depth):
        config = fake_config(overlap_depth=overlap_depth, num_gpu_blocks_override=40, max_num_batched_tokens=32)
        with LLM(config=config) as llm:
            found.append(tokens(llm.generate(prompts, params)))
            assert is_idle(llm)
    assert found[0] == found[1]


def test_a_bar_is_shown_when_asked_for(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([[1], [2]], SamplingParams(max_tokens=3))
    assert capsys.readouterr().err == ""
    llm.generate([[1], [2]], SamplingParams(max_tokens=3), use_tqdm=True)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "tokens/s" in shown


def test_no_process_and_no_python_thread_is_left() -> None:
    code = """
import os, threading
from octavo import LLM, SamplingParams
with LLM("fake", runner="fake", max_model_len=64) as llm:
    llm.generate([[1], [2]], SamplingParams(max_tokens=3))
print(threading.active_count())
print(open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read().split())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["1", "[]"]
