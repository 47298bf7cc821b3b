"""Anthropic's error object: which requests get it, and how an error is said in it."""

from __future__ import annotations

import json
from typing import Any

from starlette.types import Scope

# Status -> error type; others: invalid_request_error below 500, api_error from there.
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    431: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
PREFIX = "/v1/messages"
VERSION_HEADER = b"anthropic-version"


def is_anthropic(scope: Scope) -> bool:
    """Whether the caller speaks the Messages API: by the route, or by the header that its clients always send."""
    path: str = scope["path"]
    if path == PREFIX or path.startswith(PREFIX + "/"):
        return True
    return any(name == VERSION_HEADER for name, _ in scope.get("headers", ()))


def status_of(status: int, code: str | None) -> int:
    """A full queue is "overloaded" (529) here; 429 is left for the limits of a key."""
    return 529 if status == 429 and code == "overloaded" else status


def error_object(status: int, message: str, request_id: str | None) -> dict[str, Any]:
    """The body of an error answer of that status, and the data of a stream's `error` event."""
    kind = TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def error_event(status: int, message: str, request_id: str | None) -> bytes:
    """The last event of a stream that failed."""
    return b"event: error\ndata: " + json.dumps(error_object(status, message, request_id)).encode() + b"\n\n"
