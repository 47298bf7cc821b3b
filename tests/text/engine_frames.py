"""Engine frames built by hand with `struct`: what the engine sends, for tests that have no engine.

A second description of the wire format, next to rust/core/src/frames.rs; test_output_processor holds them together.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

VERSION = 5
FINISH = {"stop": 1, "length": 2, "abort": 3, "error": 4}
REFUSAL = {"invalid": 1, "queue_full": 2, "deadline": 3, "draining": 4}
STATS = {
    "num_steps": "Q",
    "num_running": "I",
    "num_waiting": "I",
    "num_blocks": "I",
    "num_free_blocks": "I",
    "num_preemptions": "Q",
    "num_prompt_tokens": "Q",
    "num_output_tokens": "Q",
    "prefix_queried_tokens": "Q",
    "prefix_hit_tokens": "Q",
    "num_finished": "Q",
    "num_aborted": "Q",
    "num_refused": "Q",
    "num_drafts": "Q",
    "num_draft_tokens": "Q",
    "num_accepted_tokens": "Q",
}

TokenLogprobs = tuple[int, list[tuple[int, float]]]
"""(rank, [(token id, log probability)])"""


@dataclass
class Output:
    """What one sequence gained."""

    request_id: int
    token_ids: Sequence[int] = ()
    index: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    queue_s: float | None = None
    error: str | None = None

    def encode(self) -> bytes:
        parts = [
            struct.pack("<QI", self.request_id, self.index),
            _u32_list(self.token_ids),
            _logprobs(self.logprobs),
            _option("<B", None if self.finish is None else FINISH[self.finish]),
            _option("<I", self.stop_token_id),
            _option("<I", self.num_cached_tokens),
            b"\0" if self.prompt_logprobs is None else b"\1" + _logprobs(self.prompt_logprobs),
            _option("<f", self.queue_s),
            _text(self.error),
        ]
        return b"".join(parts)


def _text(text: str | None) -> bytes:
    return b"\0" if text is None else struct.pack("<BI", 1, len(text.encode())) + text.encode()


def output_frame(
    outputs: Sequence[Output] = (),
    refusals: Sequence[tuple[int, str, str, float]] = (),
    stats: dict[str, int] | None = None,
) -> bytes:
    """The body of an output frame; a refusal is (request id, kind, message, retry_after_s)."""
    body = bytearray([VERSION, 129])
    for name, code in STATS.items():
        body += struct.pack("<" + code, (stats or {}).get(name, 0))
    body += struct.pack("<I", len(outputs))
    for output in outputs:
        body += output.encode()
    body += struct.pack("<I", len(refusals))
    for request_id, kind, message, retry_after_s in refusals:
        text = message.encode()
        body += struct.pack("<QBI", request_id, REFUSAL[kind], len(text)) + text + struct.pack("<f", retry_after_s)
    return bytes(body)


def hello_frame(facts: bytes) -> bytes:
    return bytes([VERSION, 128]) + facts


def reply_frame(call_id: int, body: bytes) -> bytes:
    return bytes([VERSION, 130]) + struct.pack("<Q", call_id) + body


def _option(code: str, value: float | None) -> bytes:
    return b"\0" if value is None else b"\1" + struct.pack(code, value)


def _u32_list(values: Sequence[int]) -> bytes:
    return struct.pack(f"<I{len(values)}I", len(values), *values)


def _logprobs(tokens: list[TokenLogprobs]) -> bytes:
    parts = [struct.pack("<I", len(tokens))]
    for rank, entries in tokens:
        parts.append(struct.pack("<II", rank, len(entries)))
        parts += [struct.pack("<If", token_id, logprob) for token_id, logprob in entries]
    return b"".join(parts)
