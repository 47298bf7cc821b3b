"""The processor without its process: that takes seconds to start, and test_client.py has it."""

from __future__ import annotations

from octavo.multimodal.limits import ImageLimits
from octavo.multimodal.placed import ProcessedImage
from octavo.multimodal.processor import ImageProcessor
from octavo.multimodal.sources import ImageSource


class InThisProcess:
    """Has what `ImageInputs` uses of `ImageProcessorClient`."""

    def __init__(self, folder: str, limits: ImageLimits) -> None:
        self._processor = ImageProcessor(folder, limits.max_pixels)

    def placeholder(self) -> tuple[str, int]:
        return self._processor.placeholder, self._processor.placeholder_id

    def process(self, source: ImageSource) -> ProcessedImage:
        return self._processor.process(source)

    def close(self) -> None:
        """There is nothing to end."""
