"""The images of a conversation on their way into its prompt: taken out of the messages before the template is rendered,
and put among the token ids after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.errors import RequestError
from octavo.multimodal.inputs import ImageInputs
from octavo.multimodal.parts import first_image, has_images
from octavo.multimodal.placed import NO_MEDIA, PlacedMedia, ProcessedImage

if TYPE_CHECKING:
    from octavo.server.context import ServerContext

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class TurnImages:
    """What `extract` took out of `messages`; without images it changes nothing."""

    messages: Messages
    inputs: ImageInputs | None = None
    placeholder: str | None = None
    images: Sequence[ProcessedImage] = ()

    @property
    def options(self) -> dict[str, Any]:
        """For `PromptEncoder.encode_chat`."""
        return {} if self.placeholder is None else {"image_placeholder": self.placeholder}

    def place(self, token_ids: list[int]) -> tuple[list[int], PlacedMedia]:
        """The encoded messages with the images in their places. RequestError when the template left some out."""
        return (token_ids, NO_MEDIA) if self.inputs is None else self.inputs.place(token_ids, self.images)


async def extract(context: ServerContext, messages: Messages, *, size_bytes: int) -> TurnImages:
    """Fetch and process a conversation's images. RequestError names the one at fault, or the first if the model takes
    none."""
    if not has_images(messages):
        return TurnImages(messages)
    inputs = context.llm.images
    if inputs is None:
        where = first_image(messages)
        raise RequestError(f"{where}: {context.facts.image_refusal}", f"{where}.type", "unsupported")
    rest, found = await context.run_text(inputs.take, messages, size_bytes=size_bytes)
    placeholder, images = await inputs.process_async(found)
    return TurnImages(rest, inputs, placeholder, images)
