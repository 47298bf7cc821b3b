"""The client's end of an engine's socket: what comes when nobody waits for it any more harms nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from octavo.engine.connection import EngineConnection

HELLO = bytes([5, 128]) + b"{}"
"""Version, kind and body (rust/core/src/frames.rs)."""


async def test_hello_after_the_wait_was_cancelled(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    engine: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    lost = asyncio.Event()
    async with await asyncio.start_unix_server(lambda _, writer: engine.set_result(writer), path):
        connecting = asyncio.create_task(EngineConnection(lost.set).connect(path))
        writer = await engine
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        writer.write(len(HELLO).to_bytes(4, "little") + HELLO)
        writer.close()
        await lost.wait()
    assert complaints == []
