"""An engine that is kept alive: one process (handle.py), one connection to it (connection.py), and a new pair of them
when the process dies.

Not here: the public API (async_llm.py). Imports neither torch nor the worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from functools import partial
from typing import Literal

from octavo._core import EngineStats, Tokenizer
from octavo.config import EngineConfig
from octavo.engine.connection import EngineConnection
from octavo.engine.handle import EngineHandle, describe_exit
from octavo.engine.inputs import load_tokenizer
from octavo.engine.spawn import EngineProcess
from octavo.errors import EngineDeadError, OctavoError, OverloadError
from octavo.protocol import ModelFacts, Progress

State = Literal["starting", "ready", "restarting", "dead", "draining"]

RESTART_WINDOW_S = 600.0
STOP_TIMEOUT_S = 15.0
DRAIN_RETRY_AFTER_S = 5.0

UNAVAILABLE: dict[State, str] = {
    "starting": "the engine has not been started",
    "restarting": "the engine is being restarted: try again in a moment",
    "dead": "the engine is dead",
}

log = logging.getLogger("octavo.engine")


class EngineClient:
    """Starts an engine process, and replaces it when it dies, at most `max_restarts` times within ten minutes.

    When the process dies, every request in flight gets EngineDeadError. `first`: one for this config that was started
    already; its end is its maker's business until `start`.
    """

    def __init__(self, config: EngineConfig, *, max_restarts: int, first: EngineProcess | None = None) -> None:
        self._state: State = "starting"
        self._state_changed = asyncio.Event()
        self.progress: tuple[str, float] = ("process", 0.0)
        self.facts: ModelFacts | None = None
        self.tokenizer: Tokenizer | None = None
        self._config = config
        self._first = first
        self._max_restarts = max_restarts
        self._restarts: deque[float] = deque()
        self.num_restarts = 0
        self._handle: EngineHandle | None = None
        self._connection: EngineConnection | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def state(self) -> State:
        return self._state

    def _set_state(self, state: State) -> None:
        self._state = state
        self._state_changed.set()
        self._state_changed = asyncio.Event()

    async def reached(self, *states: State) -> State:
        """Wait until the state is one of these; which one it is."""
        while self._state not in states:
            await self._state_changed.wait()
        return self._state

    @property
    def pid(self) -> int | None:
        """Of the engine process."""
        return None if self._handle is None else self._handle.pid

    @property
    def stats(self) -> EngineStats | None:
        """What the newest frame said; None before the first."""
        return None if self._connection is None else self._connection.stats

    @property
    def num_requests(self) -> int:
        """Requests in flight."""
        return 0 if self._connection is None else len(self._connection)

    @property
    def connection(self) -> EngineConnection:
        """The way to the engine. EngineDeadError while there is none, OverloadError while no more is taken."""
        if self._state == "draining":
            raise OverloadError("the engine is shutting down", DRAIN_RETRY_AFTER_S)
        self._check_open()
        if self._state != "ready" or self._connection is None:
            raise EngineDeadError(UNAVAILABLE[self._state])
        return self._connection

    async def start(self, on_progress: Progress | None = None) -> None:
        """Start the engine and wait until it serves. Errors: ConfigError, ModelError, EngineDeadError."""
        try:
            await self._launch(on_progress)
        except BaseException:
            self._set_state("dead")
            raise
        self._supervisor = asyncio.create_task(self._supervise())

    async def _launch(self, on_progress: Progress | None = None) -> None:
        """One process, up to readiness; nothing is left of one that fails."""

        def report(stage: str, fraction: float) -> None:
            self.progress = (stage, fraction)
            if on_progress is not None:
                on_progress(stage, fraction)

        process, self._first = self._first or EngineProcess(self._config), None
        try:
            handle = self._handle = await EngineHandle.open(process)
        except BaseException:
            process.end()
            raise
        try:
            self._check_open()
            await handle.ready(report)
            connection = EngineConnection(partial(self._on_lost, handle))
            facts = await connection.connect(handle.socket_path)
            if self.tokenizer is None:
                self.tokenizer = await asyncio.to_thread(load_tokenizer, facts)
            self._check_open()
            connection.open(facts, self.tokenizer)
        except BaseException:
            handle.kill()
            await handle.ended()
            raise
        self.facts, self._connection = facts, connection
        self._set_state("ready")

    def _check_open(self) -> None:
        """EngineDeadError once this client is closed: whoever closed it did not know of the newest process."""
        if self._closing:
            raise EngineDeadError("the engine was closed")

    def kill(self) -> None:
        """End the process now; unless this client is closing, it is replaced."""
        if self._handle is not None:
            self._handle.kill()

    def _on_lost(self, handle: EngineHandle) -> None:
        """The frame socket has ended: if its process lives on, it is of no use."""
        if not self._closing:
            handle.kill()
            if handle is self._handle and self._state == "ready":  # else it is being started, or was given up
                self._set_state("restarting")

    async def _supervise(self) -> None:
        """Replace the process whenever it ends, until it ends too often."""
        while self._handle is not None:
            code = await self._handle.ended()
            if self._closing:
                return
            log.error("the engine process ended (%s)", describe_exit(code))
            self._set_state("restarting")
            restarted = False
            while not restarted:
                if self._closing:
                    return
                if not self._may_restart():
                    self._set_state("dead")
                    return
                restarted = await self._restart()

    def _may_restart(self) -> bool:
        """Count one more restart, if there were not too many."""
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > RESTART_WINDOW_S:
            self._restarts.popleft()
        if len(self._restarts) >= self._max_restarts:
            log.error("the engine is given up after %d restarts within ten minutes", len(self._restarts))
            return False
        self._restarts.append(now)
        return True

    async def _restart(self) -> bool:
        """One attempt; whether it worked."""
        try:
            await self._launch()
        except Exception as error:
            if self._closing:
                return False
            log.error("the engine could not be restarted: %s", error, exc_info=not isinstance(error, OctavoError))
            return False
        self.num_restarts += 1
        log.warning("the engine has been restarted (%d of at most %d)", len(self._restarts), self._max_restarts)
        return True

    async def close(self, drain_timeout_s: float = 0.0) -> int:
        """Take no more, let what runs finish for a while, end the process. The number of requests cut off."""
        if self._closing:
            return 0
        self._closing = True
        if self._state == "ready":
            self._set_state("draining")
        try:
            num_cut = 0 if self._connection is None else await self._drain(self._connection, drain_timeout_s)
            await self._end()
        except BaseException:  # nobody waits for an orderly end any more
            self.kill()
            raise
        self._set_state("dead")
        return num_cut

    async def _end(self) -> None:
        """End the process, by force if it takes long."""
        if self._supervisor is None:
            self.kill()  # whoever waits for the start is told
        elif self._handle is not None and not self._supervisor.done():
            self._handle.stop()
            try:
                await asyncio.wait_for(asyncio.shield(self._supervisor), STOP_TIMEOUT_S)
            except TimeoutError:
                self.kill()
                await self._supervisor

    @staticmethod
    async def _drain(connection: EngineConnection, timeout_s: float) -> int:
        """Wait for the requests in flight; what is left at the end fails."""
        if len(connection) and timeout_s > 0:
            connection.drained.clear()
            try:
                await asyncio.wait_for(connection.drained.wait(), timeout_s)
            except TimeoutError:
                log.warning("%d requests are cut off after %g s", len(connection), timeout_s)
        num_cut = len(connection)
        connection.fail(EngineDeadError("the engine was shut down while the request was in flight"))
        connection.close()
        return num_cut
