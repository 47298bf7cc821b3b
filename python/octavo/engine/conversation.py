"""A conversation as a prompt, with its images in their places: the same for `LLM` and `AsyncLLM`.

Not here: chats of the server, which have tools and reasoning (server/turn_prompt.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.chat_template import Message
from octavo.engine.inputs import EncodedPrompt
from octavo.errors import RequestError
from octavo.multimodal.inputs import ImageInputs
from octavo.multimodal.parts import first_image, has_images
from octavo.prompts import PromptEncoder
from octavo.protocol import ModelFacts

Conversation = Sequence[Message]

OWN_OPTIONS = ("add_generation_prompt", "continue_final_message", "add_special_tokens", "tools", "documents")
"""What Octavo itself reads."""

log = logging.getLogger("octavo.engine")


def encode_conversation(
    conversation: Conversation,
    encoder: PromptEncoder,
    facts: ModelFacts,
    images: ImageInputs | None,
    options: Mapping[str, Any],
) -> EncodedPrompt:
    """Render messages, find their images, make token ids. Blocks: images are decoded meanwhile.

    Args:
        images: None of a model without.
        options: For the template, as `PromptEncoder.encode_chat` takes them.
    """
    _check_options(encoder, options)
    tokenizer = encoder.tokenizer
    if not has_images(conversation):
        token_ids = encoder.encode_chat(conversation, **options)
        return EncodedPrompt(None if tokenizer is None else tokenizer.decode(token_ids), token_ids)
    if images is None:
        raise RequestError(f"{first_image(conversation)}: {facts.image_refusal}", "messages")
    messages, found = images.take(conversation)
    placeholder, processed = images.placeholder(), images.process(found)
    token_ids = encoder.encode_chat(messages, image_placeholder=placeholder, **options)
    text = None if tokenizer is None else tokenizer.decode(token_ids)
    return EncodedPrompt(text, *images.place(token_ids, processed))


def _check_options(encoder: PromptEncoder, options: Mapping[str, Any]) -> None:
    """Name what the template does not ask for. Tools that the model is not told of are an error, as it can't call them;
    templates take other variables or leave them (`enable_thinking=False` of a model that never thinks)."""
    template = encoder.template
    if options.get("tools") and not template.reads("tools"):
        raise RequestError(
            "tools: this model's chat template does not show tools: describe them in a message, or give a "
            "chat_template that shows them",
            "tools",
        )
    for name in options:
        if name not in OWN_OPTIONS and not template.reads(name):
            log.warning("the chat template has no variable %r: it changes nothing", name)
