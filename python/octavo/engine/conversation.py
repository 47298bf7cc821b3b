"""A conversation as a prompt, with its images in their places: the same for `LLM` and `AsyncLLM`.

Not here: chats of the server, which have tools and reasoning (server/turn_prompt.py).
"""

from __future__ import annotations

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
