"""Starts an engine process: what its parent can do before it has an event loop. The process's imports take longer than
all else, so it should be on its way before the parent does its own.

Not here: what the parent hears of it, and its end (handle.py); what the process does (process.py, which is only named
here so that torch stays out of the parent).
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from octavo import logs
from octavo.config import EngineConfig
from octavo.engine import control

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


class EngineProcess:
    """A process that has been told what to load; whoever made it has to see to its end."""

    def __init__(self, config: EngineConfig) -> None:
        folder = private_folder()
        self.socket_path = str(folder / "engine.sock")
        """Where it serves frames, once it is ready."""
        level = logging.getLogger("octavo").getEffectiveLevel()
        start = control.Start(config, self.socket_path, level, logs.kind_in_use())
        self.control, theirs = socket.socketpair()
        """The parent's end of what control.py describes."""
        try:
            with theirs:
                command = [sys.executable, "-P", "-c", BOOT, str(theirs.fileno()), json.dumps(sys.path)]
                self.popen = subprocess.Popen(
                    command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True
                )
            with contextlib.suppress(ConnectionError):  # one that has ended already is noticed by who waits for it
                self.control.sendall(start.encode())
        except BaseException:  # a process that was told nothing ends by itself
            self.control.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def end(self) -> None:
        """Kill it, unless it has ended; what it left on the file system is removed."""
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()
        shutil.rmtree(Path(self.socket_path).parent, ignore_errors=True)
