"""Body of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams
from octavo.server.schema.refused import REFUSED, refuse_unsupported
from octavo.server.schema.response_format import constraint
from octavo.server.schema.sampling import FIELDS, CommonRequest, sampling_params
from octavo.server.schema.unknown import parse_body

# Most sequences (prompts x n) of one call.
MAX_SEQUENCES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(CommonRequest):
    """Fields beside sampling; see README.md beside `schema/` for their meaning."""

    prompt: str | list[int] | list[str | list[int]]
    max_tokens: int | None = None
    logprobs: int | None = None
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one by one."""
        prompt: Any = self.prompt
        one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        return [prompt] if one else list(prompt)

    @property
    def scores_only(self) -> bool:
        """Echo with no new tokens: the prompt's own log probabilities are what is wanted."""
        return self.echo and self.max_tokens == 0


def parse_completion(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[CompletionRequest, SamplingParams]:
    """Check a body. `RequestError` names the field at fault."""
    refuse_unsupported(body)
    request = parse_body(CompletionRequest, body, (*FIELDS, *REFUSED))
    request.check(body)
    own: dict[str, Any] = {
        "max_tokens": 16 if request.max_tokens is None else request.max_tokens,
        "logprobs": request.logprobs,
        "structured_outputs": constraint(body),
    }
    if request.scores_only:
        if request.stream:
            raise RequestError("max_tokens 0 with echo can't be streamed: leave stream out", param="max_tokens")
        own["max_tokens"] = 1
    if request.echo and request.logprobs is not None:
        own["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    params = sampling_params(body, defaults, **own)
    if request.stream and "prompt_logprobs" in own and params.n > 1:
        raise RequestError("echo with logprobs can be streamed for n = 1 only", param="echo")
    prompts = request.prompts
    if not prompts:
        raise RequestError("prompt must not be empty", param="prompt")
    if len(prompts) * params.n > MAX_SEQUENCES:
        raise RequestError(
            f"{len(prompts)} prompts x n = {params.n} are more than {MAX_SEQUENCES} sequences in one call",
            param="prompt" if len(prompts) > 1 else "n",
        )
    if any(not prompt for prompt in prompts):
        raise RequestError("prompt must not be empty", param="prompt")
    return request, params
