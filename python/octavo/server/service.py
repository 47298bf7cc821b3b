"""The serving process: listens at once, waits for the engine, serves, and ends well on a signal.

Not here: the HTTP application (app.py) and what happens before this is imported (start.py).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, cast

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp

from octavo import logs
from octavo.async_llm import AsyncLLM
from octavo.config import EngineConfig, ServerConfig
from octavo.engine.spawn import EngineProcess
from octavo.errors import OctavoError
from octavo.server import early_signals
from octavo.server.app import beside, make_admin_app, make_app
from octavo.server.console import CHAT_ROUTE, LoadProgress, base_url, listening_line, ready_lines, say
from octavo.server.context import ServerContext
from octavo.server.http_protocol import HttpLimits, LimitedHttpProtocol
from octavo.server.listening import BACKLOG
from octavo.server.report import CallerFilter

if TYPE_CHECKING:
    from octavo.server.batch.service import Batches
    from octavo.server.grpc.server import GrpcServer

log = logging.getLogger("octavo.server")

KEEP_ALIVE_S = 60
# After the drain, how long handlers get to end; their connections are hung up on before that (http_protocol.py).
HANDLERS_S = 4
ENGINE_CHECK_S = 0.5


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: `Service` has its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: ASGIApp, limits: HttpLimits) -> _Server:
    """uvicorn around an app; it has to be told where to listen."""
    return _Server(
        uvicorn.Config(
            app,
            http=cast(type[asyncio.Protocol], partial(LimitedHttpProtocol, limits=limits)),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=HANDLERS_S,
            backlog=BACKLOG,
        )
    )


class Service:
    """One server and its engine (whose process was started), from start to end."""

    def __init__(
        self,
        engine_config: EngineConfig,
        config: ServerConfig,
        listener: socket.socket,
        admin_listener: socket.socket | None,
        process: EngineProcess,
    ) -> None:
        self._config = config
        self._url = base_url(config.host, listener.getsockname()[1])
        self._llm = AsyncLLM(config=engine_config, max_engine_restarts=config.max_engine_restarts, process=process)
        app: ASGIApp = make_app(self._llm, config)
        assert isinstance(app, Starlette)
        self._context: ServerContext = app.state.context
        self._batches: Batches | None = app.state.batches
        private = make_admin_app(self._context)
        limits = HttpLimits(max_connections=config.max_connections)
        self._servers: list[tuple[_Server, socket.socket]] = []
        if private is not None and admin_listener is not None:
            self._servers.append((make_server(private, limits), admin_listener))
            log.info("the /admin routes listen on %s", base_url(config.host, admin_listener.getsockname()[1]))
        elif private is not None:
            app = beside(app, private)
        self._servers.append((make_server(app, limits), listener))
        self._grpc: GrpcServer | None = None
        self._stop = asyncio.Event()

    async def main(self) -> int:
        """Serve until a signal or the engine's final death; the exit code. Errors of loading: OctavoError."""
        loop = asyncio.get_running_loop()
        for number in early_signals.NUMBERS:
            loop.add_signal_handler(number, self._on_signal, number)
        for early in early_signals.take():
            self._on_signal(early)
        loop.add_signal_handler(signal.SIGHUP, self._reload_keys)
        if self._config.grpc_port is not None:
            self._grpc = _make_grpc(self._context, self._config.host, self._config.grpc_port)
        say(listening_line(self._url, self._llm.config.model.model))
        serving = asyncio.create_task(self._serve())
        stopping = asyncio.create_task(self._stop.wait())
        loading = asyncio.create_task(self._load())
        try:
            await asyncio.wait({loading, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done() and not self._stop.is_set():
                await loading
                return await self._serve_until_end(stopping, serving)
            loading.cancel()
            await asyncio.wait({loading})
            if not loading.cancelled():
                loading.exception()  # seen: whoever ends a group of processes ends the engine, too
            return 0
        finally:
            stopping.cancel()
            await self._shut_down(serving)

    async def _serve(self) -> None:
        """Until all servers have ended."""
        async with asyncio.TaskGroup() as group:
            for server, listener in self._servers:
                group.create_task(server.serve(sockets=[listener]))
            if self._grpc is not None:
                group.create_task(self._grpc.serve())

    async def _load(self) -> None:
        start_s = time.monotonic()
        progress = LoadProgress()
        try:
            await self._llm.start(progress)
        finally:
            progress.close()
        has_template = self._context.encoder.template.source is not None
        names, task = self._context.names, self._context.facts.task
        if not has_template and task == "generate" and self._llm.tokenizer is not None:
            log.warning("the model has no chat template: /v1/chat/completions needs --chat-template FILE")
        if self._batches is not None:
            await self._batches.runner.resume()
        if task != "generate":
            self._context.warm_inputs()
        if self._llm.images is not None:
            self._llm.images.warm()
        gc.collect()
        gc.freeze()
        lines = ready_lines(
            self._url,
            names[0],
            seconds=time.monotonic() - start_s,
            route=CHAT_ROUTE if has_template and task == "generate" else task,
            needs_key=self._context.keyring.needs_key,
        )
        say(lines)

    async def _serve_until_end(self, stopping: asyncio.Task[bool], serving: asyncio.Task[None]) -> int:
        while not stopping.done():
            if serving.done():
                log.error("the server can't serve any more: it ends")
                return 1
            if self._llm.state == "dead":
                log.error("the engine is dead and is not started again: the server ends")
                return 1
            await asyncio.wait({stopping, serving}, timeout=ENGINE_CHECK_S, return_when=asyncio.FIRST_COMPLETED)
            await self._end_frozen_engine()
        timeout_s = self._context.settings.drain_timeout_s
        log.info("shutting down: %d calls in flight get up to %g s", len(self._context.live), timeout_s)
        cut = await self._context.drain(timeout_s)
        if cut:
            log.warning("%d calls were cut after %g s (--drain-timeout-s)", cut, timeout_s)
        return 0

    async def _end_frozen_engine(self) -> None:
        """An engine that hangs with calls in flight is as good as dead."""
        limit_s, pulse = self._config.engine_timeout_s, self._context.pulse
        if limit_s and self._context.live.calls and self._llm.state == "ready":
            await pulse.beats()
            if pulse.silence_s > limit_s:
                log.error("the engine has been silent for %.1f s (--engine-timeout-s): it is killed", pulse.silence_s)
                self._llm.kill_engine()

    async def _shut_down(self, serving: asyncio.Task[None]) -> None:
        await self._context.drain(0)
        for server, _ in self._servers:
            server.should_exit = True
        if self._grpc is not None:
            self._grpc.should_exit = True
        await serving
        await self._llm.close()
        if self._batches is not None:
            self._batches.close()
        self._context.close()

    def _reload_keys(self) -> None:
        try:
            num_tenants = self._context.keyring.reload()
        except OctavoError as error:
            log.error("the keys stay as they were: %s", error)
        else:
            log.info("keys of %d tenants were read", num_tenants)

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            early_signals.end_at_once(number)
        self._stop.set()


def _make_grpc(context: ServerContext, host: str, port: int) -> GrpcServer:
    """The gRPC server, listening. ConfigError without its packages, or for a port that can't be had."""
    from octavo.server.grpc.protocol import compiled

    compiled()  # says what to install, before anything imports it
    from octavo.server.grpc.server import GrpcServer

    server = GrpcServer(context, host, port)
    log.info("gRPC listens on %s:%d", host, server.port)
    return server


def run(service: Service) -> int:
    """Serve, in an event loop of its own; the exit code. Problems of starting are OctavoErrors."""
    logs.add_filter(CallerFilter())
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(service.main())


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop where it exists (not on Windows)."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: type[asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
