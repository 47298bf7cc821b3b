"""/v1/batches: make, list, show and cancel batches."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from octavo.server.body import read_json
from octavo.server.query import number
from octavo.server.routes.files import batches_of, listed
from octavo.server.schema.batches import parse_batch


async def create(request: Request) -> Response:
    """Run the requests of a file; the answer comes at once, the work follows."""
    batches, owner = batches_of(request)
    body, _ = await read_json(request)
    wanted = parse_batch(body, batches.endpoints)
    batch = await batches.table.create(
        owner=owner,
        endpoint=wanted.endpoint,
        input_file_id=wanted.input_file_id,
        window=wanted.completion_window,
        window_s=wanted.window_s,
        metadata=wanted.metadata,
        output_expires_s=wanted.output_expires_s,
    )
    batches.runner.take_up(batch.id)
    return JSONResponse(batch.shown())


async def list_batches(request: Request) -> Response:
    """The caller's batches, the newest first."""
    batches, owner = batches_of(request)
    limit = number(request, "limit", 20, 1, 100)
    page, has_more = await batches.table.page(owner, after=request.query_params.get("after"), limit=limit)
    return JSONResponse(listed([batch.shown() for batch in page], has_more))


async def get(request: Request) -> Response:
    """One batch as it is now."""
    batches, owner = batches_of(request)
    return JSONResponse((await batches.table.get(request.path_params["id"], owner)).shown())


async def cancel(request: Request) -> Response:
    """End a batch; requests that have their answer keep it."""
    batches, owner = batches_of(request)
    batch = await batches.table.begin_cancel(request.path_params["id"], owner)
    batches.runner.cancel(batch.id)
    return JSONResponse(batch.shown())


ROUTES = [
    Route("/v1/batches", create, methods=["POST"]),
    Route("/v1/batches", list_batches, methods=["GET"]),
    Route("/v1/batches/{id}", get, methods=["GET"]),
    Route("/v1/batches/{id}/cancel", cancel, methods=["POST"]),
]
