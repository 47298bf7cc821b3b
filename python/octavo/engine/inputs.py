"""The forms in which callers give prompts, and the text side of a model as the engine's facts name it.

Not here: how text becomes token ids (octavo/prompts.py) and the limits of the model (request.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from octavo._core import Tokenizer
from octavo.chat_template import ChatTemplate
from octavo.errors import ModelError, RequestError
from octavo.multimodal.inputs import images_of
from octavo.multimodal.parts import Found
from octavo.multimodal.placed import NO_MEDIA, PlacedMedia
from octavo.prompts import PromptEncoder
from octavo.protocol import ModelFacts

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; the dicts may have "multi_modal_data" (images)."""

BYTES = (bytes, bytearray, memoryview)
"""Sequences of integers that are no token ids: encoded text, most likely."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Ids, the text that they came from, and the images among them."""

    text: str | None
    token_ids: Sequence[int]
    media: PlacedMedia = NO_MEDIA


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list. A list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, BYTES):
        raise RequestError(
            f"prompts must be text, a list of token ids, a dict, or a list of these, not {type(prompts).__name__}",
            "prompt",
        )
    if prompts and isinstance(prompts[0], int):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


def split_prompt(prompt: Prompt) -> tuple[str | None, Sequence[int] | None]:
    """(text, token ids): ids win where both are given, and the text is then only shown in the output."""
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Mapping):
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if set(prompt) <= {"prompt", "prompt_token_ids", "multi_modal_data"} and (
            isinstance(text, str) or token_ids is not None
        ):
            return text, token_ids
        raise RequestError("a prompt given as a dict has the keys 'prompt' (text) or 'prompt_token_ids'", "prompt")
    if isinstance(prompt, Sequence) and not isinstance(prompt, BYTES):
        return None, cast(Sequence[int], prompt)
    raise RequestError(f"a prompt is text, a list of token ids or a dict, not {type(prompt).__name__}", "prompt")


def prompt_images(prompt: Prompt) -> list[Found]:
    """The images that a prompt brings. RequestError when they are none."""
    data = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
    return [] if data is None else images_of(data)


def load_tokenizer(facts: ModelFacts) -> Tokenizer | None:
    """The model's tokenizer; None for a model without one. ModelError when its file is broken."""
    if facts.tokenizer_path is None:
        return None
    file = Path(facts.tokenizer_path) / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file))
    except (OSError, ValueError) as error:
        raise ModelError(f"the tokenizer can't be read: {file}: {error}") from error


def make_encoder(facts: ModelFacts, tokenizer: Tokenizer | None, chat_template: str | None = None) -> PromptEncoder:
    """What turns text and chats into ids; `chat_template` replaces the model's own (a file or text)."""
    template = ChatTemplate.from_folder(facts.tokenizer_path, chat_template)
    return PromptEncoder(tokenizer, template, facts.tokenizer_path, facts.max_model_len)
