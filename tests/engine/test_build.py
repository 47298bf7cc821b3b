"""What the control plane is told: limits of a server's engine and of an offline one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from octavo.config import make_engine_config
from octavo.engine import build
from octavo.worker.base import Runner

FACTS = {
    "block_size": 16,
    "num_blocks": 9,
    "max_num_seqs": 4,
    "max_model_len": 64,
    "vocab_size": 10,
    "max_logprobs": 3,
    "cache_groups": [("all", 0)],
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
