"""POST /v1/responses and what can be done with a kept response: get, follow, list its input, cancel, delete."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from octavo.errors import RequestError
from octavo.server.body import read_json
from octavo.server.context import ServerContext
from octavo.server.errors import ApiError
from octavo.server.query import ascending, number
from octavo.server.responses.answer import ResponseWriter, new_response
from octavo.server.responses.items import normal_items, to_chat
from octavo.server.responses.mcp import ServerTools, parse_uses
from octavo.server.responses.run import ResponseRun, in_background
from octavo.server.responses.store import EventLog, Kept
from octavo.server.responses.tools import Toolbox, add_functions
from octavo.server.schema.responses import ResponsesRequest, parse_responses
from octavo.server.sse import ClientGoneError, EventStream, while_connected
from octavo.server.tenants import caller

MAX_PAGE = 100


@dataclass(slots=True)
class _Asked:
    """A checked request and the run that will answer it."""

    wanted: ResponsesRequest
    run: ResponseRun
    kept: Kept
    is_kept: bool


async def _read(request: Request, context: ServerContext) -> _Asked:
    context.check_task("generate")
    body, size_bytes = await read_json(request)
    wanted, params = parse_responses(body, context.facts.default_sampling_params)
    model = context.check_model(wanted.model)
    is_kept = _stores(context, wanted)
    owner = caller.current().tenant.name
    items = [*_items_before(context, wanted, owner), *normal_items(wanted.input)]
    box = Toolbox()
    add_functions(box, wanted.tools or [])
    to_chat(wanted.instructions, items)  # finds what is wrong with them before anything is done
    tools = ServerTools(context.tool_servers, parse_uses(wanted.tools or [], context.tool_servers))
    response = new_response(wanted, params, box, model=model, store=is_kept)
    writer = ResponseWriter(
        context,
        response,
        logprobs=wanted.wants_logprobs,
        seals_reasoning=wanted.seals_reasoning,
        custom=box.custom,
    )
    run = ResponseRun(context, wanted, params, items, box, tools, writer, size_bytes=size_bytes)
    return _Asked(wanted, run, Kept(response, items, owner), is_kept)


async def create(request: Request) -> Response:
    """Answer, in one piece, streamed, or in the background."""
    context = ServerContext.of(request)
    asked = await _read(request, context)
    run, kept = asked.run, asked.kept
    if asked.wanted.background:
        return await _start_in_background(context, run, kept, stream=asked.wanted.stream)
    try:
        await while_connected(request.receive, run.start())
    except ClientGoneError:
        run.close()
        return Response(status_code=499)
    except BaseException:
        run.close()
        raise

    def end() -> None:
        run.close()
        if asked.is_kept and kept.response["status"] != "in_progress":  # else the client left, or got an error
            context.responses.offer(kept)

    if asked.wanted.stream:
        return EventStream(run.sse(), end)
    try:
        return JSONResponse(await while_connected(request.receive, run.response()))
    except ClientGoneError:
        return Response(status_code=499)
    finally:
        end()


async def count_input(request: Request) -> Response:
    """Number of tokens that `create` would read, lists of server tools included."""
    asked = await _read(request, ServerContext.of(request))
    try:
        num_tokens = await asked.run.count_input()
    finally:
        asked.run.close()
    return JSONResponse({"object": "response.input_tokens", "input_tokens": num_tokens})


def _stores(context: ServerContext, wanted: ResponsesRequest) -> bool:
    """Whether the response is kept. 400 for what needs it on a server that keeps none."""
    if context.responses.on:
        return wanted.store is not False
    needs = {
        "store": wanted.store is True,
        "background": wanted.background,
        "previous_response_id": wanted.previous_response_id is not None,
    }
    for name, needed in needs.items():
        if needed:
            message = f"{name}: this server keeps no responses (start it with --responses-store N)"
            raise RequestError(message, param=name, code="unsupported")
    return False


def _items_before(context: ServerContext, wanted: ResponsesRequest, owner: str) -> list[dict[str, Any]]:
    """Input and output of the response that this one follows."""
    if wanted.previous_response_id is None:
        return []
    try:
        before = context.responses.get(wanted.previous_response_id, owner)
    except ApiError as error:
        raise ApiError(400, str(error), param="previous_response_id", code="previous_response_not_found") from None
    if before.running:
        raise RequestError("the previous response has not ended yet", param="previous_response_id")
    return [*before.input_items, *before.response["output"]]


async def _start_in_background(context: ServerContext, run: ResponseRun, kept: Kept, *, stream: bool) -> Response:
    kept.log = EventLog()
    context.responses.add(kept)
    started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    kept.task = asyncio.create_task(in_background(run, context, kept, started))
    accepted = dict(kept.response)
    try:
        await asyncio.shield(started)  # the work goes on when the caller is gone
    except Exception:
        context.responses.delete(kept.response["id"], kept.owner)
        raise
    if stream:
        return EventStream(kept.log.follow(-1), lambda: None)
    return JSONResponse(accepted)


def _kept(request: Request) -> tuple[ServerContext, Kept]:
    context = ServerContext.of(request)
    return context, context.responses.get(request.path_params["id"], caller.current().tenant.name)


async def get(request: Request) -> Response:
    """A kept response; with `stream=true` its events from the beginning, or after `starting_after`."""
    _, kept = _kept(request)
    if request.query_params.get("stream") != "true":
        return JSONResponse(kept.response)
    if kept.log is None:
        raise RequestError("only responses made with background: true can be streamed again", param="stream")
    after = number(request, "starting_after", -1, -1, 2**53)
    return EventStream(kept.log.follow(after), lambda: None)


async def cancel(request: Request) -> Response:
    """End a background response; one that has ended stays as it is."""
    _, kept = _kept(request)
    if kept.task is None:
        raise RequestError("only responses made with background: true can be cancelled", param="response_id")
    if kept.running:
        kept.task.cancel()
        await asyncio.wait({kept.task})
    return JSONResponse(kept.response)


async def delete(request: Request) -> Response:
    """Forget a response."""
    context, kept = _kept(request)
    name = kept.response["id"]
    context.responses.delete(name, caller.current().tenant.name)
    return JSONResponse({"id": name, "object": "response", "deleted": True})


async def input_items(request: Request) -> Response:
    """The items that a kept response answered, with those of the responses before it."""
    _, kept = _kept(request)
    limit = number(request, "limit", 20, 1, MAX_PAGE)
    items = kept.input_items if ascending(request) else kept.input_items[::-1]
    after = request.query_params.get("after")
    if after is not None:
        at = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise RequestError(f"after: no item {after[:80]!r}", param="after")
        items = items[at + 1 :]
    page = items[:limit]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return JSONResponse({"object": "list", "data": page, **ends, "has_more": len(items) > limit})


ROUTES = [
    Route("/v1/responses", create, methods=["POST"]),
    Route("/v1/responses/input_tokens", count_input, methods=["POST"]),
    Route("/v1/responses/{id}", get, methods=["GET"]),
    Route("/v1/responses/{id}", delete, methods=["DELETE"]),
    Route("/v1/responses/{id}/cancel", cancel, methods=["POST"]),
    Route("/v1/responses/{id}/input_items", input_items, methods=["GET"]),
]
