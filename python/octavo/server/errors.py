"""Errors as HTTP answers: one table from exception class to status and type, and OpenAI's error body.

Callers of the Messages API get Anthropic's body instead (anthropic/errors.py), whoever made the error.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from octavo.errors import ConfigError, DeadlineError, EngineDeadError, ModelError, OverloadError, RequestError
from octavo.server.anthropic.errors import error_event, error_object, is_anthropic, status_of

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 1000


class ApiError(Exception):
    """An answer that is decided in the server itself."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


class UnavailableError(ApiError):
    """The server can't take requests now: it loads, drains, or its engine is being restarted."""

    def __init__(self, message: str, retry_after_s: float = 5.0) -> None:
        headers = {"Retry-After": str(max(1, round(retry_after_s)))}
        super().__init__(503, message, kind="service_unavailable", code="unavailable", headers=headers)


# Exception class -> (status, type, code). First match wins.
TABLE: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (RequestError, 400, "invalid_request_error", None),
    (DeadlineError, 503, "service_unavailable", "deadline"),
    (OverloadError, 429, "rate_limit_error", "overloaded"),
    (EngineDeadError, 503, "service_unavailable", "engine_dead"),
    (ConfigError, 400, "invalid_request_error", None),
    (ModelError, 400, "invalid_request_error", None),
)

# Statuses that the router itself raises -> (type, code, message).
ROUTER = {
    404: ("invalid_request_error", "unknown_url", "no such endpoint: {method} {path}"),
    405: ("invalid_request_error", "method_not_allowed", "{method} is not allowed here: {path}"),
}


def to_api_error(error: BaseException) -> ApiError:
    """The answer to an exception; an unknown one is logged and becomes a 500 that says nothing of the inside."""
    if isinstance(error, ApiError):
        return error
    for cls, status, kind, code in TABLE:
        if isinstance(error, cls):
            api = ApiError(
                status,
                str(error),
                kind=kind,
                param=getattr(error, "param", None),
                code=getattr(error, "code", None) or code,
            )
            if isinstance(error, OverloadError):
                api.headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
            return api
    logger.error("unexpected error while answering a request", exc_info=error)
    return ApiError(500, "the server made a mistake; its log says more", kind="internal_error", code="internal_error")


def message_of(error: ApiError) -> str:
    """The error's text, cut where it is absurdly long."""
    message = str(error)
    return message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "…"


def openai_object(error: ApiError) -> dict[str, object]:
    """OpenAI's error object, the value of `error` in its bodies."""
    return {"message": message_of(error), "type": error.kind, "param": error.param, "code": error.code}


def error_response(error: ApiError, scope: Scope) -> Response:
    """The whole answer, in the words of the API that the request speaks."""
    if is_anthropic(scope):
        status = status_of(error.status, error.code)
        body = error_object(status, message_of(error), _request_id(scope))
    else:
        status = error.status
        body = {"error": openai_object(error)}
    return Response(json.dumps(body), status, headers=error.headers, media_type="application/json")


def last_event(error: ApiError, scope: Scope) -> bytes:
    """The event that ends a stream which failed after its first event."""
    if is_anthropic(scope):
        return error_event(status_of(error.status, error.code), message_of(error), _request_id(scope))
    return b"data: " + json.dumps({"error": openai_object(error)}).encode() + b"\n\n"


def _request_id(scope: Scope) -> str | None:
    return scope.get("state", {}).get("request_id")  # type: ignore[no-any-return]


async def handle_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for everything that a route raises."""
    return error_response(to_api_error(error), request.scope)


async def handle_router_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)
    kind, code, text = ROUTER.get(error.status_code, ("invalid_request_error", None, error.detail))
    message = text.format(method=request.method, path=request.url.path[:200]) if code else text
    api = ApiError(error.status_code, message, kind=kind, code=code, headers=error.headers)
    return error_response(api, request.scope)
