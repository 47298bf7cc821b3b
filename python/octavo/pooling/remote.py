"""Inputs to an engine process and rows back: the caller's side of a job (jobs.py is the engine's)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from octavo.errors import OctavoError, RequestError
from octavo.pooling.answers import Rows
from octavo.pooling.inputs import PoolingInput
from octavo.pooling.jobs import call_args
from octavo.protocol import ModelFacts

Call = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
_DROPS: set[asyncio.Task[None]] = set()
"""Tasks that nobody waits for."""


class Pooled(NamedTuple):
    """What came back."""

    rows: Rows
    """[inputs, numbers]"""
    queue_s: float
    """How long the job waited before its first input ran."""


def check_pools(facts: ModelFacts, task: str | None = None) -> None:
    """RequestError when the model generates text, or does not do the task."""
    if facts.pooling is None:
        raise RequestError(
            f"this model generates text, it makes no embeddings and no scores ({facts.model}; --task embed would load "
            "it as an embedding model)",
            "model",
            "wrong_task",
        )
    if task is not None and facts.task != task:
        raise RequestError(f"this model's task is {facts.task}, not {task}", "model", "wrong_task")


async def run_remote(call: Call, inputs: Sequence[PoolingInput], deadline_s: float) -> Pooled:
    """Send a job and wait for its rows; if the caller stops waiting, the engine is told."""
    name = secrets.token_hex(8)
    try:
        answer = await call("pool", call_args(name, inputs, deadline_s))
    except asyncio.CancelledError:
        task = asyncio.create_task(_drop(call, name))
        _DROPS.add(task)
        task.add_done_callback(_DROPS.discard)
        raise
    rows = np.frombuffer(base64.b64decode(answer["rows"]), np.float32).reshape(answer["shape"])
    return Pooled(rows, answer["queue_s"])


async def _drop(call: Call, name: str) -> None:
    with contextlib.suppress(OctavoError):  # an engine that is gone has forgotten the job too
        await call("drop_pooled", {"job": name})
