"""A control plane written by hand for runner tests: sequences with fixed blocks, plans spelled out row by row.

It offers what a runner uses of `octavo._core.Core`; it schedules nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass
class HandLayout:
    """As `octavo._core.ArenaLayout`."""

    max_rows: int
    max_tokens: int
    num_ints: int = 0

    def __post_init__(self) -> None:
        sizes = {
            "header": 16,
            "row_slot": self.max_rows,
            "query_start": self.max_rows + 1,
            "kv_len": self.max_rows,
            "block_copy": 2 * self.max_rows,
            "block_update": 3 * 256,
            "token_id": self.max_tokens,
            "position": self.max_tokens,
        }
        for name, size in sizes.items():
            setattr(self, name, self.num_ints)
            self.num_ints += size


@dataclass
class HandOutputLayout:
    """As `octavo._core.OutputLayout`."""

    max_rows: int
    max_logprobs: int
    max_sampled: int = 1
    num_ints: int = 0

    def __post_init__(self) -> None:
        entries = self.max_rows * (1 + self.max_logprobs)
        sizes = {"sampled": self.max_rows, "count": self.max_rows, "rank": self.max_rows}
        for name, size in {**sizes, "logprob_id": entries, "logprob_value": entries}.items():
            setattr(self, name, self.num_ints)
            self.num_ints += size


@dataclass
class HandNewRow:
    slot: int
    params: bytes
    index: int
    token_ids: bytes
    num_prompt_tokens: int


@dataclass
class HandPromptRow:
    row: int
    slot: int
    token_start: int
    num_tokens: int
    num_top: int
    target_ids: bytes


@dataclass
class HandPlan:
    step_id: int
    arena: int
    num_rows: int = 0
    num_decode_rows: int = 0
    num_sampled: int = 0
    num_tokens: int = 0
    max_query_len: int = 0
    max_kv_len: int = 0
    num_block_updates: int = 0
    num_block_copies: int = 0
    num_new_rows: int = 0
    needs_logprobs: bool = False
    new_rows: list[HandNewRow] = field(default_factory=list)
    prompt_logprob_rows: list[HandPromptRow] = field(default_factory=list)
    has_calls: bool = False
    needs_masks: bool = False


@dataclass
class HandSequence:
    """A sequence in its slot. `tokens` are those the host knows; `num_in_flight` were sampled and are not known yet."""

    slot: int
    prompt: list[int]
    blocks: list[int]
    params: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    index: int = 0
    output: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_in_flight: int = 0
    admitted: bool = False
    num_blocks_told: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output) + self.num_in_flight


class HandCore:
    """Plans and commits by order of the test."""

    def __init__(self, *, max_rows: int, max_tokens: int, block_size: int, max_logprobs: int = 5) -> None:
        self.arena_layout = HandLayout(max_rows, max_tokens)
        self.output_layout = HandOutputLayout(max_rows, max_logprobs)
        self.block_size = block_size
        self.prompt_logprobs: dict[int, list[tuple[Any, Any, Any]]] = {}
        self._next_step = 0

    mask_words = 1

    def register_masks(self, masks: Any) -> None:
        """Nobody fills them: no plan needs masks."""

    def register(self, arenas: Sequence[Any], outputs: Sequence[Any]) -> None:
        self.arenas = [np.asarray(arena) for arena in arenas]
        self.outputs = [np.asarray(output) for output in outputs]
        assert all(arena.dtype == np.int32 and arena.size == self.arena_layout.num_ints for arena in self.arenas)

    def put_prompt_logprobs(self, slot: int, ids: Any, values: Any, ranks: Any) -> None:
        part = (np.array(ids), np.array(values), np.array(ranks))
        self.prompt_logprobs.setdefault(slot, []).append(part)

    def plan(
        self, rows: Sequence[tuple[HandSequence, int]], *, copies: Sequence[tuple[int, int]] = (), prompt_top: int = -1
    ) -> HandPlan:
        """A step of (sequence, number of its next tokens). Decode rows must come first, unsampled rows last."""
        layout: Any = self.arena_layout
        plan = HandPlan(step_id=self._next_step, arena=self._next_step % len(self.arenas))
        self._next_step += 1
        array = self.arenas[plan.arena]
        array[:] = -(2**30)  # whatever was there before must not matter
        array[layout.query_start] = 0
        for sequence, count in rows:
            self._put_row(plan, array, sequence, count)
        flat = [number for copy in copies for number in copy]
        array[layout.block_copy : layout.block_copy + len(flat)] = flat
        plan.num_block_copies = len(copies)
        plan.needs_logprobs = any("logprobs" in sequence.params for sequence, _ in rows)
        if prompt_top >= 0:
            plan.prompt_logprob_rows = self._prompt_rows(rows, prompt_top)
        array[layout.header + 2 : layout.header + 4] = plan.num_decode_rows, plan.num_sampled
        array[layout.header + 11 : layout.header + 13] = 0
        return plan

    def _put_row(self, plan: HandPlan, array: npt.NDArray[np.int32], sequence: HandSequence, count: int) -> None:
        layout: Any = self.arena_layout
        row, start = plan.num_rows, plan.num_tokens
        known = sequence.prompt + sequence.output
        end = sequence.num_computed + count
        tokens = [known[p] if p < len(known) else -1 for p in range(sequence.num_computed, end)]
        array[layout.token_id + start : layout.token_id + start + count] = tokens
        array[layout.position + start : layout.position + start + count] = range(sequence.num_computed, end)
        array[layout.row_slot + row] = sequence.slot
        array[layout.kv_len + row] = end
        array[layout.query_start + row + 1] = start + count
        self._tell_blocks(plan, array, sequence, end)
        if not sequence.admitted:
            token_ids = np.array(known, dtype="<i4").tobytes()
            params = json.dumps(sequence.params).encode()
            plan.new_rows.append(HandNewRow(sequence.slot, params, sequence.index, token_ids, len(sequence.prompt)))
            plan.num_new_rows += 1
            sequence.admitted = True
        sampled = end == sequence.num_tokens
        plan.num_decode_rows += count == 1 and sampled and plan.num_decode_rows == row
        plan.num_sampled += sampled
        sequence.num_computed = end
        sequence.num_in_flight += sampled
        plan.num_rows, plan.num_tokens = row + 1, start + count
        plan.max_query_len = max(plan.max_query_len, count)
        plan.max_kv_len = max(plan.max_kv_len, end)

    def _tell_blocks(self, plan: HandPlan, array: npt.NDArray[np.int32], sequence: HandSequence, end: int) -> None:
        layout: Any = self.arena_layout
        while sequence.num_blocks_told * self.block_size < end:
            at = layout.block_update + 3 * plan.num_block_updates
            number = sequence.num_blocks_told
            array[at : at + 3] = (sequence.slot, number, sequence.blocks[number])
            plan.num_block_updates += 1
            sequence.num_blocks_told += 1

    def _prompt_rows(self, rows: Sequence[tuple[HandSequence, int]], top: int) -> list[HandPromptRow]:
        """Every row's tokens whose successors are in the prompt; call after `_put_row` moved `num_computed`."""
        found, start = [], 0
        for row, (sequence, count) in enumerate(rows):
            first = sequence.num_computed - count
            targets = np.array(sequence.prompt[first + 1 : sequence.num_computed + 1], dtype="<i4").tobytes()
            found.append(HandPromptRow(row, sequence.slot, start, count, top, targets))
            start += count
        return found

    def commit(self, rows: Sequence[HandSequence], output: int) -> list[int]:
        """Read the tokens of the sampled rows (in the plan's order) from an output arena and append them."""
        layout: Any = self.output_layout
        array = self.outputs[output]
        assert (array[layout.count : layout.count + len(rows)] == 1).all()
        tokens = [int(token) for token in array[layout.sampled : layout.sampled + len(rows)]]
        for sequence, token in zip(rows, tokens, strict=True):
            sequence.output.append(token)
            sequence.num_in_flight -= 1
        return tokens

    def logprobs(self, output: int, row: int) -> tuple[int, list[int], list[float]]:
        """(rank, ids, values) of a row in an output arena, the token itself first."""
        layout: Any = self.output_layout
        array, entries = self.outputs[output], 1 + self.output_layout.max_logprobs
        ids = array[layout.logprob_id + row * entries :][:entries]
        values = array[layout.logprob_value + row * entries :][:entries].view(np.float32)
        return int(array[layout.rank + row]), ids.tolist(), values.tolist()
