"""Records what the engine process does, with torch.profiler, between a start and a stop; one trace at a time."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from octavo import envs


class Profiler:
    """Traces of the engine's main thread and, on CUDA, of the device. torch is imported at the first start."""

    def __init__(self) -> None:
        self._running: Any = None

    def start(self) -> dict[str, Any]:
        """ValueError while a trace is being recorded."""
        if self._running is not None:
            raise ValueError("a profile is being recorded already")
        import torch

        envs.keep_cupti()
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        running = torch.profiler.profile(activities=kinds, acc_events=True)
        running.start()
        self._running = running
        return {}

    def stop(self, folder: str) -> dict[str, Any]:
        """Write the trace (Chrome's format, for ui.perfetto.dev) into a folder; its path. ValueError when there is
        none, OSError when the folder can't be made."""
        if self._running is None:
            raise ValueError("no profile is being recorded")
        running, self._running = self._running, None
        running.stop()
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder) / f"octavo-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json.gz"
        running.export_chrome_trace(str(path))
        return {"path": str(path)}
