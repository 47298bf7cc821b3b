"""/v1/files: upload, list, show, fetch and delete the files of batches."""

from __future__ import annotations

from typing import Any

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from octavo.errors import RequestError
from octavo.server.batch.service import Batches
from octavo.server.errors import ApiError
from octavo.server.query import ascending, number
from octavo.server.schema.batches import parse_expiry
from octavo.server.tenants import caller

DEFAULT_EXPIRES_S = 30 * 24 * 3600
MAX_NAME_CHARS = 255


def batches_of(request: Request) -> tuple[Batches, str]:
    """The server's batches, and whose files and batches the call sees. 404 when there are none."""
    batches: Batches | None = request.app.state.batches
    if batches is None:
        raise ApiError(404, "files and batches are off (start with --batch-dir FOLDER)", code="batches_off")
    return batches, caller.current().tenant.name


async def upload(request: Request) -> Response:
    """Store a JSONL file for a batch."""
    batches, owner = batches_of(request)
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise ApiError(415, "the body must be multipart/form-data", code="unsupported_media_type")
    try:
        async with request.form(max_files=1, max_fields=8, max_part_size=4096) as form:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise RequestError("file is required", param="file")
            if form.get("purpose") != "batch":
                raise RequestError('purpose must be "batch": other files are not used here', param="purpose")
            fields: dict[str, Any] = {name: form.get(f"expires_after[{name}]") for name in ("anchor", "seconds")}
            expires_s = parse_expiry(**fields)
            made = await batches.files.add(
                file.file,
                owner=owner,
                filename=(file.filename or "upload.jsonl")[:MAX_NAME_CHARS],
                purpose="batch",
                expires_s=DEFAULT_EXPIRES_S if expires_s is None else expires_s,
            )
    except (MultiPartException, ClientDisconnect) as error:
        raise RequestError(f"the body is no multipart form: {error}", code="invalid_form") from error
    return JSONResponse(made)


async def list_files(request: Request) -> Response:
    """The caller's files."""
    batches, owner = batches_of(request)
    page, has_more = await batches.files.page(
        owner,
        after=request.query_params.get("after"),
        limit=number(request, "limit", 10_000, 1, 10_000),
        ascending=ascending(request),
        purpose=request.query_params.get("purpose"),
    )
    return JSONResponse(listed(page, has_more))


def listed(page: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """OpenAI's list object."""
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return {"object": "list", "data": page, **ends, "has_more": has_more}


async def get(request: Request) -> Response:
    """One file's object."""
    batches, owner = batches_of(request)
    return JSONResponse(await batches.files.get(request.path_params["id"], owner))


async def content(request: Request) -> Response:
    """One file's bytes."""
    batches, owner = batches_of(request)
    name = request.path_params["id"]
    length = (await batches.files.get(name, owner))["bytes"]
    headers = {"content-length": str(length)}
    pieces = batches.files.content(name, owner)
    return StreamingResponse(pieces, media_type="application/octet-stream", headers=headers)


async def delete(request: Request) -> Response:
    """Forget a file; a batch that has read it goes on."""
    batches, owner = batches_of(request)
    name = request.path_params["id"]
    await batches.files.delete(name, owner)
    return JSONResponse({"id": name, "object": "file", "deleted": True})


ROUTES = [
    Route("/v1/files", upload, methods=["POST"]),
    Route("/v1/files", list_files, methods=["GET"]),
    Route("/v1/files/{id}", get, methods=["GET"]),
    Route("/v1/files/{id}", delete, methods=["DELETE"]),
    Route("/v1/files/{id}/content", content, methods=["GET"]),
]
