"""Fields of other servers' APIs that change the answer and that Octavo does not do: refused, never ignored in silence.

A feature that arrives removes its line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from octavo.errors import RequestError


def _given(value: Any) -> bool:
    return value not in (None, False, "", [], {})


def _chooses_tools(value: Any) -> bool:
    return value not in (None, "none", "auto")


def _speaks(value: Any) -> bool:
    return value not in (None, ["text"])


NOT_YET = "is not supported yet"

# Field -> (refused when, what to say after the field's name).
REFUSED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "guided_json": (_given, "is called structured_outputs.json"),
    "guided_regex": (_given, "is called structured_outputs.regex"),
    "guided_choice": (_given, "is called structured_outputs.choice"),
    "guided_grammar": (_given, "is called structured_outputs.grammar"),
    "functions": (_given, "is not supported: use tools"),
    "function_call": (_chooses_tools, "is not supported: use tool_choice"),
    "suffix": (_given, NOT_YET),
    "prompt_embeds": (_given, NOT_YET),
    "use_beam_search": (_given, "is not supported: sample n sequences instead"),
    "audio": (_given, "is not supported: this server writes text"),
    "modalities": (_speaks, 'other than ["text"] are not supported'),
    "truncate_prompt_tokens": (_given, NOT_YET),
    "logprob_token_ids": (_given, NOT_YET),
    "return_tokens_as_token_ids": (_given, "is not supported: ask for return_token_ids"),
    "repetition_detection": (_given, NOT_YET),
    "watermarking": (_given, NOT_YET),
    "kv_transfer_params": (_given, NOT_YET),
}


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raise `RequestError` for a field that asks for what the server does not do."""
    for name, (refused, message) in REFUSED.items():
        if name in body and refused(body[name]):
            raise RequestError(f"{name} {message}", param=name, code="unsupported")
