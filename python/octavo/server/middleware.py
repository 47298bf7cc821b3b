"""The gate in front of all routes, one pure ASGI middleware: request ids, keys, limits of tenants, body sizes, counts.

What it lets through is decided by exact paths, so that no other spelling of a path gets around it: everything but
`OPEN_PATHS` needs a key once there are any. Not here: what tenants may do (tenants/).
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.anthropic.errors import is_anthropic
from octavo.server.errors import ApiError, error_response, to_api_error
from octavo.server.metrics import ServerMetrics
from octavo.server.tenants.caller import Caller, calling
from octavo.server.tenants.keyring import Keyring

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
OPEN_PATHS = frozenset({"/health", "/ready"})
# Calls with these methods do work: they count against a tenant's limits.
COUNTED_METHODS = frozenset({"POST"})


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """The longest body, and the flag that sets it."""

    num_bytes: int
    flag: str


class Gate:
    """Wraps the app.

    Args:
        keyring: Who may call.
        body_limit: Larger bodies get 413, at the latest while they are read.
        routes: What the app serves: their paths are the labels of the response counter.
        body_limits: Paths whose bodies have a bound of their own.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keyring: Keyring,
        body_limit: BodyLimit,
        metrics: ServerMetrics,
        routes: Iterable[Route],
        body_limits: Mapping[str, BodyLimit],
    ) -> None:
        self._app = app
        self._keyring = keyring
        self._body_limit = body_limit
        self._metrics = metrics
        self._labels: dict[object, str] = {route.endpoint: route.path for route in routes}
        self._body_limits = body_limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # nothing else is served, and nothing else is let through
        headers = Headers(scope=scope)
        path = scope["path"]
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        scope.setdefault("state", {})["request_id"] = request_id
        extra = [(b"x-request-id", request_id.encode())]
        if is_anthropic(scope):
            extra.append((b"request-id", request_id.encode()))
        tenant = self._keyring.find(headers)
        counts = tenant is not None and scope["method"] in COUNTED_METHODS
        caller = Caller(tenant or self._keyring.everybody, request_id, headers.get("traceparent"), counts=counts)
        has_begun = False

        async def answer(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                limits = caller.tenant.headers(anthropic=is_anthropic(scope)) if counts else []
                message["headers"] = [*message.get("headers", ()), *extra, *limits, *caller.timing_headers()]
                self._metrics.count_response(self._labels.get(scope.get("endpoint"), "other"), message["status"])
            await send(message)

        with calling(caller):
            try:
                if tenant is None and path not in OPEN_PATHS:
                    raise _wrong_key()
                most = self._body_limits.get(path, self._body_limit)
                length = headers.get("content-length", "0")
                if length.isdecimal() and int(length[:20]) > most.num_bytes:
                    raise _too_large(most)
                if counts:
                    await self._counted(caller, scope, _limited(receive, most), answer)
                else:
                    await self._app(scope, _limited(receive, most), answer)
            except asyncio.CancelledError:
                return  # only a server that ends cancels its handlers, after it has hung up on their clients
            except Exception as error:
                if has_begun:
                    raise
                await error_response(to_api_error(error), scope)(scope, receive, answer)

    async def _counted(self, caller: Caller, scope: Scope, receive: Receive, answer: Send) -> None:
        """A call within its tenant's limits, from its arrival to the last byte of its answer."""
        caller.tenant.enter()
        caller.hold()
        try:
            await self._app(scope, receive, answer)
        finally:
            caller.release()


def _too_large(most: BodyLimit) -> ApiError:
    return ApiError(413, f"the body has more than {most.num_bytes} bytes ({most.flag})", code="body_too_large")


def _limited(receive: Receive, most: BodyLimit) -> Receive:
    """What `receive` gives, up to a limit; then 413."""
    size = 0

    async def limited() -> Message:
        nonlocal size
        message = await receive()
        if message["type"] == "http.request":
            size += len(message.get("body", b""))
            if size > most.num_bytes:
                raise _too_large(most)
        return message

    return limited


def _wrong_key() -> ApiError:
    return ApiError(
        401,
        "wrong or missing API key: send the header 'Authorization: Bearer KEY' (or 'x-api-key: KEY')",
        kind="authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
