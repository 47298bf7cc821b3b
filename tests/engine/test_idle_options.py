"""Options that do nothing for what runs: named in the log; those that do something are not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from octavo.config import engine_options, make_engine_config
from octavo.engine.build import build_engine
from octavo.engine.idle_options import READ_BY, RUNS, idle_options
from octavo.protocol import ModelFacts


def idle(options: dict[str, Any], *, runner: str, device: str = "cpu", task: str = "generate", **more: Any) -> set[str]:
    """Names for a runner that has resolved `options`; `more`: what else it made of them."""
    asked = make_engine_config(options)
    resolved = replace(
        asked,
        execution=replace(asked.execution, runner=runner, device=device, enforce_eager=more.get("eager", False)),
        model=replace(asked.model, quantization=more.get("quantization", asked.model.quantization)),
    )
    facts = cast(ModelFacts, SimpleNamespace(images=more.get("images")))
    return {name for name, _ in idle_options(asked, resolved, task, facts)}


CUDA = {"runner": "torch", "device": "cuda"}
GRAPHS = {"cuda_graph_sizes": [1, 2], "prompt_graph_tokens": 64}
WIDE = {"fp8_wide_attention": [1, 1], "fp8_wide_mlp": [2, 2]}
MEDIA = {"media_timeout_s": 1.0, "limit_mm_per_prompt": '{"image": 2}', "allowed_media_domains": ["example.com"]}


@pytest.mark.parametrize(
    ("options", "idle_with", "used_with"),
    [
        (GRAPHS, {"runner": "torch"}, CUDA),
        (GRAPHS, {"runner": "torch", "device": "cuda", "eager": True}, CUDA),
        (WIDE, {"runner": "torch", "quantization": "none"}, {"runner": "torch", "quantization": "fp8"}),
        ({"pooling": "mean"}, {"runner": "embedded"}, {"runner": "auto", "task": "embed"}),
        ({"pooling": "mean"}, {"runner": "auto", "task": "score"}, {"runner": "auto", "task": "embed"}),
        ({"quantization": "fp8", "deterministic": True}, {"runner": "auto", "task": "embed"}, CUDA),
        ({"cpu_pin": True}, {"runner": "torch"}, {"runner": "embedded"}),
        ({"cpu_threads": 2}, {"runner": "torch", "device": "cuda"}, {"runner": "embedded"}),
        ({"fake_step_ms": 1.0}, {"runner": "embedded"}, {"runner": "fake"}),
        ({"gpu_memory_utilization": 0.5}, {"runner": "embedded"}, CUDA),
        (MEDIA, {"runner": "torch"}, {"runner": "torch", "images": object()}),
    ],
)  # fmt: skip
def test_what_is_idle_here_works_there(
    options: dict[str, Any], idle_with: dict[str, Any], used_with: dict[str, Any]
) -> None:
    assert idle(options, **idle_with) == options.keys()
    assert idle(options, **used_with) == set()


def test_defaults_are_never_idle_and_the_table_names_options() -> None:
    for run in RUNS:
        task = "embed" if run == "pooling" else "generate"
        assert not idle({}, runner="torch" if run in ("cuda", "cpu") else run, device=run, task=task)
    assert {option.name for option in engine_options()} >= READ_BY.keys()


def test_the_engine_says_so(caplog: pytest.LogCaptureFixture) -> None:
    loop = build_engine(make_engine_config({"runner": "fake", "pooling": "cls"}), lambda stage, fraction: None)
    loop.close()
    assert "--pooling does nothing here: the fake runner does not read it" in caplog.text
