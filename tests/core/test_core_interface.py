"""`_core.Core` as Python sees it: buffers, plans, calls, waiting, and what is refused."""

from __future__ import annotations

import itertools
import threading
from array import array

import numpy as np
import pytest
from core_driver import Driver, frame, make_core
from plain_scheduler import SMALL, Limits, Request

from octavo import _core


def ints(count: int) -> array[int]:
    return array("i", bytes(4 * count))


def read_only(count: int) -> memoryview:
    return memoryview(bytes(4 * count)).cast("i")


def strided(count: int) -> memoryview:
    return memoryview(np.zeros(2 * count, np.int32)[::2])


BAD_BUFFERS = {
    "too short": (lambda count: ints(count - 1), "ints"),
    "too long": (lambda count: ints(count + 1), "ints"),
    "empty": (lambda count: ints(0), "int32|0 ints"),
    "bytes": (lambda count: bytearray(4 * count), "int32"),
    "floats": (lambda count: array("f", bytes(4 * count)), "int32"),
    "int64": (lambda count: np.zeros(count, np.int64), "int32"),
    "read-only": (read_only, "read-only"),
    "strided": (strided, "contiguous"),
    "no buffer": (lambda count: [0] * count, "int32"),
    "unaligned": (lambda count: np.zeros(4 * count + 1, np.uint8)[1:].view(np.int32), "int32"),
}


@pytest.mark.parametrize("name", BAD_BUFFERS)
def test_bad_buffers_are_refused(name: str) -> None:
    make, part = BAD_BUFFERS[name]
    core = make_core(SMALL)
    num_arena, num_output = core.arena_layout.num_ints, core.output_layout.num_ints
    arenas, outputs = [ints(num_arena) for _ in range(2)], [ints(num_output) for _ in range(2)]
    with pytest.raises(ValueError, match=part):
        core.register([arenas[0], make(num_arena)], outputs)
    with pytest.raises(ValueError, match=part):
        core.register(arenas, [outputs[0], make(num_output)])
    with pytest.raises(ValueError, match="no arenas"):
        core.step(None)


def test_buffers_must_be_enough_and_apart() -> None:
    core = make_core(SMALL)
    num_arena, num_output = core.arena_layout.num_ints, core.output_layout.num_ints
    arena = ints(num_arena)
    outputs = [ints(num_output), ints(num_output)]
    with pytest.raises(ValueError, match=r"depth \+ 1"):
        core.register([arena], outputs)
    with pytest.raises(ValueError, match=r"depth \+ 1"):
        core.register([arena, ints(num_arena)], outputs[:1])
    with pytest.raises(ValueError, match="share memory"):
        core.register([arena, arena], outputs)
    whole = np.zeros(2 * num_arena, np.int32)
    with pytest.raises(ValueError, match="share memory"):
        core.register([whole[:num_arena], whole[1 : num_arena + 1]], outputs)
    core.register([whole[:num_arena], whole[num_arena:]], outputs)
    assert core.step(None).num_rows == 0


def test_buffers_are_kept_alive_and_in_place() -> None:
    core = make_core(SMALL)
    arenas = [ints(core.arena_layout.num_ints) for _ in range(2)]
    core.register(arenas, [ints(core.output_layout.num_ints) for _ in range(2)])
    with pytest.raises(BufferError):
        arenas[0].append(1)
    del arenas
    core.add(frame(Request(1, (1, 2, 3))))
    assert core.step(None).num_tokens == 3


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"block_size": 0}, "block_size"),
        ({"num_blocks": 1}, "num_blocks"),
        ({"depth": 0}, "depth"),
        ({"policy": "lifo"}, "policy"),
        ({"max_itl_ms": -1.0}, "max_itl_ms"),
        ({"max_itl_ms": float("nan")}, "max_itl_ms"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
    ],
)
def test_bad_configs_are_refused(change: dict[str, object], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        make_core(SMALL, **change)
    with pytest.raises((OverflowError, TypeError)):
        make_core(SMALL, block_size=-1)


def test_layouts_do_not_overlap() -> None:
    core = make_core(SMALL)
    a, o = core.arena_layout, core.output_layout
    regions = [
        (a.header, 16),
        (a.row_slot, a.max_rows),
        (a.query_start, a.max_rows + 1),
        (a.kv_len, a.max_rows),
        (a.new_row, 2 * a.max_new_rows),
        (a.block_copy, 2 * a.max_block_copies),
        (a.block_update, 3 * a.max_block_updates),
        (a.token_id, a.max_tokens),
        (a.position, a.max_tokens),
        (a.num_ints, 0),
    ]
    assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(regions))
    rows, entries = o.max_rows * o.max_sampled, 1 + o.max_logprobs
    outputs = [(o.sampled, rows), (o.count, o.max_rows), (o.rank, rows), (o.logprob_id, rows * entries)]
    outputs += [(o.logprob_value, rows * entries), (o.num_ints, 0)]
    assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(outputs))


def test_a_plan_names_new_rows_and_prompt_logprobs() -> None:
    core = make_core(SMALL)
    core.register(
        [ints(core.arena_layout.num_ints) for _ in range(2)], [ints(core.output_layout.num_ints) for _ in range(2)]
    )
    prompt = tuple(range(40))
    core.add(
        _core.encode_add(
            request_id=9,
            prompt_token_ids=prompt,
            n=1,
            max_tokens=3,
            min_tokens=0,
            stop_token_ids=[],
            priority=0,
            cache_salt=b"",
            deadline_s=0.0,
            logprobs=1,
            prompt_logprobs=1,
            params=b'{"seed":4}',
        )
    )
    plan = core.step(None)
    (new,) = plan.new_rows
    assert (new.params, new.index, new.num_prompt_tokens) == (b'{"seed":4}', 0, 40)
    assert np.frombuffer(new.token_ids, "<i4").tolist() == list(prompt)
    assert (plan.num_sampled, plan.needs_logprobs) == (0, False)
    (wanted,) = plan.prompt_logprob_rows
    assert (wanted.row, wanted.slot, wanted.token_start, wanted.num_tokens, wanted.num_top) == (0, new.slot, 0, 32, 1)
    assert np.frombuffer(wanted.target_ids, "<i4").tolist() == list(prompt[1:33])
    zeros = np.zeros((32, 2), np.int32)
    core.put_prompt_logprobs(new.slot, zeros, zeros.astype(np.float32), zeros[:, 0].copy())
    with pytest.raises(ValueError, match="ids"):
        core.put_prompt_logprobs(new.slot, zeros.astype(np.int64), zeros.astype(np.float32), zeros[:, 0].copy())
    with pytest.raises(ValueError, match="not in use"):
        core.put_prompt_logprobs(3, zeros, zeros.astype(np.float32), zeros[:, 0].copy())
    plan = core.step(0)
    (wanted,) = plan.prompt_logprob_rows
    assert (wanted.num_tokens, plan.num_sampled, plan.needs_logprobs, plan.new_rows) == (7, 1, True, [])


def test_the_loop_is_told_what_it_does_wrong() -> None:
    core = make_core(SMALL)
    core.register(
        [ints(core.arena_layout.num_ints) for _ in range(2)], [ints(core.output_layout.num_ints) for _ in range(2)]
    )
    with pytest.raises(RuntimeError, match="no step is in flight"):
        core.step(0)
    core.add(frame(Request(1, (1, 2, 3))))
    core.step(None)
    with pytest.raises(ValueError, match="no output arena 7"):
        core.step(7)
    with pytest.raises(RuntimeError, match="steps are in flight"):
        core.step(None)
    with pytest.raises(RuntimeError, match="0 tokens sampled"):
        core.step(0)
    assert "last plan" in core.dump()
    with pytest.raises(ValueError, match="frame"):
        core.add(b"\xff\xff nonsense")


def test_wait_wakes_when_a_frame_comes() -> None:
    core = make_core(SMALL)
    assert not core.wait(0.0)
    assert not core.has_work()
    thread = threading.Thread(target=core.add, args=[frame(Request(1, (1,)))])
    thread.start()
    assert core.wait(30.0)
    thread.join()
    assert core.has_work()
    with pytest.raises(ValueError, match="timeout_s"):
        core.wait(-1.0)


def test_calls_are_answered_between_steps() -> None:
    driver = Driver(SMALL)
    driver.core.add(_core.encode_call(5, b"ping"))
    assert driver.core.has_work()
    plan = driver.core.step(None)
    assert plan.has_calls
    assert plan.num_rows == 0
    ((client, call_id, body),) = driver.core.take_calls()
    assert (call_id, body) == (5, b"ping")
    driver.core.reply(client, call_id, b"pong")
    (reply,) = driver.core.take_frames()
    answer = _core.OutputProcessor(None, []).process(reply)
    assert (answer.kind, answer.call_id, answer.body) == ("reply", 5, b"pong")
    assert not driver.core.has_work()


def test_draining_refuses_newcomers_only() -> None:
    driver = Driver(SMALL)
    driver.add(Request(1, (1, 2), max_tokens=5))
    driver.step()
    driver.core.drain()
    driver.core.add(frame(Request(2, (1, 2), max_tokens=5)))
    driver.run(100)
    assert len(driver.outcomes[(1, 0)].tokens) == 5
    assert driver.core.stats()["num_refused"] == 1


def test_a_long_step_lets_other_threads_run() -> None:
    """From 64 sequences on a step runs without the GIL; other threads may add frames meanwhile."""
    limits = Limits(16, 1200, 256, 1024, 128, "fcfs", True, 0, 2)
    driver = Driver(limits)
    for request_id in range(200):
        driver.add(Request(request_id, tuple(range(20)), max_tokens=40))
    added = threading.Thread(target=lambda: [driver.core.add(_core.encode_call(i, b"")) for i in range(500)])
    added.start()
    driver.run(1000)
    added.join()
    driver.core.step(None)
    assert len(driver.core.take_calls()) == 500
    assert all(len(outcome.tokens) == 40 for outcome in driver.outcomes.values())
