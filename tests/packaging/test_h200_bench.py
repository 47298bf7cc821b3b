"""benches/h200.py: which workloads words choose, how results are merged, and that its check can fail."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHES = Path(__file__).parents[2] / "benches"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """The bench as a module, found beside its siblings as when it is run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHES))
        yield importlib.import_module("h200")


def test_words_choose_parts(bench: ModuleType) -> None:
    assert bench.choose(["qwen-0.6b.random", "serve.10/s", "llama.decode", "llama.prefix"]) == {
        "qwen-0.6b": ["random"],
        "serve": ["10/s"],
        "llama": ["decode", "prefix"],
    }
    assert list(bench.choose([])["llama-fp8"]) == ["decode", "throughput", "prefill"]
    with pytest.raises(SystemExit, match="no such workload"):
        bench.choose(["llama.decoding"])


def test_rows_are_unique_and_all_have_a_workload(bench: ModuleType) -> None:
    keys = [row.key for row in bench.ROWS]
    assert len(keys) == len(set(keys))
    assert {row.workload.split()[0] for row in bench.ROWS} == set(bench.SHAPES)


def test_results_of_two_runs_are_merged(bench: ModuleType, tmp_path: Path) -> None:
    first, second = bench.ROWS[0].key, bench.ROWS[1].key
    args = argparse.Namespace(out=tmp_path / "results" / "h200.json", commit="abc", set=[])
    bench.save({first: 3.5}, args)
    args.commit = "def"
    bench.save({second: 4.5}, args)
    rows = {(row["workload"], row["metric"]): row for row in json.loads(args.out.read_text())["rows"]}
    assert len(rows) == len(bench.ROWS)
    assert (rows[first]["octavo"], rows[first]["commit"]) == (3.5, "abc")
    assert (rows[second]["octavo"], rows[second]["commit"]) == (4.5, "def")
    assert rows[first]["better"] == "lower"


def test_table_marks_what_is_behind(bench: ModuleType) -> None:
    step = bench.ROWS[0]
    assert step.metric == "step"
    assert bench.table({step.key: step.vllm + 1}).endswith("BEHIND")
    assert bench.table({step.key: step.vllm * 1.005}).endswith("even")
    assert bench.table({step.key: step.goal}).endswith("goal")


def test_check_fails_for_another_model(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("h200_check")
    monkeypatch.setattr(module, "ROUNDS", (2,))
    assert "32 tokens checked" in module.check("smollm2-135m", {"device": "cpu"})
    monkeypatch.setitem(module.REFERENCE, "seed", 1)
    with pytest.raises(SystemExit, match="where it is sure"):
        module.check("smollm2-135m", {"device": "cpu"})
