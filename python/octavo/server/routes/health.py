"""GET /health (the engine answers), /ready (requests are taken) and /metrics."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from octavo.server.context import ServerContext


async def health(request: Request) -> Response:
    """200 while the engine answers or is idle; 503 while it loads, is dead, or has been silent for long."""
    context = ServerContext.of(request)
    if await context.pulse.beats():
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": context.state}, 503)


async def ready(request: Request) -> Response:
    """200 when requests are taken; else 503 with how far the start has come."""
    context = ServerContext.of(request)
    if context.state == "ready":
        return JSONResponse({"status": "ready"})
    stage, fraction = context.llm.progress
    return JSONResponse({"status": context.state, "stage": stage, "fraction": fraction}, 503)


async def metrics(request: Request) -> Response:
    """Prometheus text."""
    context = ServerContext.of(request)
    stats = context.overload.added_to(await context.pulse.stats())
    return Response(context.metrics.exposition(stats), media_type=CONTENT_TYPE_LATEST)


ROUTES = [
    Route("/health", health, methods=["GET"]),
    Route("/ready", ready, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
]
