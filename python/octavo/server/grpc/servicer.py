"""The methods of `octavo.proto`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from octavo.errors import RequestError
from octavo.pooling.work import shortened
from octavo.server.context import ServerContext
from octavo.server.errors import ApiError
from octavo.server.generation import Generation
from octavo.server.grpc.calls import answering
from octavo.server.grpc.params import embedding_request, make_prompt, sampling_params
from octavo.server.grpc.protocol import compiled
from octavo.server.logprobs import finite
from octavo.server.pooling_call import PoolingCall
from octavo.server.schema.pooling import input_list
from octavo.server.tenants.caller import Caller

if TYPE_CHECKING:
    from octavo._core import Delta


class Servicer:
    """One for a server."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._messages, _ = compiled()
        self._live: dict[tuple[str, str], Generation] = {}
        """By tenant and request id: nobody ends somebody else's calls."""

    async def Generate(self, request: Any, call: grpc.aio.ServicerContext) -> None:  # noqa: N802
        """See `octavo.proto`. It writes and does not yield: a call that is cancelled while nobody reads ends
        here and now, not when a generator is collected."""
        context = self._context
        async with answering(context, call, request.request_id) as caller:
            context.check_task("generate")
            context.check_model(request.model or None)
            params = sampling_params(request.sampling_params, context.facts.default_sampling_params)
            prompt = await context.admit_text(make_prompt, context, request, size_bytes=request.ByteSize())
            key = (caller.tenant.name, caller.request_id)
            if key in self._live:
                raise RequestError(f"request_id {caller.request_id!r} is in use", param="request_id")
            generation = Generation(
                context, [prompt], params, priority=request.priority, cache_salt=request.cache_salt or None
            )
            self._live[key] = generation
            try:
                async for response in self._responses(generation, caller):
                    await call.write(response)
            except grpc.aio.InternalError:  # the client has gone, and gRPC did not say so yet
                return
            finally:
                self._live.pop(key)
                generation.close()

    async def _responses(self, generation: Generation, caller: Caller) -> AsyncIterator[Any]:
        messages = self._messages
        async for _, deltas in generation.batches():
            yield messages.GenerateResponse(
                request_id=caller.request_id, deltas=[self._delta(delta) for delta in deltas]
            )
        usage = messages.Usage(
            prompt_tokens=generation.num_prompt_tokens,
            completion_tokens=generation.num_output_tokens,
            cached_tokens=generation.num_cached_tokens,
        )
        yield messages.GenerateResponse(request_id=caller.request_id, usage=usage)

    def _delta(self, delta: Delta) -> Any:
        messages = self._messages
        return messages.SequenceDelta(
            index=delta.index,
            text=delta.text,
            token_ids=delta.token_ids,
            logprobs=[
                messages.TokenLogprobs(
                    tokens=[messages.TokenLogprob(token_id=token_id, logprob=finite(value)) for token_id, value in row]
                )
                for _, row in delta.logprobs or ()
            ],
            finish_reason=delta.finish_reason or "",
            stop_reason="" if delta.stop_reason is None else str(delta.stop_reason),
        )

    async def Embed(self, request: Any, call: grpc.aio.ServicerContext) -> Any:  # noqa: N802
        """See `octavo.proto`."""
        context = self._context
        async with answering(context, call):
            context.check_task("embed")
            context.check_model(request.model or None)
            wanted = embedding_request(request, context.pooling.num_outputs)
            work = partial(context.input_encoder.encode, truncate=wanted.truncate_prompt_tokens)
            inputs = await context.admit_text(work, input_list(wanted.input), size_bytes=request.ByteSize())
            pooling = PoolingCall(context, inputs)
            try:
                rows_nd = shortened(await pooling.run(), wanted.dimensions)
            finally:
                pooling.close()
            return self._messages.EmbedResponse(
                embeddings=[self._messages.Embedding(values=row) for row in rows_nd.tolist()],
                usage=self._messages.Usage(prompt_tokens=pooling.usage["prompt_tokens"]),
            )

    async def Abort(self, request: Any, call: grpc.aio.ServicerContext) -> Any:  # noqa: N802
        """See `octavo.proto`."""
        async with answering(self._context, call) as caller:
            generation = self._live.get((caller.tenant.name, request.request_id))
            if generation is not None:
                generation.cut(ApiError(499, "the call was aborted"))
            return self._messages.AbortResponse(found=generation is not None)

    async def ModelInfo(self, request: Any, call: grpc.aio.ServicerContext) -> Any:  # noqa: N802
        """See `octavo.proto`."""
        context = self._context
        async with answering(context, call):
            facts = context.facts
            return self._messages.ModelInfoResponse(
                names=context.names,
                vocab_size=facts.vocab_size,
                max_model_len=facts.max_model_len,
                eos_token_ids=facts.eos_token_ids,
                dtype=facts.dtype,
                device=facts.device,
                block_size=facts.block_size,
                num_blocks=facts.num_blocks,
                max_num_seqs=facts.max_num_seqs,
                has_tokenizer=context.llm.tokenizer is not None,
                has_chat_template=context.encoder.template.source is not None,
                task=facts.task,
            )

    async def Tokenize(self, request: Any, call: grpc.aio.ServicerContext) -> Any:  # noqa: N802
        """See `octavo.proto`."""
        context = self._context
        async with answering(context, call):
            if request.WhichOneof("prompt") == "text" and request.HasField("add_special_tokens"):
                token_ids = context.encoder.encode(request.text, add_special_tokens=request.add_special_tokens)
            else:
                prompt = await context.run_text(make_prompt, context, request, size_bytes=request.ByteSize())
                token_ids = prompt.token_ids
            return self._messages.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(self, request: Any, call: grpc.aio.ServicerContext) -> Any:  # noqa: N802
        """See `octavo.proto`."""
        context = self._context
        async with answering(context, call):
            tokenizer, vocab_size = context.llm.tokenizer, context.facts.vocab_size
            if tokenizer is None:
                raise RequestError("this model has no tokenizer", param="token_ids")
            wrong = next((token_id for token_id in request.token_ids if token_id >= vocab_size), None)
            if wrong is not None:
                raise RequestError(
                    f"token id {wrong} is not in the vocabulary (0 to {vocab_size - 1})", param="token_ids"
                )
            return self._messages.DetokenizeResponse(text=tokenizer.decode(list(request.token_ids), False))
