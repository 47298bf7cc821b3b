"""What `LLM` shows on stderr while it loads and generates: tqdm bars, on a terminal or when asked for."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm


def wants_bar(use_tqdm: bool | None) -> bool:
    """None shows a bar on a terminal only."""
    return sys.stderr.isatty() if use_tqdm is None else use_tqdm


class LoadBar:
    """One bar per stage of loading; call it with (stage, fraction). A stage of several lines is shown as it is."""

    def __init__(self, use_tqdm: bool | None) -> None:
        self._shown = wants_bar(use_tqdm)
        self._bar: Any = None
        self._stage = ""

    def __call__(self, stage: str, fraction: float) -> None:
        if not self._shown:
            return
        if "\n" in stage:
            self.close()
            print(stage, file=sys.stderr)
            return
        if stage != self._stage:
            self.close()
            self._stage = stage
            self._bar = tqdm(total=100, desc=stage, bar_format="{desc}: {percentage:3.0f}% |{bar}| {elapsed}")
        self._bar.update(100 * fraction - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class GenerateBar:
    """Finished requests of all, with tokens per second. Counts, and shows, nothing unless `shown`."""

    def __init__(self, num_requests: int, use_tqdm: bool | None) -> None:
        self.shown = wants_bar(use_tqdm)
        self._bar: Any = tqdm(total=num_requests, unit="req", dynamic_ncols=True) if self.shown else None
        self._num_tokens = 0
        self._start_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, num_finished: int, num_new_tokens: int) -> None:
        """`num_finished` requests in all, `num_new_tokens` since the last call."""
        if self._bar is None:
            return
        self._num_tokens += num_new_tokens
        rate = self._num_tokens / max(time.monotonic() - self._start_s, 1e-9)
        self._bar.set_postfix_str(f"{rate:.1f} tokens/s", refresh=False)
        self._bar.update(num_finished - self._bar.n)
