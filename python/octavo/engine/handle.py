"""One engine process, seen from its parent: wait until it is ready, notice its end, stop it.

Not here: how it is started (spawn.py), requests and restarts (client.py) and what the process does (process.py).
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from octavo.engine import control
from octavo.engine.spawn import EngineProcess
from octavo.errors import EngineDeadError

MAX_LINE_BYTES = 1 << 24
"""Of what the process says: an error may name every tensor of a model."""


def describe_exit(code: int) -> str:
    """'exit code 3', or the signal's name."""
    if code >= 0:
        return f"exit code {code}"
    names = {each.value: each.name for each in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"


class EngineHandle:
    """A running engine process. `open` returns one; then `ready`, then `ended`."""

    def __init__(self, process: EngineProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.socket_path = process.socket_path
        self._process = process.popen
        self._reader = reader
        self._writer = writer

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def open(cls, process: EngineProcess) -> EngineHandle:
        """The handle of a process that was just started."""
        return cls(process, *await asyncio.open_unix_connection(sock=process.control, limit=MAX_LINE_BYTES))

    async def _read(self) -> bytes:
        """The next line; b"" when the process is gone."""
        try:
            return await self._reader.readline()
        except ConnectionError:
            return b""

    async def ready(self, on_progress: Callable[[str, float], None]) -> None:
        """Wait until frames are served. Errors: what prevented it (ConfigError, ModelError …), EngineDeadError."""
        while line := await self._read():
            message = json.loads(line)
            if message["kind"] == "ready":
                return
            if message["kind"] == "error":
                raise control.read_error(message)
            on_progress(message["stage"], message["fraction"])
        code = await self.ended()
        raise EngineDeadError(f"the engine process ended before it was ready ({describe_exit(code)})")

    async def ended(self) -> int:
        """Wait for the process's end; its exit code. What it left on the file system is removed."""
        while await self._read():
            pass
        code = await asyncio.to_thread(self._wait, 15.0)
        self._writer.close()
        shutil.rmtree(Path(self.socket_path).parent, ignore_errors=True)
        return code

    def _wait(self, timeout_s: float) -> int:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def stop(self) -> None:
        """Ask the process to end after its current step. One that is gone needs no asking."""
        if not self._writer.is_closing():
            self._writer.write(control.encode("stop"))

    def kill(self) -> None:
        """End the process now."""
        self._process.kill()
