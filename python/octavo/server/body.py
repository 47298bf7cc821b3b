"""Reads a request's JSON body, after asking whether it can be one."""

from __future__ import annotations

from typing import Any

from starlette.requests import ClientDisconnect, Request

from octavo.server.errors import ApiError
from octavo.server.schema.parse import load_json


def has_body(request: Request) -> bool:
    """Whether the head announces a body that is not empty."""
    return "transfer-encoding" in request.headers or request.headers.get("content-length", "0") != "0"


async def read_json(request: Request) -> tuple[dict[str, Any], int]:
    """(the body's object, its size in bytes). Errors: 415 for another kind of body, 400 for broken JSON."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            415,
            f"the body must be JSON: send the header 'Content-Type: application/json', not {kind[:80]!r}",
            code="unsupported_media_type",
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(
            415,
            f"bodies with Content-Encoding {encoding[:40]!r} are not read: send the body uncompressed",
            code="unsupported_media_type",
        )
    try:
        body = await request.body()
    except ClientDisconnect:
        raise ApiError(400, "the client left before its request was complete") from None
    return load_json(body), len(body)
