"""POST /v1/messages and /v1/messages/count_tokens: the Messages API in Anthropic's shape."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from octavo.server.anthropic.answer import MessageWriter
from octavo.server.body import read_json
from octavo.server.context import ServerContext
from octavo.server.schema.messages import parse_count, parse_messages
from octavo.server.schema.words import renamed
from octavo.server.sse import ClientGoneError, EventStream, while_connected
from octavo.server.turn import Turn, prompt_token_ids


async def messages(request: Request) -> Response:
    """Answer a conversation, in one piece or streamed."""
    context = ServerContext.of(request)
    context.check_task("generate")
    body, size_bytes = await read_json(request)
    wanted, turn_request = parse_messages(body, context.facts.default_sampling_params)
    model = context.check_model(wanted.model)
    with renamed(wanted.words):
        turn = await Turn.start(context, turn_request, size_bytes=size_bytes)
    writer = MessageWriter(
        turn,
        id=f"msg_{request.state.request_id}",
        model=model,
        max_tokens=wanted.max_tokens,
        shows_thinking=wanted.shows_thinking,
        words=wanted.words,
    )
    if wanted.stream:
        return EventStream(writer.sse(), turn.close)
    try:
        return JSONResponse(await while_connected(request.receive, writer.message()))
    except ClientGoneError:
        return Response(status_code=499)
    finally:
        turn.close()


async def count_tokens(request: Request) -> Response:
    """Length of the prompt that `messages` would run."""
    context = ServerContext.of(request)
    context.check_task("generate")
    body, size_bytes = await read_json(request)
    wanted, turn_request = parse_count(body)
    context.check_model(wanted.model)
    token_ids = await prompt_token_ids(context, turn_request, size_bytes=size_bytes)
    return JSONResponse({"input_tokens": len(token_ids)})


ROUTES = [
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]
