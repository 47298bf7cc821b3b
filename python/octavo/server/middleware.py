"""The gate in front of all routes, one pure ASGI middleware: request ids, API keys, body sizes, counts of answers."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.anthropic.errors import is_anthropic
from octavo.server.errors import ApiError, error_response
from octavo.server.metrics import ServerMetrics

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
OPEN_PATHS = frozenset({"/health"})


class Gate:
    """Wraps the app.

    Args:
        keys: API keys; empty lets everybody in.
        max_body_bytes: Larger bodies get 413, at the latest while they are read.
        paths: Known paths, the labels of the response counter.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Sequence[str],
        max_body_bytes: int,
        metrics: ServerMetrics,
        paths: Collection[str],
    ) -> None:
        self._app = app
        self._key_hashes = [_digest(key.encode()) for key in keys]
        self._max_body_bytes = max_body_bytes
        self._metrics = metrics
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        path = scope["path"]
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        scope.setdefault("state", {})["request_id"] = request_id
        extra = [(b"x-request-id", request_id.encode())]
        if is_anthropic(scope):
            extra.append((b"request-id", request_id.encode()))
        label = path if path in self._paths else "other"

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *extra]
                self._metrics.count_response(label, message["status"])
            await send(message)

        refusal = self._refusal(headers, path)
        if refusal is not None:
            await error_response(refusal, scope)(scope, receive, answer)
            return
        await self._app(scope, self._limited(receive), answer)

    def _refusal(self, headers: Headers, path: str) -> ApiError | None:
        if self._key_hashes and path not in OPEN_PATHS and not self._knows(headers):
            return ApiError(
                401,
                "wrong or missing API key: send the header 'Authorization: Bearer KEY' (or 'x-api-key: KEY')",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length[:20]) > self._max_body_bytes:
            return self._too_large()
        return None

    def _knows(self, headers: Headers) -> bool:
        """Compares with every key in constant time."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        bearer = token if scheme.lower() == "bearer" else ""
        given = [_digest(key.strip().encode()) for key in (bearer, headers.get("x-api-key", ""))]
        matches = [hmac.compare_digest(key, known) for key in given for known in self._key_hashes]
        return any(matches)

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the body has more than {self._max_body_bytes} bytes (--max-body-bytes)", code="body_too_large"
        )

    def _limited(self, receive: Receive) -> Receive:
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            if message["type"] == "http.request":
                size += len(message.get("body", b""))
                if size > self._max_body_bytes:
                    raise self._too_large()
            return message

        return limited


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()
