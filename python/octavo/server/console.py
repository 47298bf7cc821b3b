"""What the server tells the person who started it: progress of loading, the memory plan, where it listens."""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import sys
from typing import Any

from octavo import logs
from octavo.engine.progress import LoadBar

log = logging.getLogger("octavo.server")


def say(lines: str) -> None:
    """Tell the person who started the server; where logs are JSON, as log lines. A full disk or a closed pipe is no
    reason to end, as it is none for log lines."""
    if logs.kind_in_use() == "text":
        with contextlib.suppress(OSError):
            print(lines, file=sys.stderr, flush=True)
        return
    for line in lines.splitlines():
        log.info("%s", line)


class LoadProgress:
    """Shows the engine's progress reports: bars on a terminal, one line a stage in a log. A stage of several lines is
    text for people (the memory plan) and is shown as it is."""

    def __init__(self) -> None:
        self._bar = LoadBar(None) if sys.stderr.isatty() and logs.kind_in_use() == "text" else None
        self._stage = ""

    def __call__(self, stage: str, fraction: float) -> None:
        if self._bar is not None:
            self._bar(stage, fraction)
        elif stage != self._stage:
            say(stage if "\n" in stage else f"loading: {stage}")
        self._stage = stage

    def close(self) -> None:
        """End the line of the bar."""
        if self._bar is not None:
            self._bar.close()


def base_url(host: str, port: int) -> str:
    """An address that a client on this machine can use."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{reachable}:{port}"


CHAT_ROUTE = "chat"
# What is shown -> (path, body without the model).
EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    CHAT_ROUTE: ("/v1/chat/completions", {"messages": [{"role": "user", "content": "What is an octavo?"}]}),
    "generate": ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 32}),
    "embed": ("/v1/embeddings", {"input": ["What is an octavo?"]}),
    "score": ("/rerank", {"query": "What is an octavo?", "documents": ["A book.", "An instrument."]}),
    "classify": ("/classify", {"input": ["What a fine book!"]}),
}


def curl_line(url: str, model: str, *, route: str, needs_key: bool) -> str:
    """A command that asks the server for something: `route` is a name of `EXAMPLES`."""
    path, more = EXAMPLES[route]
    key = ' -H "Authorization: Bearer $OCTAVO_API_KEY"' if needs_key else ""
    body = shlex.quote(json.dumps({"model": model, **more}))
    return f"curl {url}{path}{key} -H 'Content-Type: application/json' -d {body}"


def listening_line(url: str, model: str) -> str:
    """What is printed first."""
    return f"listening on {url} (GET /ready tells how far loading is); loading {model}"


def ready_lines(url: str, model: str, *, seconds: float, route: str, needs_key: bool) -> str:
    """What is printed once requests are taken."""
    return f"{model}: ready in {seconds:.1f} s at {url}\ntry: {curl_line(url, model, route=route, needs_key=needs_key)}"
