"""Frames between processes: damaged ones are a ValueError, and what was there before goes on."""

from __future__ import annotations

import base64
import contextlib
from typing import Any

from core_driver import make_core
from engine_frames import Output, output_frame
from hypothesis import strategies as st
from plain_scheduler import SMALL

from octavo import _core
from tests.fuzz.target import Case, Target

ADD: dict[str, Any] = {
    "n": 2,
    "max_tokens": 5,
    "min_tokens": 1,
    "stop_token_ids": [3],
    "priority": -1,
    "cache_salt": b"salt",
    "deadline_s": 1.5,
    "logprobs": 2,
    "prompt_logprobs": -1,
    "params": b"{}",
}


def _samples() -> dict[str, bytes]:
    """A frame of every kind."""
    add = {"request_id": 7, "prompt_token_ids": [1, 2, 3], **ADD}
    rows = [(1, [(5, -0.5), (6, -1.5)])]
    full = Output(7, [5], logprobs=rows, finish="stop", stop_token_id=5, num_cached_tokens=1, queue_s=0.5, error="é")
    return {
        "add": _core.encode_add(**add),
        "constrained": _core.encode_add(**add, grammar=b'{"regex":"a+"}', tenant=9, weight=2000),
        "abort": _core.encode_abort(7),
        "abort one": _core.encode_abort(7, 1),
        "call": _core.encode_call(3, b'{"name":"stats"}'),
        "output": output_frame([full, Output(7, [6, 7], index=1)], [(9, "queue_full", "full", 1.0)]),
    }


SAMPLES = _samples()
INBOUND = ("add", "constrained", "abort", "abort one", "call")


def check(case: Case) -> None:
    """Case: a frame's kind, [place, byte] of bytes that change, where it is cut (or -1), bytes behind it (base64)."""
    body = bytearray(SAMPLES[case["kind"]])
    for place, byte in case["bytes"]:
        body[place % len(body)] = byte
    if case["cut"] >= 0:
        del body[case["cut"] % (len(body) + 1) :]
    body += base64.b64decode(case["tail"])
    if case["kind"] in INBOUND:
        _feed_engine(bytes(body))
    else:
        _feed_client(bytes(body))


def _feed_engine(body: bytes) -> None:
    core = make_core(SMALL)
    core.register(*([bytearray_of(size) for _ in range(2)] for size in _sizes(core)))
    try:
        core.add(body)
    except ValueError:
        pass
    else:
        client = _core.OutputProcessor(None, [])
        for frame in core.take_frames():
            client.process(frame)
    core.step(None)
    core.check()


def _sizes(core: _core.Core) -> tuple[int, int]:
    return core.arena_layout.num_ints, core.output_layout.num_ints


def bytearray_of(num_ints: int) -> memoryview:
    return memoryview(bytearray(4 * num_ints)).cast("i")


def _feed_client(body: bytes) -> None:
    client = _core.OutputProcessor(None, [])
    for request_id in (7, 8):
        client.add(
            request_id,
            n=2,
            prompt_token_ids=[1],
            stop=[],
            include_stop_str_in_output=False,
            skip_special_tokens=True,
            detokenize=False,
        )
    with contextlib.suppress(ValueError):
        client.process(body)
    assert [delta.token_ids for delta in client.process(output_frame([Output(8, [4])])).deltas] in ([[4]], [])


BYTE = st.integers(0, 255)
TARGET = Target(
    "frames",
    check,
    lambda seeds: st.fixed_dictionaries(
        {
            "kind": st.sampled_from(sorted(SAMPLES)),
            "bytes": st.lists(
                st.tuples(st.integers(0, 400), BYTE | st.sampled_from([0, 1, 127, 128, 255])), max_size=6
            ),
            "cut": st.integers(-1, 400) | st.just(-1),
            "tail": st.binary(max_size=20).map(lambda tail: base64.b64encode(tail).decode()),
        }
    ),
)
