"""Steps whose rows begin with the same blocks: what the control plane says of them, and which graph they get."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hand_core import HandCore, HandPlan, HandSequence
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.attention.base import ForwardContext
from octavo.worker.batch import SHARED_BLOCKS
from octavo.worker.runner import TorchRunner
from octavo.worker.step_kinds import StepKind, decode_kind, together_kinds
from octavo.worker.together_graphs import TogetherGraphs

PREFIX_LEN = 200
BLOCK_SIZE = 4
NUM_REQUESTS = 110


class Captures:
    """Captures what was asked for twice."""

    def __init__(self) -> None:
        self.wishes: list[object] = []

    def wants(self, key: object) -> bool:
        self.wishes.append(key)
        return self.wishes.count(key) > 1

    def capture(self, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return forward


class StandIn(TogetherGraphs):
    """Runs each time what a device would replay: here arenas have addresses of their own."""

    def run(self, kind: StepKind, forward: Callable[[], Tensor]) -> Tensor:
        self._graphs[kind] = forward
        return forward()


def plan_of(num_rows: int, max_kv_len: int) -> Any:
    return HandPlan(0, 0, num_rows=num_rows, max_kv_len=max_kv_len)


def test_steps_find_such_a_graph_on_second_sight() -> None:
    graphs = TogetherGraphs(Captures(), [1, 8, 16, 32], max_model_len=10_000)
    assert graphs.choose(plan_of(16, 3000)) is None, "seen for the first time"
    kind = graphs.choose(plan_of(16, 3000))
    assert kind is not None
    assert (kind.num_rows, kind.max_kv_len, kind.reads_together) == (16, 4096, True)
    graphs.run(kind, lambda: torch.zeros(1))
    assert graphs.has(kind)
    assert graphs.choose(plan_of(12, 100)) is kind, "fewer rows and shorter ones fit"
    assert graphs.choose(plan_of(17, 100)) is None, "another kind, for the first time"
    assert graphs.choose(plan_of(33, 100)) is None, "more rows than any kind has"
    assert [(k.num_rows, k.max_kv_len) for k in graphs.missing()] == [(32, 4096), (16, 10_000), (32, 10_000)]


@pytest.mark.parametrize(
    ("sizes", "longest", "expected"),
    [([1, 16], 200, [(16, 200)]), ([16], 4096, [(16, 4096)]), ([8], 9000, []), ([], 9000, [])],
)
def test_kinds_are_of_long_contexts_and_many_rows(
    sizes: list[int], longest: int, expected: list[tuple[int, int]]
) -> None:
    assert [(kind.num_rows, kind.max_kv_len) for kind in together_kinds(sizes, longest)] == expected


def test_such_steps_are_padded_and_told_what_is_shared(
    make_runner: Callable[..., TorchRunner], greedy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of graphs but for capture and replay."""
    runner = make_runner()
    core = HandCore(max_rows=8, max_tokens=64, block_size=BLOCK_SIZE)
    runner.attach(core)  # type: ignore[arg-type]
    graphs = StandIn(Captures(), [], 256)
    graphs._kinds = [decode_kind(4, 256, reads_together=True)]
    monkeypatch.setattr(runner._graphs, "together", graphs)
    monkeypatch.setattr(runner._model, "reads_together", True)
    told: list[tuple[int, list[int]]] = []
    forward = runner._model.forward

    def spy(token_id_t: Tensor, position_t: Tensor, ctx: ForwardContext) -> Tensor:
        told.append((ctx.num_rows, [] if ctx.shared_2 is None else ctx.shared_2.tolist()))
        return forward(token_id_t, position_t, ctx)

    monkeypatch.setattr(runner._model, "forward", spy)
    rows = [HandSequence(slot, [5 + slot, 7, 9], list(range(1 + 9 * slot, 10 + 9 * slot))) for slot in range(3)]
    for step in range(4):
        plan: Any = core.plan([(row, 1 if step else 3) for row in rows])
        array, header = core.arenas[plan.arena], core.arena_layout.header + SHARED_BLOCKS
        array[header : header + 2] = (1, 2) if step else 0
        runner.launch(plan)
        runner.sample(plan)
        core.commit(rows, runner.result(plan))
    assert told == [(3, []), (3, [1, 2]), (4, [1, 2]), (4, [1, 2])], "in a graph from the second time on"
    for row in rows:
        assert row.output == greedy(row.prompt, 4)


def test_the_plan_tells_which_blocks_are_shared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header names a slot and a number of blocks; so many rows have the last of them in the same place."""
    seen: list[tuple[int, int, int]] = []
    launch = TorchRunner.launch

    def spy(runner: TorchRunner, plan: Any) -> None:
        launch(runner, plan)
        header = runner._arenas.host_arrays[plan.arena][runner._arenas.layout.header :]
        slot, count = header[SHARED_BLOCKS : SHARED_BLOCKS + 2].tolist()
        assert runner._arenas.share_blocks(plan) == (count > 0)
        if count:
            table = runner._slots.block_table_gsb[0, :, count - 1].numpy()
            rows = runner._arenas.host_slots(plan)
            seen.append((plan.num_rows, count, int(np.sum(table[rows] == table[slot]))))
        else:
            assert slot == 0

    monkeypatch.setattr(TorchRunner, "launch", spy)
    draw = random.Random(0)
    prefix = [draw.randrange(3, 131) for _ in range(PREFIX_LEN)]
    own = [[draw.randrange(3, 131) for _ in range(3)] for _ in range(NUM_REQUESTS)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    options: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "attention_backend": "reference", "runner": "torch",
        "block_size": BLOCK_SIZE, "num_gpu_blocks_override": 600, "max_num_seqs": NUM_REQUESTS,
        "max_num_batched_tokens": 512, "cpu_threads": 1, "use_tqdm": False,
    }  # fmt: skip
    with LLM(str(folder), **options) as llm:
        llm.generate([prefix], params)
        assert not seen, "one row shares with nobody"
        llm.generate([prefix + ids for ids in own], params)
    blocks = PREFIX_LEN // BLOCK_SIZE
    assert (NUM_REQUESTS, blocks, NUM_REQUESTS) in seen
    assert all(count == blocks and sharing == rows for rows, count, sharing in seen)
