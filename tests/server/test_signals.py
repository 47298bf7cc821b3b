"""Signals at the edges of the serving process's life, where it has no event loop: its engine ends with it, and nobody
reads a traceback.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving import START, ServerProcess

from octavo.server.service import Service

FAKE = "--runner", "fake", "--model", "fake", "--max-model-len", "256"

WHILE_IMPORTING = """
import os, signal, sys
class Hook:
    def find_spec(self, name, *more):
        if name == "octavo.server.service":
            {action}
sys.meta_path.insert(0, Hook())
"""
"""The engine's process is on its way then."""

WHILE_ENDING = """
import os, signal
from octavo.engine.spawn import EngineProcess
end = EngineProcess.end
def ended(process):
    end(process)
    os.kill(os.getpid(), signal.{name})
EngineProcess.end = ended
"""


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where servers and engines put temporary files; its path is short enough for a socket's."""
    with tempfile.TemporaryDirectory(prefix="races-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def ended_server(before: str) -> tuple[int, str]:
    """Exit code and log of a server whose process runs `before` first."""
    with ServerProcess(*FAKE, start=before + START) as server:
        return server.end()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_while_the_server_is_imported(name: str, folders: Path) -> None:
    code, log = ended_server(WHILE_IMPORTING.format(action=f"os.kill(os.getpid(), signal.{name})"))
    assert (code, "Traceback" in log) == (0, False), log
    assert list(folders.iterdir()) == []


def test_a_reload_of_keys_while_the_server_is_imported_ends_nothing(folders: Path) -> None:
    before = WHILE_IMPORTING.format(action="os.kill(os.getpid(), signal.SIGHUP)")
    with ServerProcess(*FAKE, start=before + START) as server:
        server.wait_ready()
        server.process.send_signal(signal.SIGHUP)
        server.process.send_signal(signal.SIGTERM)
        code, log = server.end()
    assert (code, "keys of 0 tenants were read" in log) == (0, True), log


def test_a_second_signal_then_ends_at_once(folders: Path) -> None:
    twice = "[os.kill(os.getpid(), signal.SIGTERM) for _ in range(2)]"
    code, log = ended_server(WHILE_IMPORTING.format(action=twice))
    assert (code, "Traceback" in log) == (128 + signal.SIGTERM, False), log
    assert list(folders.iterdir()) == []  # the log's end is the engine's, who has cleared up


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_after_the_end_of_the_event_loop(name: str, folders: Path) -> None:
    """Of someone impatient, say."""
    before = WHILE_IMPORTING.format(action="os.kill(os.getpid(), signal.SIGTERM)") + WHILE_ENDING.format(name=name)
    code, log = ended_server(before)
    assert (code, "Traceback" in log) == (128 + getattr(signal, name), False), log
    assert list(folders.iterdir()) == []


async def test_a_server_that_can_not_serve_any_more_ends() -> None:
    async def broken() -> None:
        raise RuntimeError("no more sockets")

    service: Any = SimpleNamespace(_llm=SimpleNamespace(state="ready"))
    serving = asyncio.create_task(broken())
    stopping = asyncio.create_task(asyncio.Event().wait())
    assert await asyncio.wait_for(Service._serve_until_end(service, stopping, serving), 30) == 1
    stopping.cancel()
    assert isinstance(serving.exception(), RuntimeError)
