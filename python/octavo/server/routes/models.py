"""GET /v1/models and /v1/models/{id}, /version."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import octavo
from octavo.server.context import ServerContext


def _card(context: ServerContext, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "octavo",
        "root": context.facts.model,
        "parent": None,
        "max_model_len": context.facts.max_model_len,
    }


async def list_models(request: Request) -> JSONResponse:
    """The served names."""
    context = ServerContext.of(request)
    context.check_ready()
    return JSONResponse({"object": "list", "data": [_card(context, name) for name in context.names]})


async def get_model(request: Request) -> JSONResponse:
    """One served name; 404 for another."""
    context = ServerContext.of(request)
    if not request.path_params["name"]:
        return await list_models(request)  # other paths with a slash too many are redirected
    context.check_ready()
    name = context.check_model(request.path_params["name"])
    return JSONResponse(_card(context, name))


async def version(request: Request) -> JSONResponse:
    """Octavo's version."""
    return JSONResponse({"version": octavo.__version__})


ROUTES = [
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{name:path}", get_model, methods=["GET"]),
    Route("/version", version, methods=["GET"]),
]
