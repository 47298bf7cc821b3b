"""TorchRunner against Transformers on a tiny model, driven by plans written by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hand_core import HandCore, HandPlan, HandSequence

from octavo.worker.graphs import DecodeGraphs
from octavo.worker.mixed_graphs import MixedGraphs
from octavo.worker.runner import TorchRunner

Make = Callable[..., TorchRunner]
Greedy = Callable[[list[int], int], list[int]]


def attach(runner: TorchRunner, block_size: int = 4) -> HandCore:
    core = HandCore(max_rows=8, max_tokens=64, block_size=block_size)
    runner.attach(core)  # type: ignore[arg-type]
    return core


def start(runner: TorchRunner, plan: HandPlan) -> HandPlan:
    runner.launch(plan)  # type: ignore[arg-type]
    runner.sample(plan)  # type: ignore[arg-type]
    return plan


def run(runner: TorchRunner, core: HandCore, rows: list[tuple[HandSequence, int]], **options: Any) -> list[int]:
    """One step from plan to commit."""
    plan = start(runner, core.plan(rows, **options))
    return core.commit([sequence for sequence, _ in rows[: plan.num_sampled]], runner.result(plan))  # type: ignore[arg-type]


def prompt_of(length: int, seed: int) -> list[int]:
    return [random.Random(seed).randrange(3, 131) for _ in range(length)]


def test_greedy_tokens_equal_transformers_with_chunks_and_mixed_rows(make_runner: Make, greedy: Greedy) -> None:
    runner = make_runner()
    core = attach(runner)
    a = HandSequence(slot=3, prompt=prompt_of(13, 1), blocks=list(range(10, 30)))
    b = HandSequence(slot=0, prompt=prompt_of(21, 2), blocks=list(range(40, 60))[::-1])
    c = HandSequence(slot=7, prompt=prompt_of(1, 3), blocks=list(range(60, 80)))
    run(runner, core, [(a, 13)])
    assert run(runner, core, [(a, 1), (b, 9)]) == a.output[-1:]
    assert len(run(runner, core, [(a, 1), (b, 11)])) == 1
    run(runner, core, [(a, 1), (b, 1), (c, 1)])
    for _ in range(6):
        run(runner, core, [(c, 1), (a, 1), (b, 1)])
    for sequence in (a, b, c):
        assert sequence.output == greedy(sequence.prompt, len(sequence.output))
    assert [len(sequence.output) for sequence in (a, b, c)] == [10, 7, 7]


def test_steps_in_flight_take_their_tokens_from_the_device(make_runner: Make, greedy: Greedy) -> None:
    runner = make_runner(overlap_depth=2)
    core = attach(runner)
    a = HandSequence(slot=1, prompt=prompt_of(6, 4), blocks=list(range(1, 20)))
    b = HandSequence(slot=2, prompt=prompt_of(9, 5), blocks=list(range(20, 40)))
    flying = start(runner, core.plan([(a, 6), (b, 9)]))
    for _ in range(8):
        after = start(runner, core.plan([(a, 1), (b, 1)]))
        core.commit([a, b], runner.result(flying))  # type: ignore[arg-type]
        flying = after
    core.commit([a, b], runner.result(flying))  # type: ignore[arg-type]
    assert a.output == greedy(a.prompt, 9)
    assert b.output == greedy(b.prompt, 9)


def test_a_slot_is_used_again_and_blocks_are_copied(make_runner: Make, greedy: Greedy) -> None:
    runner = make_runner()
    core = attach(runner)
    first = HandSequence(slot=5, prompt=prompt_of(8, 6), blocks=[3, 4, 5, 6, 7])
    run(runner, core, [(first, 8)])
    run(runner, core, [(first, 1)])
    # The second shares the whole prompt: block 3 by copy, block 4 as it is; its last prompt token runs again.
    second = HandSequence(slot=5, prompt=first.prompt, blocks=[9, 10, 11, 12], num_computed=7)
    run(runner, core, [(second, 1)], copies=[(3, 9), (4, 10)])
    run(runner, core, [(second, 1)])
    assert second.output == greedy(first.prompt, 2)


class PaddedOnly(DecodeGraphs):
    """Sizes without graphs: what a CUDA device would replay is run, padding and all."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__([], max_model_len=256)
        self._sizes = sizes
        self.ran: list[int] = []

    def has(self, size: int, bound: int) -> bool:
        return size in self.ran

    def run(self, size: int, bound: int, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.ran.append(size)
        return forward()


def test_padded_decode_steps_are_the_same(make_runner: Make, greedy: Greedy, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, the way of graphs but for capture and replay, the trial of the largest steps included."""
    runner = make_runner()
    core = attach(runner)
    graphs = PaddedOnly([1, 2, 4, 8])
    monkeypatch.setattr(runner._graphs, "decode", graphs)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with torch.inference_mode():
        runner._warm_up().largest(build=None)
    sequences = [HandSequence(6 - i, prompt_of(4 + i, 30 + i), list(range(1 + 9 * i, 10 + 9 * i))) for i in range(5)]
    run(runner, core, [(sequence, len(sequence.prompt)) for sequence in sequences])
    for count in (5, 3, 2, 1, 4):
        run(runner, core, [(sequence, 1) for sequence in sequences[-count:]])
    assert graphs.ran == [8, 8, 4, 2, 1, 4], "the trial, then the steps"
    for sequence in sequences:
        assert sequence.output == greedy(sequence.prompt, len(sequence.output))


def test_logprobs_are_those_of_the_model(make_runner: Make, reference: Any) -> None:
    runner = make_runner()
    core = attach(runner)
    params = {"temperature": 0.0, "logprobs": 3, "logit_bias": {"17": 90.0}}
    a = HandSequence(slot=0, prompt=prompt_of(7, 8), blocks=[1, 2, 3], params=params)
    plain = HandSequence(slot=1, prompt=prompt_of(5, 9), blocks=[4, 5, 6])
    plan = start(runner, core.plan([(plain, 5), (a, 7)]))
    output = runner.result(plan)  # type: ignore[arg-type]
    core.commit([plain, a], output)
    with torch.no_grad():
        expected = reference(torch.tensor([a.prompt])).logits[0, -1].log_softmax(-1)
    rank, ids, values = core.logprobs(output, row=1)
    assert a.output == [17]
    assert ids[:4] == [17, *expected.topk(3).indices.tolist()]
    assert rank == 1 + int((expected > expected[17]).sum())
    assert values[:4] == pytest.approx(expected[ids[:4]].tolist(), abs=1e-4)


def test_graphs_are_chosen_by_rows_and_context() -> None:
    graphs = PaddedOnly([8, 16])
    assert [graphs.size_for(rows) for rows in (1, 8, 9, 16, 17)] == [8, 8, 16, 16, None]
    long = DecodeGraphs([], max_model_len=10_000)
    assert [long.bound_for(length) for length in (1, 256, 257, 4096, 4097)] == [256, 256, 4096, 4096, 10_000]
    assert [graphs.bound_for(length) for length in (1, 256)] == [256, 256]
    assert long.size_for(1) is None


def test_missing_graphs_are_named_once_short_contexts_and_few_rows_first() -> None:
    graphs = PaddedOnly([1, 4, 8])
    named = []
    for size, bound in graphs.missing():
        named.append((size, bound))
        graphs.run(8, bound, lambda: torch.empty(0))  # another step captures the largest meanwhile
    assert named == [(1, 256), (4, 256)]


def test_a_larger_graph_serves_until_the_right_one_is_wanted_again() -> None:
    graphs = DecodeGraphs([], max_model_len=10_000)
    graphs._sizes = [1, 4, 8]
    assert graphs.choose(9, 100) is None
    assert graphs.choose(3, 100) == (4, 256), "there is no other"
    for captured in ((8, 4096), (8, 10_000)):
        graphs._graphs[captured] = (None, torch.empty(0))  # type: ignore[assignment]
    assert graphs.choose(1, 300) == (8, 4096)
    assert graphs.choose(1, 300) == (1, 4096)
    assert graphs.choose(1, 5000) == (8, 10_000)
    assert graphs.choose(7, 4096) == (8, 4096)


class Everything:
    """Captures whatever is asked for, by running it."""

    def __init__(self) -> None:
        self.wishes = 0

    def wants(self, key: object) -> bool:
        self.wishes += 1
        return self.wishes > 1

    def capture(self, forward: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        return forward


def plan_of(decodes: int, prompts: int, tokens: int) -> Any:
    return HandPlan(0, 0, num_rows=decodes + prompts, num_decode_rows=decodes, num_tokens=tokens)


def test_steps_with_prompts_find_the_least_graph_on_second_sight() -> None:
    graphs = MixedGraphs(Everything(), [1, 8, 16, 64, 100], max_tokens=512, max_model_len=1000)
    assert graphs.choose(plan_of(3, 1, 100)) is None, "seen for the first time"
    kind = graphs.choose(plan_of(3, 1, 100))
    assert kind is not None
    assert (kind.num_rows, kind.num_decode_rows, kind.num_tokens) == (16, 8, 128)
    graphs.run(kind, lambda: torch.zeros(1))
    assert graphs.choose(plan_of(8, 8, 128)) is kind
    more_rows, more_tokens = graphs.choose(plan_of(9, 1, 128)), graphs.choose(plan_of(8, 8, 129))
    assert more_rows is not None
    assert (more_rows.num_rows, more_rows.num_tokens) == (64, 128)
    assert more_tokens is not None
    assert (more_tokens.num_rows, more_tokens.num_tokens) == (16, 192)
    assert graphs.choose(plan_of(92, 8, 110)) is not None
    for too_large in ((93, 1, 120), (3, 9, 100), (3, 1, 513)):
        assert graphs.choose(plan_of(*too_large)) is None
    assert kind not in list(graphs.missing())


@pytest.mark.parametrize("chunks", [[11], [4, 5, 2], [1] * 11])
def test_prompt_logprobs_do_not_depend_on_chunks(make_runner: Make, reference: Any, chunks: list[int]) -> None:
    runner = make_runner()
    core = attach(runner)
    a = HandSequence(slot=2, prompt=prompt_of(11, 10), blocks=[1, 2, 3, 4])
    for count in chunks:
        run(runner, core, [(a, count)], prompt_top=2)
    parts = core.prompt_logprobs[2]
    ids, values, ranks = (np.concatenate([part[i] for part in parts]) for i in range(3))
    with torch.no_grad():
        expected = reference(torch.tensor([a.prompt])).logits[0, :-1].log_softmax(-1)
    assert ids[:, 0].tolist() == a.prompt[1:]
    assert ids[:, 1:].tolist() == expected.topk(2).indices.tolist()
    own = expected[torch.arange(10), torch.tensor(a.prompt[1:])]
    assert values[:, 0] == pytest.approx(own.numpy(), abs=1e-4)
    assert ranks.tolist() == (1 + (expected > own.unsqueeze(1)).sum(1)).tolist()


def test_small_chunks_of_logits_change_nothing(
    make_runner: Make, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.worker.usage.MAX_CHUNK_LOGITS", 2 * 131)
    runner = make_runner()
    core = attach(runner)
    sequences = [HandSequence(i, prompt_of(3 + i, 20 + i), list(range(1 + 8 * i, 9 + 8 * i))) for i in range(5)]
    run(runner, core, [(sequence, len(sequence.prompt)) for sequence in sequences])
    run(runner, core, [(sequence, 1) for sequence in sequences])
    assert [sequence.output for sequence in sequences] == [greedy(sequence.prompt, 2) for sequence in sequences]


def test_facts_say_what_the_checkpoint_says(make_runner: Make) -> None:
    facts = make_runner().facts
    assert (facts.vocab_size, facts.max_model_len, facts.block_size, facts.num_blocks) == (131, 256, 4, 128)
    assert (facts.eos_token_ids, facts.dtype, facts.device, facts.tokenizer_path) == ((2,), "float32", "cpu", None)
