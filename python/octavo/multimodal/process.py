"""The processor's process from inside: load the processor, then answer one image at a time until the parent is gone.

Messages are pickled: both ends are ours. The parent is client.py, which alone knows of time limits.
"""

from __future__ import annotations

import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from octavo.errors import ModelError, RequestError


def limit_memory(spare_bytes: int) -> None:
    """Let this process take so much more memory than it has; an allocation beyond fails, and nobody else suffers."""
    status = Path("/proc/self/status")
    if not status.exists():
        return
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmData:"))
    limit = int(line.split()[1]) * 1024 + spare_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def main(fd: int) -> None:
    """Entry of the spawned interpreter; `fd` is its end of the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe = Connection(fd)
    try:
        folder, max_pixels, spare_bytes = pipe.recv()
        from octavo.multimodal.processor import ImageProcessor  # seconds

        try:
            processor = ImageProcessor(folder, max_pixels)
        except ModelError as error:
            pipe.send(("broken", str(error)))
            sys.exit(1)
        limit_memory(spare_bytes)
        pipe.send(("ready", processor.placeholder, processor.placeholder_id))
        while True:
            source = pipe.recv()
            try:
                pipe.send(("done", processor.process(source)))
            except RequestError as error:
                pipe.send(("refused", str(error), error.param))
    except (EOFError, ConnectionError):
        sys.exit(0)
