"""A model's images, for `LLM`, `AsyncLLM` and the server alike: they are fetched, processed, and put into the prompt's
token ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from octavo.config import MediaConfig
from octavo.errors import RequestError
from octavo.multimodal.client import ImageProcessorClient
from octavo.multimodal.fetch import Fetcher
from octavo.multimodal.limits import ImageLimits
from octavo.multimodal.parts import Found, Message, take_images
from octavo.multimodal.placed import PlacedMedia, ProcessedImage, place
from octavo.multimodal.sources import UrlImage, from_object
from octavo.protocol import ImageFacts, ModelFacts

NUM_THREADS = 8
"""Images that are fetched, or wait to be processed, at a time."""


class ImageInputs:
    """Of one model that takes images. `close` ends its process."""

    def __init__(self, facts: ImageFacts, config: MediaConfig) -> None:
        self.limits = ImageLimits.of(config)
        self._is_whole = facts.is_whole
        self._client = ImageProcessorClient(facts.folder, self.limits)
        self._fetcher = Fetcher(config.allowed_media_domains, self.limits)
        self._threads = ThreadPoolExecutor(NUM_THREADS, "octavo-images")

    @classmethod
    def of(cls, facts: ModelFacts, config: MediaConfig) -> ImageInputs | None:
        """None for a model that takes no images. ConfigError: an option is senseless."""
        ImageLimits.of(config)
        return None if facts.images is None else cls(facts.images, config)

    def take(self, messages: Sequence[Message]) -> tuple[list[Message], list[Found]]:
        """See `take_images`; RequestError also for too many."""
        rest, found = take_images(messages, self.limits.max_bytes)
        self.limits.check_count(len(found), "messages")
        return rest, found

    def placeholder(self) -> str:
        """What stands for an image in a prompt's text. May wait for the process."""
        return self._client.placeholder()[0]

    def process(self, found: Sequence[Found]) -> list[ProcessedImage]:
        """Wait for all of them. RequestError names the first one at fault."""
        return list(self._threads.map(self._process, found))

    def _process(self, image: Found) -> ProcessedImage:
        return self._client.process(self._fetcher.fetch(image) if isinstance(image, UrlImage) else image)

    async def process_async(self, found: Sequence[Found]) -> tuple[str, list[ProcessedImage]]:
        """The placeholder, and the images; the event loop goes on meanwhile."""
        loop = asyncio.get_running_loop()
        done = await asyncio.gather(*(loop.run_in_executor(self._threads, self._process, image) for image in found))
        return await loop.run_in_executor(self._threads, self.placeholder), list(done)

    def place(self, token_ids: Sequence[int], images: Sequence[ProcessedImage]) -> tuple[list[int], PlacedMedia]:
        """See `placed.place`."""
        return place(token_ids, self._client.placeholder()[1], images, is_whole=self._is_whole)

    def warm(self) -> None:
        """Start the process, so that the first image does not wait for it. Errors are told when an image comes."""
        self._threads.submit(self.placeholder)

    def close(self) -> None:
        """End the process."""
        self._client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def images_of(data: object) -> list[Found]:
    """The images of a prompt's `multi_modal_data`: {"image": one, or a list of them}."""
    if not isinstance(data, Mapping) or set(data) - {"image"}:
        raise RequestError(
            'multi_modal_data is {"image": …}: a PIL image, an image file\'s bytes, or a list of them',
            "multi_modal_data",
        )
    given: Any = data.get("image")
    images = given if isinstance(given, list | tuple) else [] if given is None else [given]
    return [from_object(image, f"multi_modal_data.image[{i}]", 1 << 40) for i, image in enumerate(images)]
