"""The HTTP applications: routes as data around one engine, the API's and the operator's.

Not here: the process that serves them (service.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo import envs
from octavo.config import ServerConfig
from octavo.errors import OctavoError
from octavo.server.batch.service import Batches
from octavo.server.context import ServerContext
from octavo.server.errors import ApiError, handle_error, handle_router_error
from octavo.server.middleware import BodyLimit, Gate
from octavo.server.routes import (
    admin,
    batches,
    chat,
    classify,
    completions,
    embeddings,
    files,
    health,
    messages,
    models,
    openapi,
    responses,
    scores,
    tokenize,
)
from octavo.server.tenants.keyring import Keyring

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM

ROUTES = [
    *chat.ROUTES,
    *completions.ROUTES,
    *messages.ROUTES,
    *responses.ROUTES,
    *embeddings.ROUTES,
    *scores.ROUTES,
    *classify.ROUTES,
    *files.ROUTES,
    *batches.ROUTES,
    *models.ROUTES,
    *health.ROUTES,
    *tokenize.ROUTES,
    *openapi.ROUTES,
]

# What requests of a batch may call.
BATCHED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
FORM_BYTES = 64 * 1024
"""What an upload's form holds beside the file."""
# Any other exception is answered by the gate.
HANDLERS = {
    HTTPException: handle_router_error,
    ApiError: handle_error,
    OctavoError: handle_error,
}


def make_app(llm: AsyncLLM, config: ServerConfig) -> Starlette:
    """An app over an engine, which may still be starting.

    `app.state.context` is its `ServerContext`, `app.state.batches` its `Batches` (None without --batch-dir).
    """
    context = ServerContext(llm, config)
    batches = None if config.batch_dir is None else _batches(context, Path(config.batch_dir))
    app = _build(context, ROUTES, context.keyring, _pages(config.allowed_origins))
    app.state.batches = batches
    return app


def _pages(origins: Sequence[str]) -> list[Middleware]:
    """Answers to browsers that ask whether a page may call: in front of the gate, as they show no key then."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=("*",),
        )
    ]


def _batches(context: ServerContext, folder: Path) -> Batches:
    """Batches call the endpoints within this process, behind the gate: their owners have shown their keys."""
    routes = [route for route in ROUTES if route.path in BATCHED]
    inner = Starlette(routes=routes, exception_handlers=HANDLERS)
    inner.state.context = context
    return Batches(context, folder, inner, [route.path for route in routes])


def make_admin_app(context: ServerContext) -> Starlette | None:
    """The routes for who runs the server, behind their own key; None when there is none."""
    key = context.config.admin_key or envs.admin_key()
    return None if key is None else _build(context, [*admin.ROUTES, *openapi.ADMIN_ROUTES], Keyring([key]))


def _build(
    context: ServerContext, routes: Sequence[Route], keyring: Keyring, before: Sequence[Middleware] = ()
) -> Starlette:
    config = context.config
    upload_limit = BodyLimit(config.batch_max_file_bytes + FORM_BYTES, "--batch-max-file-bytes")
    gate = Middleware(
        Gate,
        keyring=keyring,
        body_limit=BodyLimit(config.max_body_bytes, "--max-body-bytes"),
        metrics=context.metrics,
        routes=routes,
        body_limits={"/v1/files": upload_limit} if config.batch_dir is not None else {},
    )
    app = Starlette(routes=routes, middleware=[*before, gate], exception_handlers=HANDLERS)
    app.state.context = context
    return app


def beside(public: ASGIApp, private: ASGIApp) -> ASGIApp:
    """Both apps on one port. Only exact /admin/ paths reach the private one, and the public one has no such routes."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        is_private = scope["type"] == "http" and scope["path"].startswith("/admin/")
        await (private if is_private else public)(scope, receive, send)

    return app
