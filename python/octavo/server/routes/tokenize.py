"""POST /tokenize and /detokenize."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from octavo._core import Tokenizer
from octavo.errors import RequestError
from octavo.server.body import read_json
from octavo.server.context import ServerContext
from octavo.server.images import TurnImages, extract
from octavo.server.schema.tokenize import DetokenizeRequest, TokenizeRequest, parse_tokenize
from octavo.server.schema.unknown import parse_body


async def tokenize(request: Request) -> JSONResponse:
    """Ids of a prompt or of chat messages, as the other endpoints would make them."""
    context = ServerContext.of(request)
    context.check_ready()
    body, size_bytes = await read_json(request)
    wanted = parse_tokenize(body)
    context.check_model(wanted.model)
    has_template = wanted.chat_template is not None
    images = await extract(context, wanted.messages or (), size_bytes=size_bytes)
    work = partial(_encode, context, wanted, images)
    token_ids, _ = images.place(await context.run_text(work, size_bytes=size_bytes, is_slow=has_template))
    answer = {"count": len(token_ids), "max_model_len": context.facts.max_model_len, "tokens": token_ids}
    if wanted.return_token_strs:
        answer["token_strs"] = [context.token_names.text_of(token_id) for token_id in token_ids]
    return JSONResponse(answer)


def _encode(context: ServerContext, wanted: TokenizeRequest, images: TurnImages) -> list[int]:
    encoder = context.encoder_of(wanted.chat_template)
    if wanted.messages is not None:
        return encoder.encode_chat(
            images.messages,
            add_special_tokens=bool(wanted.add_special_tokens),
            add_generation_prompt=wanted.add_generation_prompt,
            continue_final_message=wanted.continue_final_message,
            **(wanted.chat_template_kwargs or {}),
            **images.options,
        )
    assert wanted.prompt is not None
    return encoder.encode(wanted.prompt, add_special_tokens=wanted.add_special_tokens is not False)


async def detokenize(request: Request) -> JSONResponse:
    """Text of ids, special tokens included."""
    context = ServerContext.of(request)
    context.check_ready()
    body, size_bytes = await read_json(request)
    wanted = parse_body(DetokenizeRequest, body)
    context.check_model(wanted.model)
    tokenizer = context.llm.tokenizer
    if tokenizer is None:
        raise RequestError("this model has no tokenizer", param="tokens")
    _check_ids(wanted.tokens, context.facts.vocab_size)
    return JSONResponse({"prompt": await context.run_text(_decode, tokenizer, wanted.tokens, size_bytes=size_bytes)})


def _check_ids(token_ids: list[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"token id {token_id} is not in the vocabulary (0 to {vocab_size - 1})", param="tokens")


def _decode(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids, False)


ROUTES = [
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
]
