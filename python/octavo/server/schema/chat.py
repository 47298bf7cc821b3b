"""Body of POST /v1/chat/completions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from octavo.chat_template import check_template_kwargs
from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams
from octavo.server.schema.parse import parse
from octavo.server.schema.refused import refuse_unsupported
from octavo.server.schema.sampling import CommonRequest, sampling_params


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(CommonRequest):
    """Fields beside sampling; see the README for their meaning."""

    messages: list[Any]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def template_options(self) -> dict[str, Any]:
        """Keywords of `PromptEncoder.encode_chat`."""
        opens_turn = self.add_generation_prompt
        return {
            "add_special_tokens": self.add_special_tokens,
            "add_generation_prompt": not self.continue_final_message if opens_turn is None else opens_turn,
            "continue_final_message": self.continue_final_message,
            **(self.chat_template_kwargs or {}),
        }


def parse_chat(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[ChatRequest, SamplingParams]:
    """Check a body. `RequestError` names the field at fault."""
    refuse_unsupported(body)
    request = parse(ChatRequest, body)
    request.check(body)
    if not request.messages:
        raise RequestError("messages must not be empty", param="messages")
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    check_template_kwargs(request.chat_template_kwargs or {})
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise RequestError("max_tokens and max_completion_tokens differ: give one", param="max_tokens")
    with in_chat_words(request):
        params = sampling_params(
            body,
            defaults,
            max_tokens=limits.pop() if limits else None,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        )
    return request, params


@contextmanager
def in_chat_words(request: ChatRequest) -> Iterator[None]:
    """Errors that come out have the names that fields have in this endpoint."""
    names = {"logprobs": "top_logprobs", "prompt": "messages"}
    if request.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    try:
        yield
    except RequestError as error:
        param = names.get(error.param or "")
        if param is None:
            raise
        message = re.sub(rf"^{error.param} ", f"{param} ", str(error))
        raise RequestError(message, param=param, code=error.code) from None
