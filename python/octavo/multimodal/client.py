"""The processor's process from outside: started when the first image comes (or before), replaced when it dies or hangs.

A broken image costs its own request, never the server or the engine. Thread-safe, one image at a time.
"""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from octavo.errors import EngineDeadError, ModelError, RequestError
from octavo.multimodal.limits import ImageLimits
from octavo.multimodal.placed import ProcessedImage
from octavo.multimodal.sources import ImageSource

log = logging.getLogger("octavo.multimodal")

START_TIMEOUT_S = 180.0
"""Transformers is imported there, from a cold disk perhaps."""

MIN_SPARE_BYTES = 1 << 30
PIXEL_BYTES = 64
"""Memory a pixel: copies of three channels in 8 and 32 bits, before and after scaling."""

BOOT = """import json, sys
sys.path[:] = json.loads(sys.argv[2])
from octavo.multimodal.process import main
main(int(sys.argv[1]))"""


class ImageProcessorClient:
    """One process for one model. `close` ends it."""

    def __init__(self, folder: str, limits: ImageLimits, spare_bytes: int | None = None) -> None:
        """`spare_bytes`: what the process may take beside itself; None: enough for the largest image."""
        self._folder = folder
        self._limits = limits
        self._spare_bytes = MIN_SPARE_BYTES + PIXEL_BYTES * limits.max_pixels if spare_bytes is None else spare_bytes
        self._turns = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._placeholder: tuple[str, int] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None else self._process.pid

    def placeholder(self) -> tuple[str, int]:
        """What stands for an image in a prompt: its text and its token. Waits for the process. Errors as `process`."""
        with self._turns:
            self._running()
            assert self._placeholder is not None, "a process that is ready has told it"
            return self._placeholder

    def process(self, source: ImageSource) -> ProcessedImage:
        """Wait for the image's turn and for what its processor makes of it.

        Raises:
            RequestError: The image is broken, too large, takes too long, or ended the process.
            ModelError: The model's processor can't be loaded.
        """
        with self._turns:
            pipe = self._running()
            try:
                pipe.send(source)
                if not pipe.poll(self._limits.timeout_s):
                    self._end()
                    raise RequestError(
                        f"{source.where}: processing the image took more than {self._limits.timeout_s:g} s "
                        "(--media-timeout-s)",
                        source.where,
                    )
                answer = pipe.recv()
            except (EOFError, OSError):
                self._end()
                log.error("an image ended the process that was to process it; another one is started")
                raise RequestError(f"{source.where}: the image can't be processed", source.where) from None
        if answer[0] == "refused":
            raise RequestError(answer[1], answer[2])
        done: ProcessedImage = answer[1]
        return done

    def _running(self) -> Connection:
        """The connection to a process that is ready."""
        if self._closed:
            raise EngineDeadError("the engine was shut down")
        if self._pipe is not None:
            return self._pipe
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-c", BOOT, str(theirs.fileno()), json.dumps(sys.path)]
            self._process = subprocess.Popen(
                command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True
            )
        if self._closed:  # meanwhile: whoever closed did not see this process
            ours.close()
            self._end()
            raise EngineDeadError("the engine was shut down")
        self._pipe = Connection(ours.detach())
        answer = self._first_answer(self._pipe)
        if answer[0] != "ready":
            self._end()
            raise ModelError(answer[1])
        self._placeholder = (answer[1], answer[2])
        return self._pipe

    def _first_answer(self, pipe: Connection) -> tuple[Any, ...]:
        try:
            pipe.send((self._folder, self._limits.max_pixels, self._spare_bytes))
            if pipe.poll(START_TIMEOUT_S):
                answer: tuple[Any, ...] = pipe.recv()
                return answer
        except (EOFError, OSError):
            return ("broken", "the process of the image processor ended while it started")
        return ("broken", f"the image processor was not ready after {START_TIMEOUT_S:g} s")

    def _end(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._pipe = self._process = None

    def close(self) -> None:
        """End the process; images that come later are refused."""
        self._closed = True
        if self._process is not None:
            self._process.kill()  # who waits for it notices
        with self._turns:
            self._end()
