"""Images of the prompts that run: which tokens of a step take an encoder's output, and these outputs by content.

A slot's images are known from its sequence's start until its prompt has been computed. Images are encoded when a step
first reaches them, those of one size together, as far as the memory plan allows. Their embeddings are kept in the
blocks that the plan names (output_blocks.py); where it names none, only while the step that reads them runs, and of
images that it cut also through the next: so what an aborted sequence had is gone by itself. Not here: pixels to tensors
(multimodal/processor.py), the encoder itself (models/images.py), what both take (encoder_memory.py).

Shape suffixes: t tokens, s slots, i tokens of the step that stand for images, m model dim.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
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
from octavo.worker.output_blocks import OutputBlocks

if TYPE_CHECKING:
    from octavo._core import NewRow, PlacedOutputs, StepPlan

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PromptImage:
    """One image of a prompt."""

    record: MediaRecord
    position_i: npt.NDArray[np.int64]
    """Positions of the prompt that take the encoder's outputs, in order."""

    @property
    def end(self) -> int:
        """Of the positions that stand for it."""
        return self.record.start + self.record.length


@dataclass(slots=True)
class SlotMedia:
    """What a slot's prompt needs until it has been computed up to `end`."""

    images: list[PromptImage]
    end: int
    rope_position_3p: Tensor | None = None
    """Of every known position of the sequence, where the model numbers positions in three dimensions."""


class StepMedia:
    """Keeps the slots' images and tells each step what to do with them."""

    def __init__(
        self, encoder: ImageEncoder, kept: OutputBlocks, *, max_values: int, num_slots: int, device: torch.device
    ) -> None:
        """`max_values`: numbers that the encoder may read in one call; a single image may have more."""
        self._kept = kept
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
        media = SlotMedia(images, images[-1].end)
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
        features = self._features(rows, cut, {placed.digest: placed for placed in plan.outputs})
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
        media.images = [image for image in media.images if image.end > end]
        if end >= media.end:
            del self._slots[slot]

    def _features(
        self,
        rows: Sequence[tuple[int, int, int, int]],
        cut: dict[bytes, Tensor],
        outputs: Mapping[bytes, PlacedOutputs],
    ) -> dict[bytes, Tensor]:
        """The encoder's outputs [i, m] for the images that rows reach, by digest; `cut`: of images that the last step
        cut, `outputs`: where the plan keeps them."""
        found: dict[bytes, Tensor] = {}
        missing: dict[bytes, PromptImage] = {}
        unread: set[bytes] = set()
        for slot, _, start, end in rows:
            for image in self._slots[slot].images:
                digest = image.record.digest
                if image.end <= start or end <= image.record.start:
                    continue
                if end < image.end:
                    unread.add(digest)
                if digest in found or digest in missing:
                    continue
                placed = outputs.get(digest)
                if placed is not None and placed.is_filled:
                    found[digest] = self._kept.read(placed.blocks, len(image.position_i))
                elif digest in cut:
                    found[digest] = cut[digest]
                else:
                    missing[digest] = image
        found |= self._encode(missing)
        for digest, placed in outputs.items():
            if not placed.is_filled:
                self._kept.write(placed.blocks, found[digest])
        self._cut = {digest: found[digest] for digest in unread - outputs.keys()}
        return found

    def _encode(self, missing: Mapping[bytes, PromptImage]) -> dict[bytes, Tensor]:
        """Outputs [i, m] for images, those of one kind in few calls."""
        found: dict[bytes, Tensor] = {}
        kinds: dict[Hashable, list[tuple[PromptImage, dict[str, Tensor]]]] = {}
        for image in missing.values():
            tensors = safetensors.torch.load(image.record.data)
            kinds.setdefault(kind(tensors), []).append((image, tensors))
        for images in kinds.values():
            size = max(1, self._max_values // max(1, num_values(images[0][1])))
            for i in range(0, len(images), size):
                together = images[i : i + size]
                outputs = self._outputs([tensors for _, tensors in together])
                self.num_calls += 1
                for (image, _), output_im in zip(together, outputs, strict=True):
                    found[image.record.digest] = self._checked(image, output_im)
        return found

    def _outputs(self, images: list[dict[str, Tensor]]) -> Sequence[Tensor | None]:
        """Of images of one kind; None where foreign code fails over one."""
        try:
            return self._encoder.encode_equal(images, self._device)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            logger.error("an image can't be encoded, its tokens stay empty: %s", error)
            return [None] * len(images)

    def _checked(self, image: PromptImage, output_im: Tensor | None) -> Tensor:
        """The output if there is one a token, else zeros: that image is shown as nothing, and other requests go on."""
        shape = (len(image.position_i), self._kept.width)
        if output_im is not None and output_im.shape == shape:
            return output_im
        if output_im is not None:
            logger.error("an image has %s outputs instead of %s, its tokens stay empty", tuple(output_im.shape), shape)
        return torch.zeros(shape, dtype=self._kept.dtype, device=self._device)

    def rope_positions(self, position_t: Tensor, arrays: StepArrays, media: MediaInput | None) -> Tensor | None:
        """Positions in three dimensions [3, t], where the model has such."""
        if not self._encoder.numbers_positions:
            return None
        token_t = torch.arange(position_t.shape[0], device=position_t.device, dtype=arrays.query_start_r.dtype)
        row_t = torch.searchsorted(arrays.query_start_r[1:].contiguous(), token_t, right=True)
        slot_t = arrays.row_slot_r[row_t.clamp(max=arrays.row_slot_r.shape[0] - 1)].long()
        position_3t = (position_t + self._shift_s[slot_t]).expand(3, -1)
        return position_3t if media is None else media.with_positions(position_3t)
