"""Runs a real `Core` over a device made of Python lists: every position's KV is a hash of all tokens up to it.

A token is a hash of the KV before it and the sequence's own number, so outputs are known without any engine
(`expected_tokens`), and KV from a wrong block changes them.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field

from plain_scheduler import Limits, Request

from octavo import _core

VOCAB = 50
Name = tuple[int, int]
RowView = tuple[Name, int, int]
"""Sequence, first position, number of tokens."""


def _mix(state: int, value: int) -> int:
    mixed = ((state ^ value) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    return mixed ^ (mixed >> 29)


def next_kv(before: int, token: int, position: int) -> int:
    return _mix(_mix(before, token + 1), position << 20)


def next_token(kv: int, name: Name) -> int:
    return _mix(_mix(kv, name[0] + 1), name[1] + 1) % VOCAB


def expected_tokens(request: Request, index: int, max_output: int) -> list[int]:
    kv, output = 0, list[int]()
    for position, token in enumerate(request.prompt):
        kv = next_kv(kv, token, position)
    while True:
        token = next_token(kv, (request.request_id, index))
        output.append(token)
        if len(output) == max_output or (token in request.stop and len(output) >= request.min_tokens):
            return output
        kv = next_kv(kv, token, len(request.prompt) + len(output) - 1)


def make_core(limits: Limits, **changes: object) -> _core.Core:
    options = {
        "block_size": limits.block_size,
        "num_blocks": limits.num_blocks,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_model_len": limits.max_model_len,
        "vocab_size": VOCAB,
        "max_queued_requests": 1 << 40,
        "max_queued_tokens": 1 << 40,
        "policy": limits.policy,
        "enable_prefix_caching": limits.enable_prefix_caching,
        "long_prefill_token_threshold": limits.long_prefill_token_threshold,
        "max_itl_ms": 0.0,
        "depth": limits.depth,
        "max_logprobs": 2,
        "hash_seed": 3,
    }
    return _core.Core(_core.CoreConfig(**{**options, **changes}))  # type: ignore[arg-type]


def frame(request: Request) -> bytes:
    return _core.encode_add(
        request_id=request.request_id,
        prompt_token_ids=request.prompt,
        n=request.n,
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens,
        stop_token_ids=request.stop,
        priority=request.priority,
        cache_salt=request.salt,
        deadline_s=0.0,
        logprobs=-1,
        prompt_logprobs=-1,
        params=b"%d" % request.request_id,
    )


@dataclass
class Step:
    """What a plan said, and what the device sampled."""

    rows: list[RowView]
    tables: list[list[int]]
    num_decodes: int
    num_copies: int
    sampled: list[int]


@dataclass
class Outcome:
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class Driver:
    """The engine loop, the device and the client in one."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.core = make_core(limits)
        self.layout = self.core.arena_layout
        count = limits.depth + 1
        self.arenas = [array("i", bytes(4 * self.layout.num_ints)) for _ in range(count)]
        self.outputs = [array("i", bytes(4 * self.core.output_layout.num_ints)) for _ in range(count)]
        self.core.register(self.arenas, self.outputs)
        blocks_per_slot = -(-limits.max_model_len // limits.block_size)
        self.table = [[0] * blocks_per_slot for _ in range(limits.max_num_seqs)]
        self.name: list[Name] = [(0, 0)] * limits.max_num_seqs
        self.last_token = [-1] * limits.max_num_seqs
        self.kv = [[-1] * limits.block_size for _ in range(limits.num_blocks)]
        self.in_flight: deque[tuple[Step, int]] = deque()
        self.last_empty = False
        self.client = _core.OutputProcessor(None, [])
        self.outcomes: dict[Name, Outcome] = {}

    def add(self, request: Request) -> None:
        self.client.add(
            request.request_id,
            n=max(request.n, 1),
            prompt_token_ids=request.prompt,
            stop=[],
            include_stop_str_in_output=False,
            skip_special_tokens=True,
            detokenize=False,
        )
        self.core.add(frame(request))

    def abort(self, request_id: int, index: int | None) -> None:
        self.core.add(_core.encode_abort(request_id, index))

    def step(self) -> tuple[Step | None, Step]:
        """The step that was committed and the one that was planned."""
        oldest: tuple[Step, int] | None = None
        if self.in_flight and (self.last_empty or len(self.in_flight) == self.limits.depth):
            oldest = self.in_flight.popleft()
        plan = self.core.step(oldest[1] if oldest else None)
        step = self._run(plan)
        self.last_empty = not step.rows
        if step.rows:
            self.in_flight.append((step, plan.arena))
        self._receive()
        return (oldest[0] if oldest else None), step

    def _run(self, plan: _core.StepPlan) -> Step:
        arena, layout, size = self.arenas[plan.arena], self.layout, self.limits.block_size
        for new in plan.new_rows:
            self.table[new.slot] = [0] * len(self.table[new.slot])
            self.name[new.slot] = (int(new.params), new.index)
        for at in range(layout.block_update, layout.block_update + 3 * plan.num_block_updates, 3):
            self.table[arena[at]][arena[at + 1]] = arena[at + 2]
        for at in range(layout.block_copy, layout.block_copy + 2 * plan.num_block_copies, 2):
            self.kv[arena[at + 1]] = list(self.kv[arena[at]])
        step = Step([], [], plan.num_decode_rows, plan.num_block_copies, [])
        ends: list[tuple[int, int]] = []
        for row in range(plan.num_rows):
            slot, kv_len = arena[layout.row_slot + row], arena[layout.kv_len + row]
            first, end = arena[layout.query_start + row], arena[layout.query_start + row + 1]
            table = self.table[slot]
            start = kv_len - (end - first)
            kv = self.kv[table[(start - 1) // size]][(start - 1) % size] if start else 0
            for position, token in enumerate(arena[layout.token_id + first : layout.token_id + end], start):
                kv = next_kv(kv, self.last_token[slot] if token == -1 else token, position)
                self.kv[table[position // size]][position % size] = kv
            ends.append((slot, kv))
            step.rows.append((self.name[slot], start, end - first))
            step.tables.append(table[: -(-kv_len // size)])
        output = self.outputs[plan.arena]
        for row, (slot, kv) in enumerate(ends[: plan.num_sampled]):
            token = self.last_token[slot] = next_token(kv, self.name[slot])
            output[self.core.output_layout.sampled + row] = token
            output[self.core.output_layout.count + row] = 1
            step.sampled.append(token)
        return step

    def _receive(self) -> None:
        for body in self.core.take_frames():
            for delta in self.client.process(body).deltas:
                outcome = self.outcomes.setdefault((delta.request_id, delta.index), Outcome())
                outcome.tokens += delta.token_ids
                outcome.finish_reason = delta.finish_reason

    def run(self, max_steps: int) -> None:
        for _ in range(max_steps):
            if not self.core.has_work():
                return
            self.step()
        raise AssertionError(f"no end after {max_steps} steps\n{self.core.dump()}")
