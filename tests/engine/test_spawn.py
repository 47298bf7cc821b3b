"""An engine's process that was started before its client: used once, and ended by who started it."""

from __future__ import annotations

import signal
from pathlib import Path

from octavo import AsyncLLM
from octavo.engine.spawn import EngineProcess

from .conftest import fake_config


async def test_the_client_takes_the_process_that_is_there_and_replaces_it_later() -> None:
    process = EngineProcess(fake_config())
    async with AsyncLLM(config=fake_config(), max_engine_restarts=1, process=process) as llm:
        assert llm.engine_pid == process.popen.pid
        process.popen.kill()
        await llm.reached("restarting")
        await llm.reached("ready")
        assert llm.engine_pid != process.popen.pid
    assert process.popen.returncode == -signal.SIGKILL


def test_an_end_before_anybody_took_it_leaves_nothing() -> None:
    process = EngineProcess(fake_config())
    assert Path(process.socket_path).parent.is_dir()
    process.end()
    process.end()
    assert process.popen.returncode == -signal.SIGKILL
    assert not Path(process.socket_path).parent.exists()
    process.control.close()
