"""The engine process from inside: load the model, serve frames on a unix socket, loop until told to stop.

Its parent (handle.py) starts it, hears progress and errors over the control socket, and alone may stop it: signals are
ignored here, and the parent's death ends the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from octavo import logs
from octavo._core import encode_call
from octavo.engine import control
from octavo.engine.build import Loop, build_engine
from octavo.engine.loop import crash_report
from octavo.errors import OctavoError

CRASH_EXIT_CODE = 70
IDLE_WAIT_S = 60.0
STOP_GRACE_S = 10.0


class ControlSocket:
    """The child's end. A thread waits for "stop" or the end of the stream and calls `on_stop`, once."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._lines = self._socket.makefile("rb")
        self.on_stop: Callable[[], None]
        self.parent_gone = False

    def read(self) -> bytes:
        """The next line; b"" when the parent is gone (it may have left messages of ours unread: a reset)."""
        try:
            return self._lines.readline()
        except ConnectionError:
            return b""

    def send(self, message: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # a parent that is gone is noticed by the watching thread
            self._socket.sendall(message)

    def report(self, stage: str, fraction: float) -> None:
        self.send(control.encode("progress", stage=stage, fraction=fraction))

    def watch(self) -> None:
        threading.Thread(target=self._wait_for_stop, name="octavo-control", daemon=True).start()

    def _wait_for_stop(self) -> None:
        self.parent_gone = self.read() == b""
        self.on_stop()


def run_until_stopped(loop: Loop, stopped: threading.Event) -> None:
    """Step while there is work; while there is none, do the runner's chores, then sleep in Rust.

    The cyclic collector never runs under a request: what was loaded is frozen, and a collection happens when the engine
    falls idle.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    while not stopped.is_set():
        if not loop.step() and next(loop.runner.chores, None) is None:
            gc.collect()
            if not stopped.is_set():  # else the step may have taken what was to end the wait
                loop.core.wait(IDLE_WAIT_S)


def stop_later(loop: Loop, stopped: threading.Event) -> None:
    """From the control thread: end the loop after its current step; a step that hangs doesn't keep the process."""
    stopped.set()
    loop.core.add(encode_call(0, b'{"name":"ping"}'))
    deadline = threading.Timer(STOP_GRACE_S, os._exit, (CRASH_EXIT_CODE,))
    deadline.daemon = True
    deadline.start()


def serve(pipe: ControlSocket, loop: Loop, socket_path: str) -> int:
    """Answer frames until stopped; the exit code."""
    stopped = threading.Event()
    pipe.on_stop = lambda: stop_later(loop, stopped)
    loop.core.serve(socket_path, loop.runner.facts.to_json())
    pipe.send(control.encode("ready"))
    try:
        run_until_stopped(loop, stopped)
    except Exception as error:
        with contextlib.suppress(OSError):  # a disk that is full, say
            print(crash_report(loop.core, error), file=sys.stderr, flush=True)
        return CRASH_EXIT_CODE
    loop.close()
    if pipe.parent_gone:
        remove_folder(socket_path)
    return 0


def remove_folder(socket_path: str) -> None:
    """The private folder that the parent made for the socket."""
    shutil.rmtree(Path(socket_path).parent, ignore_errors=True)


def abandon(socket_path: str) -> None:
    """Told to stop while the model is being loaded: nothing is worth an orderly end."""
    remove_folder(socket_path)
    os._exit(0)


def main(fd: int) -> None:
    """Entry of the spawned interpreter; `fd` is the control socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    pipe = ControlSocket(fd)
    line = pipe.read()
    if not line:  # the parent was gone before it could say what to load
        return
    start = control.Start.decode(line)
    pipe.on_stop = lambda: abandon(start.socket_path)
    logs.configure(start.log_level, start.log_format)
    pipe.watch()
    try:
        loop = build_engine(start.config, pipe.report)
    except Exception as error:
        if not isinstance(error, OctavoError):
            traceback.print_exc()
        pipe.send(control.error_message(error))
        sys.exit(1)
    code = serve(pipe, loop, start.socket_path)
    if code:
        os._exit(code)  # the teardown of a broken device context may hang, and the parent waits
