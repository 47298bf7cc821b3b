"""Bodies of POST /tokenize and POST /detokenize."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.chat_template import check_template_kwargs
from octavo.errors import RequestError
from octavo.server.schema.refused import REFUSED, refuse_unsupported
from octavo.server.schema.unknown import parse_body


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """Text or chat messages to be turned into ids."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeRequest:
    """Ids to be turned into text."""

    model: str | None = None
    tokens: list[int]


def parse_tokenize(body: Mapping[str, Any]) -> TokenizeRequest:
    """Check a body. `RequestError` names the field at fault."""
    refuse_unsupported(body)
    request = parse_body(TokenizeRequest, body, REFUSED)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    check_template_kwargs(request.chat_template_kwargs or {})
    return request
