"""/admin: for who runs the server. Served by an app of its own with a key of its own (app.py), or not at all."""

from __future__ import annotations

import logging
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import octavo
from octavo.errors import RequestError
from octavo.server.body import has_body, read_json
from octavo.server.context import ServerContext
from octavo.server.dashboard import dashboard
from octavo.server.errors import ApiError
from octavo.server.schema.admin import AbortRequest, DrainRequest
from octavo.server.schema.parse import parse

SECRETS = ("api_key", "admin_key")


async def info(request: Request) -> Response:
    """The server, its options without secrets, its model, its processes."""
    context = ServerContext.of(request)
    options = asdict(context.config)
    for name in SECRETS:
        options[name] = bool(options[name])
    facts = context.llm.facts
    return JSONResponse(
        {
            "version": octavo.__version__,
            "state": context.state,
            "uptime_s": round(time.time() - context.created, 1),
            "pid": os.getpid(),
            "engine_pid": context.llm.engine_pid,
            "engine_restarts": context.llm.num_restarts,
            "calls_running": len(context.live),
            "model": None if facts is None else asdict(facts),
            "server": options,
            "engine": asdict(context.llm.config),
        }
    )


async def stats(request: Request) -> Response:
    """The engine's counters: queue, blocks, prefix cache."""
    return JSONResponse(dict(await ServerContext.of(request).pulse.stats()))


async def calls(request: Request) -> Response:
    """The calls in flight."""
    now_s = time.perf_counter()
    records = [generation.record for generation in ServerContext.of(request).live.calls]
    listed = [
        {
            "request_id": record.caller.request_id,
            "tenant": record.caller.tenant.name,
            "age_s": round(now_s - record.arrival_s, 3),
            "prompt_tokens": record.num_prompt_tokens,
            "output_tokens": record.num_output_tokens,
        }
        for record in records
    ]
    return JSONResponse({"calls": sorted(listed, key=lambda call: -float(call["age_s"]))})


async def tenants(request: Request) -> Response:
    """What tenants may use and have used."""
    listed: list[dict[str, Any]] = []
    for tenant in ServerContext.of(request).keyring.all():
        limits = {name: value for name, value in asdict(tenant.spec).items() if name != "keys"}
        listed.append({"name": tenant.name, **limits, "calls_running": tenant.num_live, **asdict(tenant.usage)})
    return JSONResponse({"tenants": listed})


async def reload_keys(request: Request) -> Response:
    """Read the keys file again, as on SIGHUP; 400 and no change when it can't be used."""
    return JSONResponse({"tenants": ServerContext.of(request).keyring.reload()})


async def abort(request: Request) -> Response:
    """End a call: its client gets an error. 404 when there is none of that id."""
    context = ServerContext.of(request)
    wanted = parse(AbortRequest, (await read_json(request))[0])
    num_ended = context.abort(wanted.request_id)
    if not num_ended:
        raise ApiError(404, f"no call has the id {wanted.request_id[:128]!r}", param="request_id", code="not_found")
    return JSONResponse({"ended": num_ended})


async def drain(request: Request) -> Response:
    """Take no more calls (/ready gives 503); those in flight go on. With `exit`, end like on SIGTERM. The body may be
    left out."""
    wanted = parse(DrainRequest, (await read_json(request))[0] if has_body(request) else {})
    context = ServerContext.of(request)
    context.draining = True
    if wanted.exit:
        signal.raise_signal(signal.SIGTERM)
    return JSONResponse({"state": context.state, "calls_running": len(context.live)})


async def resume(request: Request) -> Response:
    """Take calls again after a drain without exit."""
    context = ServerContext.of(request)
    if context.ending:
        raise ApiError(409, "the server is shutting down", code="draining")
    context.draining = False
    return JSONResponse({"state": context.state})


async def get_settings(request: Request) -> Response:
    """What can be changed while the server runs, as it is."""
    return JSONResponse(asdict(ServerContext.of(request).settings))


async def patch_settings(request: Request) -> Response:
    """Change some settings; the others stay."""
    context = ServerContext.of(request)
    body, _ = await read_json(request)
    settings = context.settings.changed(body)
    if settings.log_level != context.settings.log_level:
        logging.getLogger().setLevel(settings.log_level.upper())
        await _call(context, "set_log_level", level=settings.log_level)
    context.settings = settings
    return JSONResponse(asdict(settings))


async def reset_prefix_cache(request: Request) -> Response:
    """Forget cached prefixes; `complete` is false when some blocks are in use (those stay)."""
    return JSONResponse(await _call(ServerContext.of(request), "reset_prefix_cache"))


async def start_profile(request: Request) -> Response:
    """Record what the engine does until /admin/profile/stop."""
    context = ServerContext.of(request)
    _profile_dir(context)
    return JSONResponse(await _call(context, "start_profile"))


async def stop_profile(request: Request) -> Response:
    """Write the trace into --profile-dir; its path."""
    context = ServerContext.of(request)
    return JSONResponse(await _call(context, "stop_profile", folder=_profile_dir(context)))


def _profile_dir(context: ServerContext) -> str:
    folder = context.config.profile_dir
    if folder is None:
        raise RequestError("profiles need --profile-dir", code="unsupported")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"--profile-dir: can't use {folder}: {error.strerror}") from None
    return folder


async def _call(context: ServerContext, name: str, **args: Any) -> dict[str, Any]:
    """Ask the engine; what it refuses is a 409."""
    context.check_engine()
    try:
        return await context.llm.call(name, **args)
    except ValueError as error:
        raise ApiError(409, str(error), code="refused") from None


async def grafana(request: Request) -> Response:
    """A Grafana dashboard to import."""
    return JSONResponse(dashboard())


ROUTES = [
    Route("/admin/info", info, methods=["GET"]),
    Route("/admin/stats", stats, methods=["GET"]),
    Route("/admin/calls", calls, methods=["GET"]),
    Route("/admin/tenants", tenants, methods=["GET"]),
    Route("/admin/keys/reload", reload_keys, methods=["POST"]),
    Route("/admin/abort", abort, methods=["POST"]),
    Route("/admin/drain", drain, methods=["POST"]),
    Route("/admin/resume", resume, methods=["POST"]),
    Route("/admin/settings", get_settings, methods=["GET"]),
    Route("/admin/settings", patch_settings, methods=["PATCH"]),
    Route("/admin/prefix_cache/reset", reset_prefix_cache, methods=["POST"]),
    Route("/admin/profile/start", start_profile, methods=["POST"]),
    Route("/admin/profile/stop", stop_profile, methods=["POST"]),
    Route("/admin/dashboard", grafana, methods=["GET"]),
]
