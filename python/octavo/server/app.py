"""The HTTP application: routes as data around one engine. Not here: the process that serves it (service.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from octavo.config import ServerConfig
from octavo.errors import OctavoError
from octavo.server.context import ServerContext
from octavo.server.errors import ApiError, handle_error, handle_router_error
from octavo.server.middleware import Gate
from octavo.server.routes import chat, completions, health, messages, models, responses, tokenize

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM

ROUTES = [
    *chat.ROUTES,
    *completions.ROUTES,
    *messages.ROUTES,
    *responses.ROUTES,
    *models.ROUTES,
    *health.ROUTES,
    *tokenize.ROUTES,
]


def make_app(llm: AsyncLLM, config: ServerConfig) -> Starlette:
    """An app over an engine, which may still be starting. `app.state.context` is its `ServerContext`."""
    context = ServerContext(llm, config)
    gate = Middleware(
        Gate,
        keyring=context.keyring,
        max_body_bytes=config.max_body_bytes,
        metrics=context.metrics,
        paths=[route.path for route in ROUTES],
    )
    app = Starlette(
        routes=ROUTES,
        middleware=[gate],
        exception_handlers={
            HTTPException: handle_router_error,
            ApiError: handle_error,
            OctavoError: handle_error,
            Exception: handle_error,
        },
    )
    app.state.context = context
    return app
