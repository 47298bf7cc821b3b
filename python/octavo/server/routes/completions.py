"""POST /v1/completions."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.sampling_params import SamplingParams
from octavo.server.body import read_json
from octavo.server.chunks import ChunkWriter, Piece
from octavo.server.context import ServerContext
from octavo.server.full import Choice, Collected, collect
from octavo.server.generation import Generation
from octavo.server.logprobs import CompletionLogprobs, Row, prompt_mappings
from octavo.server.prompt import Prompt
from octavo.server.schema.completions import CompletionRequest, parse_completion
from octavo.server.schema.sampling import StreamOptions
from octavo.server.schema.words import all_renamed, renamed
from octavo.server.sse import ClientGoneError, EventStream, while_connected
from octavo.server.tenants import caller


async def completions(request: Request) -> Response:
    """Continue prompts, in one piece or streamed."""
    context = ServerContext.of(request)
    context.check_task("generate")
    body, size_bytes = await read_json(request)
    wanted, params = parse_completion(body, context.facts.default_sampling_params)
    model = context.check_model(wanted.model)
    prompts = await context.admit_text(_encode, context, wanted, size_bytes=size_bytes)
    if wanted.max_tokens is None:
        params = _within_context(context, prompts, params)
    generation = Generation(context, prompts, params, priority=wanted.priority, cache_salt=wanted.cache_salt)
    answer = _Answer(context, wanted, params, generation, f"cmpl-{request.state.request_id}", model)
    if wanted.stream:
        return EventStream(all_renamed(answer.writer().events(), wanted.constraint_words), generation.close)
    try:
        with renamed(wanted.constraint_words):
            collected = await while_connected(request.receive, collect(generation))
    except ClientGoneError:
        return Response(status_code=499)
    finally:
        generation.close()
    return answer.full(collected)


def _encode(context: ServerContext, wanted: CompletionRequest) -> list[Prompt]:
    encoder = context.encoder
    tokenizer = encoder.tokenizer

    def one(prompt: str | list[int]) -> Prompt:
        if isinstance(prompt, str):
            return Prompt(encoder.encode(prompt, add_special_tokens=wanted.add_special_tokens), prompt)
        return Prompt(prompt, None)

    prompts = [one(prompt) for prompt in wanted.prompts]
    if wanted.echo and tokenizer is not None:
        vocab_size = context.facts.vocab_size
        for i, prompt in enumerate(prompts):
            if prompt.text is None and all(0 <= token_id < vocab_size for token_id in prompt.token_ids):
                prompts[i] = replace(prompt, text=tokenizer.decode(prompt.token_ids, False))
    return prompts


def _within_context(context: ServerContext, prompts: list[Prompt], params: SamplingParams) -> SamplingParams:
    """The default number of tokens, or what the longest prompt leaves of the context, or what the tenant may have."""
    room = context.facts.max_model_len - max(len(prompt.token_ids) for prompt in prompts)
    room = min(room, caller.current().tenant.spec.max_tokens or room)
    assert params.max_tokens is not None
    return replace(params, max_tokens=room) if max(params.min_tokens, 1) <= room < params.max_tokens else params


class _Answer:
    """Writes the answer of one call."""

    def __init__(
        self,
        context: ServerContext,
        wanted: CompletionRequest,
        params: SamplingParams,
        generation: Generation,
        call_id: str,
        model: str,
    ) -> None:
        self._names = context.token_names
        self._wanted = wanted
        self._params = params
        self._generation = generation
        self._id = call_id
        self._model = model
        self._created = int(time.time())

    def writer(self) -> ChunkWriter:
        """Of a streamed answer."""
        wanted, params, n = self._wanted, self._params, self._generation.n
        with_logprobs = params.logprobs is not None
        builders = [CompletionLogprobs(self._names) for _ in range(self._generation.num_choices)]
        num_top = params.logprobs or 0

        def logprobs_of(choice: int, delta: Piece) -> Any:
            builders[choice].add(delta.logprobs or (), num_top=num_top)
            return builders[choice].take()

        def echo_of(choice: int, delta: Piece) -> tuple[str, Any]:
            prompt = self._generation.prompts[choice // n]
            if not with_logprobs:
                return prompt.text or "", None
            self._add_prompt(builders[choice], prompt, delta.prompt_logprobs or ())
            return prompt.text or "", builders[choice].take()

        return ChunkWriter(
            self._generation,
            id=self._id,
            created=self._created,
            model=self._model,
            options=wanted.stream_options or StreamOptions(),
            logprobs_of=logprobs_of if with_logprobs else None,
            echo=echo_of if wanted.echo else None,
            return_token_ids=wanted.return_token_ids,
        )

    def _add_prompt(self, builder: CompletionLogprobs, prompt: Prompt, rows: list[Row] | tuple[Row, ...]) -> None:
        builder.add_unscored(prompt.token_ids[0])
        builder.add(rows, num_top=self._params.logprobs or 0)

    def full(self, collected: Collected) -> Response:
        """The whole answer."""
        n = self._generation.n
        num_output_tokens = None
        if self._wanted.scores_only:
            num_output_tokens = 0
            for choice in collected.choices:
                choice.text, choice.token_ids, choice.rows = "", [], []
                choice.finish_reason, choice.stop_reason = "length", None
        answer = {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [
                self._choice(i, choice, collected.prompt_rows.get(i // n, []))
                for i, choice in enumerate(collected.choices)
            ],
            "usage": self._generation.usage(num_output_tokens=num_output_tokens),
        }
        return Response(json.dumps(answer), media_type="application/json")

    def _choice(self, index: int, choice: Choice, prompt_rows: list[Row]) -> dict[str, Any]:
        wanted, params = self._wanted, self._params
        prompt = self._generation.prompts[index // self._generation.n]
        logprobs = None
        if params.logprobs is not None:
            builder = CompletionLogprobs(self._names)
            if wanted.echo:
                self._add_prompt(builder, prompt, prompt_rows)
            builder.add(choice.rows, num_top=params.logprobs)
            logprobs = builder.take()
        out = {
            "index": index,
            "text": (prompt.text or "" if wanted.echo else "") + choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if wanted.prompt_logprobs is not None:
            out["prompt_logprobs"] = prompt_mappings(self._names, prompt_rows)
        if wanted.return_token_ids:
            out["token_ids"] = choice.token_ids
            out["prompt_token_ids"] = prompt.token_ids
        return out


ROUTES = [Route("/v1/completions", completions, methods=["POST"])]
