"""One engine process, seen from its parent: start it, wait until it is ready, notice its end, stop it.

Not here: requests and restarts (client.py) and what the process does (process.py, which is only named here so that
torch stays out of the parent).
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from octavo import logs
from octavo.config import EngineConfig
from octavo.engine import control
from octavo.errors import EngineDeadError

MAX_TEMP_PATH = 60
"""A unix socket's path may have about 100 bytes."""

BOOT = """import json, sys
sys.path[:] = json.loads(sys.argv[2])
from octavo.engine.process import main
main(int(sys.argv[1]))"""
"""Like multiprocessing's spawn, a fresh interpreter with the parent's import path, but the parent's main module is not
run again: a script needs no `if __name__ == "__main__"`."""


def private_folder() -> Path:
    """A new folder that only this user may enter, with a path short enough for a socket."""
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="octavo-", dir=base if len(base) <= MAX_TEMP_PATH else "/tmp"))


def describe_exit(code: int) -> str:
    """'exit code 3', or the signal's name."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


class EngineHandle:
    """A running engine process. `start` returns one; then `ready`, then `ended`."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        socket_path: str,
    ) -> None:
        self.socket_path = socket_path
        self._process = process
        self._reader = reader
        self._writer = writer

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(cls, config: EngineConfig) -> EngineHandle:
        """Spawn the process and tell it what to load."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-c", BOOT, str(theirs.fileno()), json.dumps(sys.path)]
            process = subprocess.Popen(
                command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        socket_path = str(private_folder() / "engine.sock")
        level = logging.getLogger("octavo").getEffectiveLevel()
        writer.write(control.Start(config, socket_path, level, logs.kind_in_use()).encode())
        return cls(process, reader, writer, socket_path)

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
        """Ask the process to end after its current step."""
        self._writer.write(control.encode("stop"))

    def kill(self) -> None:
        """End the process now."""
        self._process.kill()
