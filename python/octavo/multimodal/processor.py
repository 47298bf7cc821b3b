"""A checkpoint's own processor (Transformers) with one image at a time: pixels to tensors, and to the tokens that stand
for the image in a prompt.

Runs in the processor's process only (process.py). The text of prompts never comes here: a placeholder alone is given to
the processor with each image, and what it makes of it goes in the place of the prompt's own placeholder.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from octavo.errors import ModelError, RequestError
from octavo.multimodal.decode import decode
from octavo.multimodal.placed import ProcessedImage
from octavo.multimodal.sources import FileImage, ImageSource

TEXT_FIELDS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
MAX_KEPT_BYTES = 64 * 1024 * 1024
TRIAL_SIZE = (64, 48)
TRIAL_SIZES = ((64, 48), (90, 120))


@dataclass(frozen=True, slots=True)
class Trial:
    """What the processor makes of a prompt with pictures."""

    token_ids: list[int]
    inputs: dict[str, Tensor]
    """All else that it makes of the prompt as a whole."""
    images: list[tuple[int, int, dict[str, Tensor]]]
    """(first token, tokens, what it makes of the picture alone) of each."""


class ImageProcessor:
    """ModelError: the folder's processor can't be loaded, or has no placeholder for images.

    Attributes:
        placeholder: What stands for an image in text, before its processor has expanded it.
        placeholder_id: Its token.
    """

    def __init__(self, folder: str, max_pixels: int) -> None:
        self._max_pixels = max_pixels
        self._processor = load_processor(Path(folder))
        self._kept: OrderedDict[bytes, ProcessedImage] = OrderedDict()
        self._num_kept_bytes = 0
        self.placeholder = self._find_placeholder()
        self.placeholder_id = int(self._processor.tokenizer.convert_tokens_to_ids(self.placeholder))

    def _find_placeholder(self) -> str:
        trial = Image.new("RGB", TRIAL_SIZE, (90, 120, 30))
        problem = "it names no image token"
        for name in ("image_token", "boi_token"):
            placeholder = getattr(self._processor, name, None)
            if isinstance(placeholder, str):
                try:
                    self._run(trial, placeholder)
                except Exception as error:  # foreign code: this is not the placeholder
                    problem = str(error)
                else:
                    return placeholder
        raise ModelError(f"{type(self._processor).__name__} can't be used for images: {problem[:300]}")

    def trial(self) -> Trial:
        """A prompt with two pictures. ModelError: they are not expanded in their places like pictures alone."""
        pictures = [Image.effect_noise(size, 80.0).convert("RGB") for size in TRIAL_SIZES]
        texts = [f"{before}{self.placeholder}" for before in ("Look ", " and ")]
        try:
            found = self._processor(text=["".join(texts) + "."], images=pictures, return_tensors="pt")
            alone = [self._run(picture, self.placeholder) for picture in pictures]
        except Exception as error:  # foreign code, any error means the same
            raise ModelError(f"its processor fails: {str(error)[:200]}") from error
        token_ids, images, at = found["input_ids"][0].tolist(), [], 0
        for expanded, tensors in alone:
            start = _find(token_ids, expanded, at)
            if start < 0:
                raise ModelError("its processor expands pictures in another way when there are several")
            images.append((start, len(expanded), tensors))
            at = start + len(expanded)
        return Trial(token_ids, {name: torch.as_tensor(x) for name, x in found.items() if name != "input_ids"}, images)

    def largest(self, max_pixels: int, ratios: Sequence[float]) -> tuple[int, int]:
        """Width and height of the picture, among those of so many pixels and these ratios of width to height, that
        becomes the most tokens."""
        sizes = [(int((max_pixels * ratio) ** 0.5), int((max_pixels / ratio) ** 0.5)) for ratio in ratios]
        try:
            found = self._processor._get_num_multimodal_tokens(image_sizes=[(height, width) for width, height in sizes])
            tokens = list(found["num_image_tokens"])
        except Exception:  # foreign code that not every processor has: then the first will do
            return sizes[0]
        return sizes[tokens.index(max(tokens))]

    def of_size(self, size: tuple[int, int]) -> tuple[list[int], dict[str, Tensor]]:
        """Tokens and tensors of a plain picture. ModelError: its processor fails."""
        try:
            return self._run(Image.new("RGB", size, (90, 120, 30)), self.placeholder)
        except Exception as error:  # foreign code, any error means the same
            raise ModelError(f"its processor fails: {str(error)[:200]}") from error

    def process(self, source: ImageSource) -> ProcessedImage:
        """RequestError for an image that can't be decoded, or that the processor refuses."""
        key = _key(source)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        image = decode(source, self._max_pixels)
        try:
            token_ids, tensors = self._run(image, self.placeholder)
        except MemoryError:
            raise RequestError(f"{source.where}: processing the image takes too much memory", source.where) from None
        except Exception as error:  # foreign code with errors of its own about sizes and ratios
            raise RequestError(
                f"{source.where}: the model's processor refuses it: {str(error)[:200]}", source.where
            ) from None
        data = safetensors.torch.save(tensors)
        digest = hashlib.blake2b(data, digest_size=16)
        digest.update(json.dumps(token_ids).encode())
        done = ProcessedImage(tuple(token_ids), digest.digest(), data)
        self._keep(key, done)
        return done

    def _run(self, image: Image.Image, placeholder: str) -> tuple[list[int], dict[str, Tensor]]:
        found = self._processor(text=[placeholder], images=[image], return_tensors="pt", add_special_tokens=False)
        token_ids: list[int] = found["input_ids"][0].tolist()
        tensors = {name: torch.as_tensor(x) for name, x in found.items() if name not in TEXT_FIELDS}
        return token_ids, {name: tensor.contiguous() for name, tensor in tensors.items()}

    def _keep(self, key: bytes, done: ProcessedImage) -> None:
        """For the next turns of a conversation."""
        self._kept[key] = done
        self._num_kept_bytes += len(done.data)
        while self._num_kept_bytes > MAX_KEPT_BYTES:
            self._num_kept_bytes -= len(self._kept.popitem(last=False)[1].data)


def _find(token_ids: list[int], part: list[int], start: int) -> int:
    """Where `part` begins, from `start` on; -1: nowhere."""
    places = range(start, len(token_ids) - len(part) + 1)
    return next((i for i in places if token_ids[i : i + len(part)] == part), -1)


def _key(source: ImageSource) -> bytes:
    """Of the very bytes that were given, and what they mean."""
    size = b"" if isinstance(source, FileImage) else repr(source.size).encode()
    return hashlib.blake2b(source.data, digest_size=16, salt=size[:16], person=type(source).__name__.encode()).digest()


def load_processor(folder: Path) -> Any:
    """The folder's processor, with Pillow behind it, and without what it has for videos. ModelError: it can't be."""
    try:
        parent, options = _class_and_options(folder)
        no_check = {"check_argument_for_proper_class": lambda self, name, argument: None}
        kind = type(parent.__name__, (parent,), no_check)
        parts: dict[str, Any] = dict.fromkeys(parent.get_attributes())
        parts["tokenizer"] = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        parts["image_processor"] = transformers.AutoImageProcessor.from_pretrained(
            folder, backend="pil", trust_remote_code=False
        )
        return kind(**parts, **{name: value for name, value in options.items() if name not in parts})
    except Exception as error:  # foreign code, any error means the same
        raise ModelError(f"{folder}: the processor of images can't be loaded: {str(error)[:500]}") from error


def _class_and_options(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The processor's class, and what processor_config.json says to it."""
    found = transformers.ProcessorMixin.get_processor_dict(folder)
    options = dict(found[0] if isinstance(found, tuple) else found)
    model_type = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False).model_type
    name = options.pop("processor_class", None) or PROCESSOR_MAPPING_NAMES[model_type]
    return getattr(transformers, str(name)), options
