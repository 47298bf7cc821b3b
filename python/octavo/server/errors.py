"""Errors as HTTP answers: one table from exception class to status and type, and the OpenAI error body."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import ConfigError, EngineDeadError, ModelError, OverloadError, RequestError

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


def error_body(error: ApiError) -> bytes:
    """OpenAI's error object as JSON."""
    message = str(error)
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + "…"
    inner = {"message": message, "type": error.kind, "param": error.param, "code": error.code}
    return json.dumps({"error": inner}).encode()


def error_response(error: ApiError) -> Response:
    return Response(error_body(error), error.status, headers=error.headers, media_type="application/json")


async def handle_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for everything that a route raises."""
    return error_response(to_api_error(error))


async def handle_router_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    kind, code, text = ROUTER.get(error.status_code, ("invalid_request_error", None, error.detail))
    message = text.format(method=request.method, path=request.url.path[:200]) if code else text
    return error_response(ApiError(error.status_code, message, kind=kind, code=code, headers=error.headers))
