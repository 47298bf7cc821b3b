"""What the control plane is told: limits of a server's engine and of an offline one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from octavo.config import make_engine_config
from octavo.engine import build
from octavo.errors import ConfigError
from octavo.worker.base import Runner

FACTS = {
    "block_size": 16,
    "num_blocks": 9,
    "max_num_seqs": 4,
    "max_model_len": 64,
    "vocab_size": 10,
    "max_logprobs": 3,
    "cache_groups": [("all", 0)],
    "images": None,
}


@pytest.mark.parametrize(
    ("asked", "bounded", "told"),
    [(None, True, None), (25.0, True, 25.0), (0, True, 0), (None, False, 0.0), (25.0, False, 25.0)],
)
def test_offline_only_an_explicit_pace_is_kept(
    monkeypatch: pytest.MonkeyPatch, asked: float | None, bounded: bool, told: float | None
) -> None:
    monkeypatch.setattr(build, "CoreConfig", lambda **limits: limits)
    options = {"max_itl_ms": asked, "overlap_depth": 1, "max_num_batched_tokens": 64, "max_queued_requests": 7}
    runner = cast(Runner, SimpleNamespace(config=make_engine_config(options), facts=SimpleNamespace(**FACTS)))
    limits = cast(dict[str, Any], build.core_config(runner, bounded=bounded))
    assert limits["max_itl_ms"] == told
    assert (limits["max_queued_requests"] == 7) is bounded


@pytest.mark.parametrize(
    ("device", "bounded", "asked", "late"),
    [
        ("cuda", True, None, True),
        ("cuda", True, 20.0, True),
        ("cuda", True, 0.0, False),
        ("cuda", False, None, False),
        ("cpu", True, None, False),
    ],
)
def test_plans_are_late_where_somebody_may_come_and_launches_do_not_wait(
    monkeypatch: pytest.MonkeyPatch, device: str, bounded: bool, asked: float | None, late: bool
) -> None:
    monkeypatch.setattr(build, "CoreConfig", lambda **limits: limits)
    graphs = {"cuda_graph_sizes": [1, 2, 16], "prompt_graph_tokens": 700 if device == "cuda" else 0}
    options = {"device": device, "max_itl_ms": asked, "overlap_depth": 2, "max_num_batched_tokens": 8192, **graphs}
    runner = cast(Runner, SimpleNamespace(config=make_engine_config(options), facts=SimpleNamespace(**FACTS)))
    limits = cast(dict[str, Any], build.core_config(runner, bounded=bounded))
    assert limits["plans_late"] is late
    assert limits["step_sizes"][-1:] == ([640] if device == "cuda" else [])


def test_options_as_python_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path, the home folder, an object in place of JSON, NumPy's integers; equal to what the flags would give."""
    monkeypatch.setenv("HOME", "/home/me")
    given = {
        "model": Path("/models/a.gguf"),
        "tokenizer": "~/tokenizer",
        "limit_mm_per_prompt": {"image": 1},
        "max_model_len": np.int64(100),
    }
    flags = {
        "model": "/models/a.gguf",
        "tokenizer": "/home/me/tokenizer",
        "limit_mm_per_prompt": '{"image": 1}',
        "max_model_len": 100,
    }
    assert make_engine_config(given) == make_engine_config(flags)
    assert type(make_engine_config(given).model.max_model_len) is int
    with pytest.raises(ConfigError, match="--max-model-len: True is not a valid value"):
        make_engine_config({"model": "m", "max_model_len": True})
