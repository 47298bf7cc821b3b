"""A prompt as the engine takes it, and the text that it came from."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.multimodal.placed import NO_MEDIA, PlacedMedia


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids, and the text they came from (None for a prompt given as ids).

    `first_choice` is set where the choices of one prompt are submitted one by one: with a seed each draws its own.
    """

    token_ids: list[int]
    text: str | None
    first_choice: int = 0
    media: PlacedMedia = NO_MEDIA
    """The images among the ids."""
