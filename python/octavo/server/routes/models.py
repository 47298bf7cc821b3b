"""GET /v1/models and /v1/models/{id}, /version."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import octavo
from octavo.server.anthropic.errors import is_anthropic
from octavo.server.context import ServerContext


def _card(request: Request, context: ServerContext, name: str) -> dict[str, Any]:
    """A model as OpenAI's clients read it, and for Anthropic's also as they do."""
    length = context.facts.max_model_len
    created = datetime.fromtimestamp(context.created, UTC).isoformat(timespec="seconds")
    theirs = {
        "type": "model",
        "display_name": name,
        "created_at": created.replace("+00:00", "Z"),
        "max_input_tokens": length,
        "max_tokens": length,
    }
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "octavo",
        "root": context.facts.model,
        "parent": None,
        "max_model_len": length,
        **(theirs if is_anthropic(request.scope) else {}),
    }


async def list_models(request: Request) -> JSONResponse:
    """The served names."""
    context = ServerContext.of(request)
    context.check_ready()
    data = [_card(request, context, name) for name in context.names]
    page = {"has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}
    return JSONResponse({"object": "list", "data": data, **(page if is_anthropic(request.scope) else {})})


async def get_model(request: Request) -> JSONResponse:
    """One served name; 404 for another."""
    context = ServerContext.of(request)
    if not request.path_params["name"]:
        return await list_models(request)  # other paths with a slash too many are redirected
    context.check_ready()
    name = context.check_model(request.path_params["name"])
    return JSONResponse(_card(request, context, name))


async def version(request: Request) -> JSONResponse:
    """Octavo's version."""
    return JSONResponse({"version": octavo.__version__})


ROUTES = [
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{name:path}", get_model, methods=["GET"]),
    Route("/version", version, methods=["GET"]),
]
