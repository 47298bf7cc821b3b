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


def _differs_from_1(value: Any) -> bool:
    """Clients with many sliders send those that do nothing, too."""
    return value is not None and value != 1


NOT_YET = "is not supported yet"
NOT_HERE = "is not supported"

# Field -> (refused when, what to say after the field's name).
REFUSED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "guided_json": (_given, "is called structured_outputs.json"),
    "guided_regex": (_given, "is called structured_outputs.regex"),
    "guided_choice": (_given, "is called structured_outputs.choice"),
    "guided_grammar": (_given, "is called structured_outputs.grammar"),
    "json_schema": (_given, "is called structured_outputs.json"),
    "regex": (_given, "is called structured_outputs.regex"),
    "grammar": (_given, "is called structured_outputs.grammar"),
    "ebnf": (_given, "is called structured_outputs.grammar"),
    "format": (_given, "is called response_format"),
    "max_new_tokens": (_given, "is called max_tokens"),
    "n_predict": (_given, "is called max_tokens"),
    "num_predict": (_given, "is called max_tokens"),
    "repeat_penalty": (_differs_from_1, "is called repetition_penalty"),
    "typical_p": (_differs_from_1, NOT_HERE),
    "tfs_z": (_differs_from_1, NOT_HERE),
    "top_a": (_given, NOT_HERE),
    "mirostat": (_given, NOT_HERE),
    "dry_multiplier": (_given, NOT_HERE),
    "xtc_probability": (_given, NOT_HERE),
    "no_repeat_ngram_size": (_given, NOT_HERE),
    "logits_processors": (_given, NOT_HERE),
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
