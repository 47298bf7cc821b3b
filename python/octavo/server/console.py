"""What the server tells the person who started it: progress of loading, the memory plan, where it listens.

A terminal gets a bar that redraws; a log gets one line a stage.
"""

from __future__ import annotations

import json
import shlex
import sys
from typing import TextIO

BAR_CHARS = 30


class LoadProgress:
    """Shows progress reports of the engine. A stage that holds line feeds is text for people and is shown as it is."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out if out is not None else sys.stderr
        self._draws = self._out.isatty()
        self._stage = ""
        self._open = False

    def __call__(self, stage: str, fraction: float) -> None:
        if "\n" in stage:
            self.close()
            print(stage, file=self._out, flush=True)
        elif self._draws:
            self._draw(stage, fraction)
        elif stage != self._stage:
            print(f"loading: {stage}", file=self._out, flush=True)
        self._stage = stage

    def _draw(self, stage: str, fraction: float) -> None:
        filled = round(min(max(fraction, 0.0), 1.0) * BAR_CHARS)
        if self._open and stage != self._stage:
            self._out.write("\n")
        self._out.write(f"\r{stage:<12} [{'#' * filled}{'.' * (BAR_CHARS - filled)}] {fraction:4.0%}")
        self._out.flush()
        self._open = True

    def close(self) -> None:
        """End the line of the bar."""
        if self._open:
            self._out.write("\n")
            self._out.flush()
        self._open = False


def base_url(host: str, port: int) -> str:
    """An address that a client on this machine can use."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{reachable}:{port}"


def curl_line(url: str, model: str, *, chat: bool, needs_key: bool) -> str:
    """A command that asks the server for something."""
    path, body = "/v1/completions", {"model": model, "prompt": "Once upon a time", "max_tokens": 32}
    if chat:
        path = "/v1/chat/completions"
        body = {"model": model, "messages": [{"role": "user", "content": "What is an octavo?"}]}
    key = ' -H "Authorization: Bearer $OCTAVO_API_KEY"' if needs_key else ""
    return f"curl {url}{path}{key} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"


def ready_lines(url: str, model: str, *, seconds: float, chat: bool, needs_key: bool) -> str:
    """What is printed once requests are taken."""
    return f"{model}: ready in {seconds:.1f} s at {url}\ntry: {curl_line(url, model, chat=chat, needs_key=needs_key)}"
