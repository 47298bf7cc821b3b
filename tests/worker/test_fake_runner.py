"""FakeRunner: no torch, tokens that depend on the sequence alone, time spent in `result` only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hand_core import HandCore, HandPlan, HandSequence

from octavo.config import make_engine_config
from octavo.errors import ConfigError
from octavo.worker.fake import FakeRunner


def make(**options: Any) -> tuple[FakeRunner, HandCore]:
    runner = FakeRunner(make_engine_config({"runner": "fake", **options}), lambda stage, fraction: None)
    core = HandCore(max_rows=8, max_tokens=64, block_size=16)
    runner.attach(core)  # type: ignore[arg-type]
    return runner, core


def start(runner: FakeRunner, plan: HandPlan) -> HandPlan:
    runner.launch(plan)  # type: ignore[arg-type]
    runner.sample(plan)  # type: ignore[arg-type]
    return plan


def run(runner: FakeRunner, core: HandCore, rows: list[tuple[HandSequence, int]]) -> list[int]:
    plan = start(runner, core.plan(rows))
    return core.commit([sequence for sequence, _ in rows[: plan.num_sampled]], runner.result(plan))  # type: ignore[arg-type]


def test_tokens_depend_on_prompt_index_and_position_only() -> None:
    runner, core = make()
    alone = HandSequence(0, prompt=[5, 6, 7], blocks=[1])
    run(runner, core, [(alone, 3)])
    for _ in range(4):
        run(runner, core, [(alone, 1)])
    crowded = HandSequence(6, prompt=[5, 6, 7], blocks=[2])
    sibling = HandSequence(2, prompt=[5, 6, 7], blocks=[3], index=1)
    other = HandSequence(3, prompt=[5, 6, 8], blocks=[4])
    run(runner, core, [(sibling, 3), (crowded, 3), (other, 2)])
    run(runner, core, [(crowded, 1), (sibling, 1), (other, 1)])
    for _ in range(3):
        run(runner, core, [(other, 1), (sibling, 1), (crowded, 1)])
    assert crowded.output == alone.output
    assert len({tuple(row.output[:3]) for row in (alone, sibling, other)}) == 3
    assert all(0 <= token < 32000 for row in (alone, sibling, other) for token in row.output)
    again = HandSequence(1, prompt=[5, 6, 7], blocks=[5], output=alone.output[:2])
    run(runner, core, [(again, 5)])
    assert again.output == alone.output[:3]


def test_logprobs_begin_with_the_token_and_descend() -> None:
    runner, core = make()
    row = HandSequence(4, prompt=[9, 8, 7, 6], blocks=[1], params={"logprobs": 2})
    plan = start(runner, core.plan([(row, 4)], prompt_top=1))
    output = runner.result(plan)  # type: ignore[arg-type]
    (token,) = core.commit([row], output)
    rank, ids, values = core.logprobs(output, 0)
    assert rank == 1
    assert ids[:3] == [token, token, (token + 1) % 32000]
    assert values[1] > values[2]
    assert values[0] == values[1]
    ((ids_tk, values_tk, ranks),) = core.prompt_logprobs[4]
    assert ids_tk[:, 0].tolist() == [8, 7, 6]
    assert (ids_tk.shape, values_tk.shape, ranks.tolist()) == ((3, 2), (3, 2), [1, 1, 1])
    assert (ids_tk.dtype, values_tk.dtype, ranks.dtype) == (np.int32, np.float32, np.int32)


class Clock:
    """Goes on while somebody sleeps, and a little whenever it is looked at."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 1e-6
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_steps_take_their_time_one_after_another_in_result(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("octavo.worker.fake.time", clock)
    runner, core = make(fake_step_ms=100.0)
    row = HandSequence(0, prompt=[1, 2], blocks=[1])
    first = start(runner, core.plan([(row, 2)]))
    second = start(runner, core.plan([(row, 1)]))
    assert clock.now_s < 0.001
    runner.result(first)  # type: ignore[arg-type]
    assert clock.now_s == pytest.approx(0.1, abs=0.001)
    runner.result(second)  # type: ignore[arg-type]
    assert clock.now_s == pytest.approx(0.2, abs=0.001)


def test_facts_come_from_the_folder_or_are_made_up(tmp_path: Path) -> None:
    facts = make()[0].facts
    assert (facts.vocab_size, facts.eos_token_ids, facts.tokenizer_path) == (32000, (), None)
    config = {
        "model_type": "llama",
        "vocab_size": 77,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": 512,
        "eos_token_id": [3, 4],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5, "temperature": 0.6, "top_k": null}')
    runner, _ = make(model=str(tmp_path), max_num_seqs=3, block_size=16)
    facts = runner.facts
    assert (facts.vocab_size, facts.max_model_len, facts.eos_token_ids) == (77, 512, (3, 4, 5))
    assert (facts.num_blocks, facts.max_num_seqs, facts.tokenizer_path) == (3 * 32 + 1, 3, str(tmp_path))
    assert facts.default_sampling_params == {"temperature": 0.6}
    assert runner.num_blocks == facts.num_blocks
    assert make(tokenizer=str(tmp_path))[0].facts.tokenizer_path == str(tmp_path)
    with pytest.raises(ConfigError, match="--max-model-len 513"):
        make(model=str(tmp_path), max_model_len=513)


def test_it_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from octavo.config import make_engine_config\n"
        "from octavo.worker.base import make_runner\n"
        "make_runner(make_engine_config({'runner': 'fake'}), lambda stage, fraction: None)\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == "[]"
