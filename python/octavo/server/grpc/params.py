"""Requests as what the engine takes: prompts, SamplingParams, inputs to embed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams
from octavo.server.context import ServerContext
from octavo.server.prompt import Prompt
from octavo.server.schema.parse import load_value
from octavo.server.schema.pooling import EmbeddingRequest, parse_embedding
from octavo.server.schema.tokenize import TokenizeRequest, parse_tokenize

LISTS = ("stop", "stop_token_ids", "bad_words")
"""Repeated fields that mean the same empty as absent."""


def sampling_params(message: Any, defaults: Mapping[str, Any]) -> SamplingParams:
    """From the message; `defaults` fill what it leaves out. RequestError names the field that is wrong."""
    values: dict[str, Any] = dict(defaults)
    for field, value in message.ListFields():
        if field.name == "structured_outputs_json":
            values["structured_outputs"] = _json(value, field.name)
        elif field.name == "logit_bias":
            values[field.name] = dict(value)
        elif field.name in (*LISTS, "allowed_token_ids"):
            values[field.name] = list(value)
        else:
            values[field.name] = value
    return SamplingParams(**values)


def make_prompt(context: ServerContext, request: Any) -> Prompt:
    """Text, ids, or chat messages of a request, as ids."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise RequestError("one of text, token_ids and messages_json is needed", param="prompt")
    if kind == "token_ids":
        return Prompt(list(request.token_ids.ids), None)
    if kind == "text":
        return Prompt(context.encoder.encode(request.text), request.text)
    wanted: TokenizeRequest = parse_tokenize({"messages": _json(request.messages_json, "messages_json")})
    assert wanted.messages is not None
    return Prompt(context.encoder.encode_chat(wanted.messages), None)


def embedding_request(message: Any, num_dimensions: int) -> EmbeddingRequest:
    """An EmbedRequest as the body of /v1/embeddings. RequestError names the field at fault."""
    inputs = []
    for one in message.inputs:
        kind = one.WhichOneof("input")
        inputs.append(list(one.token_ids.ids) if kind == "token_ids" else one.text)
    body: dict[str, Any] = {"input": inputs}
    for name in ("dimensions", "truncate_prompt_tokens"):
        if message.HasField(name):
            body[name] = getattr(message, name)
    return parse_embedding(body, num_dimensions)


def _json(text: str, param: str) -> Any:
    try:
        return load_value(text.encode(), param)
    except RequestError as error:
        raise RequestError(str(error), param=param, code=error.code) from None
