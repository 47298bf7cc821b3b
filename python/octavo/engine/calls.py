"""What clients may ask the engine between two steps: one table from name to function. JSON in, JSON out.

Not here: how calls travel (connection.py) and when they are answered (loop.py).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.engine.profiling import Profiler

if TYPE_CHECKING:
    from octavo._core import Core

Args = Mapping[str, Any]
Reply = Callable[[dict[str, Any]], None]
LEVELS = ("debug", "info", "warning", "error")


class Calls:
    """Answers calls about one engine. ValueError of a call is its answer; nothing a client sends ends the engine.

    Args:
        stats: The engine's numbers; None: the control plane's.
        later: Calls that keep their reply and use it when the answer is there.
    """

    def __init__(
        self,
        core: Core,
        stats: Callable[[], dict[str, Any]] | None = None,
        later: Mapping[str, Callable[[Args, Reply], None]] | None = None,
    ) -> None:
        self._core = core
        self._profiler = Profiler()
        self._later = later or {}
        stats = stats or core.stats
        self._table: dict[str, Callable[[Args], dict[str, Any]]] = {
            "ping": lambda args: {"num_steps": stats()["num_steps"]},
            "stats": lambda args: stats(),
            "reset_prefix_cache": lambda args: {"complete": core.reset_prefix_cache()},
            "set_log_level": _set_log_level,
            "start_profile": lambda args: self._profiler.start(),
            "stop_profile": lambda args: self._profiler.stop(_text(args, "folder")),
        }

    def answer_all(self) -> None:
        """Answer what has arrived; a malformed or unknown call is answered with an error."""
        for client, call_id, body in self._core.take_calls():
            self._answer(body, partial(self._reply, client, call_id))

    def _reply(self, client: int, call_id: int, answer: dict[str, Any]) -> None:
        self._core.reply(client, call_id, json.dumps(answer).encode())

    def _answer(self, body: bytes, reply: Reply) -> None:
        try:
            request = json.loads(body)
        except ValueError:
            return reply({"error": "a call is a JSON object"})
        name = str(request.get("name")) if isinstance(request, dict) else ""
        try:
            if name in self._later:
                self._later[name](request, reply)
            elif name in self._table:
                reply(self._table[name](request))
            else:
                reply({"error": f"unknown call; known: {', '.join([*self._table, *self._later])}"})
        except (ValueError, OSError) as error:
            reply({"error": str(error)})


def _text(args: Args, name: str) -> str:
    value = args.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string")
    return value


def _set_log_level(args: Args) -> dict[str, Any]:
    level = _text(args, "level")
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}")
    logging.getLogger().setLevel(level.upper())
    return {}
