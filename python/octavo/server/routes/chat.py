"""POST /v1/chat/completions."""

from __future__ import annotations

import json
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.sampling_params import SamplingParams
from octavo.server.body import read_json
from octavo.server.chunks import CHAT, ChunkWriter, Piece
from octavo.server.context import ServerContext
from octavo.server.full import Choice, Collected, collect
from octavo.server.generation import Generation, Prompt
from octavo.server.logprobs import chat_entries, prompt_mappings
from octavo.server.schema.chat import ChatRequest, in_chat_words, parse_chat
from octavo.server.schema.sampling import StreamOptions
from octavo.server.sse import ClientGoneError, EventStream, while_connected


async def chat(request: Request) -> Response:
    """Answer chat messages, in one piece or streamed."""
    context = ServerContext.of(request)
    context.check_ready()
    body, size_bytes = await read_json(request)
    wanted, params = parse_chat(body, context.facts.default_sampling_params)
    model = context.check_model(wanted.model)
    with in_chat_words(wanted):
        token_ids = await context.run_text(_encode, context, wanted, size_bytes=size_bytes)
        generation = Generation(
            context, [Prompt(token_ids, None)], params, priority=wanted.priority, cache_salt=wanted.cache_salt
        )
    call_id = f"chatcmpl-{request.state.request_id}"
    if wanted.stream:
        return EventStream(_writer(context, wanted, params, generation, call_id, model).events(), generation.close)
    try:
        collected = await while_connected(request.receive, collect(generation))
    except ClientGoneError:
        return Response(status_code=499)
    finally:
        generation.close()
    return _answer(context, wanted, params, generation, collected, call_id, model)


def _encode(context: ServerContext, wanted: ChatRequest) -> list[int]:
    return context.encoder.encode_chat(wanted.messages, **wanted.template_options)


def _echoed(wanted: ChatRequest) -> str:
    """With `echo`, the text of a last message by the assistant, which the answer goes on with."""
    last = wanted.messages[-1]
    content = last.get("content")
    return content if wanted.echo and last["role"] == "assistant" and isinstance(content, str) else ""


def _writer(
    context: ServerContext,
    wanted: ChatRequest,
    params: SamplingParams,
    generation: Generation,
    call_id: str,
    model: str,
) -> ChunkWriter:
    def logprobs_of(choice: int, delta: Piece) -> Any:
        return {"content": chat_entries(context.token_names, delta.logprobs or ()), "refusal": None}

    echoed = _echoed(wanted)
    return ChunkWriter(
        CHAT,
        generation,
        id=call_id,
        created=int(time.time()),
        model=model,
        options=wanted.stream_options or StreamOptions(),
        logprobs_of=logprobs_of if params.logprobs is not None else None,
        echo=(lambda choice, delta: (echoed, None)) if echoed else None,
        return_token_ids=wanted.return_token_ids,
    )


def _answer(
    context: ServerContext,
    wanted: ChatRequest,
    params: SamplingParams,
    generation: Generation,
    collected: Collected,
    call_id: str,
    model: str,
) -> Response:
    names = context.token_names
    echoed = _echoed(wanted)

    def choice_object(index: int, choice: Choice) -> dict[str, Any]:
        content = None
        if params.logprobs is not None:
            content = {"content": chat_entries(names, choice.rows), "refusal": None}
        return {
            "index": index,
            "message": {"role": "assistant", "content": echoed + choice.text, "refusal": None},
            "logprobs": content,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **({"token_ids": choice.token_ids} if wanted.return_token_ids else {}),
        }

    answer: dict[str, Any] = {
        "id": call_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice_object(i, choice) for i, choice in enumerate(collected.choices)],
        "usage": generation.usage(),
    }
    if wanted.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_mappings(names, collected.prompt_rows.get(0, ()))
    if wanted.return_token_ids:
        answer["prompt_token_ids"] = generation.prompts[0].token_ids
    return Response(json.dumps(answer), media_type="application/json")


ROUTES = [Route("/v1/chat/completions", chat, methods=["POST"])]
