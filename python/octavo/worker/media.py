"""Images of the prompts that run: which tokens of a step take an encoder's output, and these outputs by content.

A slot's images are known from its sequence's start until its prompt has been computed. Images are encoded when a step
first reaches them, those of one size together, as far as the memory plan allows. Embeddings live in a bounded cache by
content; beyond it only while the step that reads them runs, and of images that it cut also through the next: so what an
aborted sequence had is gone by itself. Not here: pixels to tensors (multimodal/processor.py), the encoder itself
(models/images.py), what both take (encoder_memory.py).

Shape suffixes: t tokens, s slots, i tokens of the step that stand for images, m model dim.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch import Tensor

from octavo.attention.media import MediaInput, WholeSpan
from octavo.models.images import ImageEncoder, kind, num_values
from octavo.multimodal.placed import MediaRecord, unpack
from octavo.worker.batch import StepArenas, StepArrays

if TYPE_CHECKING:
    from octavo._core import NewRow, StepPlan

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PromptImage:
    """One image of a prompt."""

    record: MediaRecord
    position_i: npt.NDArray[np.int64]
    """Positions of the prompt that take the encoder's outputs, in order."""


@dataclass(slots=True)
class SlotMedia:
    """What a slot's prompt needs until it has been computed up to `end`."""

    images: list[PromptImage]
    end: int
    rope_position_3p: Tensor | None = None
    """Of every known position of the sequence, where the model numbers positions in three dimensions."""


@dataclass(slots=True)
class FeatureCache:
    """Encoder outputs by content; the least recently used go when there are more than `max_bytes`."""

    max_bytes: int
    num_bytes: int = 0
    num_hits: int = 0
    _features: OrderedDict[bytes, Tensor] = field(default_factory=OrderedDict)

    def get(self, digest: bytes) -> Tensor | None:
        found = self._features.get(digest)
        if found is not None:
            self._features.move_to_end(digest)
            self.num_hits += 1
        return found

    def put(self, digest: bytes, feature_im: Tensor) -> None:
        if digest in self._features:
            return
        self._features[digest] = feature_im
        self.num_bytes += feature_im.nbytes
        while self.num_bytes > self.max_bytes:
            self.num_bytes -= self._features.popitem(last=False)[1].nbytes


class StepMedia:
    """Keeps the slots' images and tells each step what to do with them."""

    def __init__(
        self, encoder: ImageEncoder, *, cache_bytes: int, max_values: int, num_slots: int, device: torch.device
    ) -> None:
        """`max_values`: numbers that the encoder may read in one call; a single image may have more."""
        self.cache = FeatureCache(cache_bytes)
        self.num_calls = 0
        self._max_values = max_values
        self._cut: dict[bytes, Tensor] = {}
        """Embeddings of images that the last step has read in part."""
        self._encoder = encoder
        self._device = device
        self._slots: dict[int, SlotMedia] = {}
        self._shift_s = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        """How far a slot's positions in three dimensions are from its plain ones, behind its prompt."""
        self._shifted: set[int] = set()

    def begin(self, plan: StepPlan, arenas: StepArenas) -> MediaInput | None:
        """`admit` and `step` of a plan."""
        if plan.num_new_rows:
            self.admit(plan.new_rows)
        return self.step(plan, arenas)

    def admit(self, rows: Sequence[NewRow]) -> None:
        """Sequences that got their slots in this step."""
        for row in rows:
            self._slots.pop(row.slot, None)
            if row.slot in self._shifted:
                self._shift_s[row.slot] = 0
                self._shifted.discard(row.slot)
            if row.media_data:
                self._slots[row.slot] = self._read(row)

    def _read(self, row: NewRow) -> SlotMedia:
        token_ids = np.frombuffer(row.token_ids, dtype="<i4").astype(np.int64)
        images = []
        for record in unpack(row.media_data):
            span = token_ids[record.start : record.start + record.length]
            images.append(PromptImage(record, record.start + np.flatnonzero(span == self._encoder.token_id)))
        last = images[-1].record
        media = SlotMedia(images, last.start + last.length)
        if self._encoder.numbers_positions:
            tensors = [safetensors.torch.load(image.record.data) for image in images]
            places = [image.position_i for image in images]
            media.rope_position_3p, shift = self._encoder.positions(token_ids, places, tensors)
            media.end = len(token_ids)
            self._shift_s[row.slot] = shift
            self._shifted.add(row.slot)
        return media

    def step(self, plan: StepPlan, arenas: StepArenas) -> MediaInput | None:
        """What the step's rows take from images; None where no row has any. Encodes what is needed for the first
        time."""
        cut, self._cut = self._cut, {}
        if not self._slots:
            return None
        host, layout = arenas.host_arrays[plan.arena], arenas.layout
        slots = host[layout.row_slot : layout.row_slot + plan.num_rows]
        found, rows = MediaInput(), []
        for row in np.flatnonzero(np.isin(slots, list(self._slots))):
            first, last = host[layout.query_start + row], host[layout.query_start + row + 1]
            end = int(host[layout.kv_len + row])
            rows.append((int(slots[row]), int(first), end - int(last - first), end))
        features = self._features(rows, cut)
        for place in rows:
            self._add_row(found, features, *place)
        return found.finish(self._device) if found.has_any else None

    def _add_row(
        self, found: MediaInput, features: Mapping[bytes, Tensor], slot: int, first: int, start: int, end: int
    ) -> None:
        """Positions [start, end) of a slot are the step's tokens from `first` on."""
        media = self._slots[slot]
        for image in media.images:
            low, high = np.searchsorted(image.position_i, (start, end))
            if low < high:
                position_i, feature_im = image.position_i[low:high], features[image.record.digest]
                if len(feature_im) == len(image.position_i):
                    found.add_features(position_i - start + first, feature_im[low:high])
                if self._encoder.is_whole:
                    began, stop = int(image.position_i[0]), int(position_i[-1]) + 1
                    found.spans.append(
                        WholeSpan(slot, int(position_i[0]) - start + first, len(position_i), began, stop)
                    )
        if media.rope_position_3p is not None:
            stop = min(end, media.rope_position_3p.shape[1])
            if start < stop:
                found.add_positions(np.arange(first, first + stop - start), media.rope_position_3p[:, start:stop])
        media.images = [image for image in media.images if image.position_i[-1] >= end]
        if end >= media.end:
            del self._slots[slot]

    def _features(self, rows: Sequence[tuple[int, int, int, int]], cut: dict[bytes, Tensor]) -> dict[bytes, Tensor]:
        """The encoder's outputs [i, m] for the images that rows reach, by digest."""
        found: dict[bytes, Tensor] = {}
        missing: dict[bytes, bytes] = {}
        unread: set[bytes] = set()
        for slot, _, start, end in rows:
            for image in self._slots[slot].images:
                digest, low, high = image.record.digest, *np.searchsorted(image.position_i, (start, end))
                if low == high:
                    continue
                if high < len(image.position_i):
                    unread.add(digest)
                known = found.get(digest, cut.get(digest))
                known = self.cache.get(digest) if known is None else known
                if known is None:
                    missing[digest] = image.record.data
                else:
                    found[digest] = known
        found |= self._encode(missing)
        self._cut = {digest: found[digest] for digest in unread}
        return found

    def _encode(self, missing: Mapping[bytes, bytes]) -> dict[bytes, Tensor]:
        """Outputs for images' data, those of one kind in few calls; they are kept."""
        found: dict[bytes, Tensor] = {}
        kinds: dict[Hashable, list[tuple[bytes, dict[str, Tensor]]]] = {}
        for digest, data in missing.items():
            tensors = safetensors.torch.load(data)
            kinds.setdefault(kind(tensors), []).append((digest, tensors))
        for images in kinds.values():
            size = max(1, self._max_values // max(1, num_values(images[0][1])))
            for i in range(0, len(images), size):
                together = images[i : i + size]
                outputs = self._outputs([tensors for _, tensors in together])
                self.num_calls += 1
                found |= {digest: output for (digest, _), output in zip(together, outputs, strict=True)}
        for digest, feature_im in found.items():
            if feature_im.numel():
                self.cache.put(digest, feature_im)
        return found

    def _outputs(self, images: list[dict[str, Tensor]]) -> list[Tensor]:
        """Of images of one kind; empty where foreign code fails over one: it is shown as nothing then, and the others'
        requests go on."""
        try:
            return self._encoder.encode_equal(images, self._device)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            logger.error("an image can't be encoded, its tokens stay empty: %s", error)
            return [torch.empty(0)] * len(images)

    def rope_positions(self, position_t: Tensor, arrays: StepArrays, media: MediaInput | None) -> Tensor | None:
        """Positions in three dimensions [3, t], where the model has such."""
        if not self._encoder.numbers_positions:
            return None
        token_t = torch.arange(position_t.shape[0], device=position_t.device, dtype=arrays.query_start_r.dtype)
        row_t = torch.searchsorted(arrays.query_start_r[1:].contiguous(), token_t, right=True)
        slot_t = arrays.row_slot_r[row_t.clamp(max=arrays.row_slot_r.shape[0] - 1)].long()
        position_3t = (position_t + self._shift_s[slot_t]).expand(3, -1)
        return position_3t if media is None else media.with_positions(position_3t)
