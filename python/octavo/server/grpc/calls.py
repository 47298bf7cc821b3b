"""What every gRPC call goes through: its key and tenant, its counts, and errors as gRPC statuses.

The same gate as HTTP's (middleware.py), in gRPC's words.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from starlette.datastructures import Headers

from octavo.server.context import ServerContext
from octavo.server.errors import ApiError, message_of, to_api_error
from octavo.server.tenants.caller import Caller, calling

STATUSES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
}
"""HTTP status -> gRPC's; any other is INTERNAL."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
OPEN_SERVICES = ("/grpc.health.v1.Health/",)


def headers_of(metadata: Any) -> Headers:
    """Metadata as headers; binary values are left out."""
    pairs = [(key, value) for key, value in metadata or () if isinstance(value, str)]
    return Headers(raw=[(key.lower().encode("latin-1"), value.encode("latin-1", "replace")) for key, value in pairs])


def wrong_key() -> ApiError:
    return ApiError(
        401, "wrong or missing API key: send the metadata 'authorization: Bearer KEY' (or 'x-api-key: KEY')"
    )


class KeyGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets nobody without a key past, but to the health service."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def intercept_service(self, continuation: Callable[..., Any], details: Any) -> Any:
        """See `grpc.aio.ServerInterceptor`."""
        is_open = details.method.startswith(OPEN_SERVICES)
        if is_open or self._context.keyring.find(headers_of(details.invocation_metadata)) is not None:
            return await continuation(details)

        async def refuse(request: Any, call: grpc.aio.ServicerContext) -> None:
            await abort(call, wrong_key())

        handler = await continuation(details)
        if handler is None:  # no such method
            return None
        return (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )(refuse)


async def abort(call: grpc.aio.ServicerContext, error: ApiError) -> None:
    """End the call with an error's status."""
    retry_after = error.headers.get("Retry-After")
    metadata = () if retry_after is None else (("retry-after", retry_after),)
    await call.abort(STATUSES.get(error.status, grpc.StatusCode.INTERNAL), message_of(error), metadata)


@asynccontextmanager
async def answering(
    context: ServerContext, call: grpc.aio.ServicerContext, request_id: str = ""
) -> AsyncIterator[Caller]:
    """A call of a tenant within its limits; what is raised inside becomes the call's status."""
    if request_id and not _REQUEST_ID.fullmatch(request_id):
        await abort(call, ApiError(400, "request_id must be 1 to 128 letters, digits, '.', '_', ':' or '-'"))
    headers = headers_of(call.invocation_metadata())
    tenant = context.keyring.find(headers) or context.keyring.everybody
    wanted = request_id or headers.get("x-request-id", "")
    caller = Caller(
        tenant,
        wanted if _REQUEST_ID.fullmatch(wanted) else secrets.token_hex(16),
        headers.get("traceparent"),
        counts=True,
    )
    with calling(caller):
        try:
            context.check_ready()
            tenant.enter()
            caller.hold()
            try:
                yield caller
            finally:
                caller.release()
        except Exception as error:
            if isinstance(error, grpc.aio.AbortError):
                raise
            await abort(call, to_api_error(error))
