"""POST /v1/chat/completions."""

from __future__ import annotations

import json
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.server.body import read_json
from octavo.server.chat_chunks import ChatWriter
from octavo.server.context import ServerContext
from octavo.server.events import TurnMessage
from octavo.server.logprobs import chat_entries, prompt_mappings
from octavo.server.schema.chat import ChatRequest, parse_chat
from octavo.server.schema.sampling import StreamOptions
from octavo.server.schema.words import all_renamed, renamed
from octavo.server.sse import ClientGoneError, EventStream, while_connected
from octavo.server.turn import Turn, collect


async def chat(request: Request) -> Response:
    """Answer chat messages, in one piece or streamed."""
    context = ServerContext.of(request)
    context.check_task("generate")
    body, size_bytes = await read_json(request)
    wanted, turn_request = parse_chat(body, context.facts.default_sampling_params)
    model = context.check_model(wanted.model)
    with renamed(wanted.words):
        turn = await Turn.start(context, turn_request, size_bytes=size_bytes)
    answer = _Answer(context, wanted, turn, f"chatcmpl-{request.state.request_id}", model)
    if wanted.stream:
        return EventStream(all_renamed(answer.writer().sse(), wanted.constraint_words), turn.close)
    try:
        with renamed(wanted.constraint_words):
            messages = await while_connected(request.receive, collect(turn))
    except ClientGoneError:
        return Response(status_code=499)
    finally:
        turn.close()
    return Response(json.dumps(answer.whole(messages)), media_type="application/json")


class _Answer:
    """Writes the answer of one call."""

    def __init__(self, context: ServerContext, wanted: ChatRequest, turn: Turn, call_id: str, model: str) -> None:
        self._names = context.token_names
        self._wanted = wanted
        self._turn = turn
        self._id = call_id
        self._model = model
        self._created = int(time.time())
        self._has_logprobs = turn.request.params.logprobs is not None
        self._echoed = _echoed(wanted)

    def _logprobs(self, rows: Any) -> dict[str, Any]:
        return {"content": chat_entries(self._names, rows), "refusal": None}

    def writer(self) -> ChatWriter:
        """Of a streamed answer."""
        return ChatWriter(
            self._turn,
            id=self._id,
            created=self._created,
            model=self._model,
            options=self._wanted.stream_options or StreamOptions(),
            echoed=self._echoed,
            logprobs_of=self._logprobs if self._has_logprobs else None,
        )

    def whole(self, messages: list[TurnMessage]) -> dict[str, Any]:
        """The answer in one piece."""
        answer: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._choice(i, message) for i, message in enumerate(messages)],
            "usage": self._turn.usage(),
        }
        if self._wanted.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_mappings(self._names, self._turn.prompt_rows)
        if self._wanted.return_token_ids:
            answer["prompt_token_ids"] = self._turn.generation.prompts[0].token_ids
        return answer

    def _choice(self, index: int, message: TurnMessage) -> dict[str, Any]:
        return {
            "index": index,
            "message": self._message(message),
            "logprobs": self._logprobs(message.rows) if self._has_logprobs else None,
            "finish_reason": message.finish_reason,
            "stop_reason": message.stop_reason,
            **({"token_ids": message.token_ids} if self._wanted.return_token_ids else {}),
        }

    def _message(self, message: TurnMessage) -> dict[str, Any]:
        content = self._echoed + message.content
        out: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not message.tool_calls else None,
            "refusal": None,
        }
        if message.reasoning:
            out |= {"reasoning": message.reasoning, "reasoning_content": message.reasoning}
        if message.tool_calls:
            out["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.tool_calls
            ]
        return out


def _echoed(wanted: ChatRequest) -> str:
    """With `echo`, the text of a last message by the assistant, which the answer goes on with."""
    last = wanted.messages[-1]
    content = last.get("content")
    return content if wanted.echo and last["role"] == "assistant" and isinstance(content, str) else ""


ROUTES = [Route("/v1/chat/completions", chat, methods=["POST"])]
