"""A checkpoint's weights into the embedded decoder: each in its own format, or in what --dtype says.

Not here: where tensors lie in files (models/stored_weights.py), how matrices are packed (rust/cpu).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from octavo._core import EmbeddedDecoder
from octavo.config import ModelConfig
from octavo.models.description import Description
from octavo.models.plain_weights import as_float32, narrowed, random_weight, widened
from octavo.models.stored_weights import PLAIN, TOP, Place, StoredWeight, places

if TYPE_CHECKING:
    from octavo.protocol import Progress


QUANTIZED = {"int8": "Q8_0", "int4": "Q4_1"}
"""--quantization -> the format that plain numbers of layers are quantized to; embedding and head take `FINE`."""
FINE = "Q8_0"
"""Near-lossless: also for quantized formats that the decoder does not compute with."""
RAGGED = "INT8"
"""For rows that are no whole blocks: a scale a row."""
BLOCK = 32
"""Columns of a block of these formats."""
KNOWN = {"Q8_0": 8.5, "Q4_0": 4.5, "Q4_1": 5.0, "Q4_K": 4.5, "Q5_K": 5.5, "Q6_K": 6.5625}
"""Quantized formats that the decoder computes with -> bits of a number with its share of the scales."""
PLAIN_BITS = {"F32": 32.0, "INT8": 8.0}


def load_weights(
    decoder: EmbeddedDecoder,
    model: Description,
    stored: Mapping[str, StoredWeight],
    config: ModelConfig,
    progress: Progress,
) -> None:
    """Fill every place; `stored` (checked to fit) may be empty, for random weights. `config` is resolved."""
    wanted = places(model)
    generator = np.random.default_rng(config.seed)
    for done, (name, place) in enumerate(wanted.items()):
        weight = stored[name] if stored else random_weight(place.shape, generator)
        if len(place.shape) == 1:
            shift = model.norm_shift - weight.shift if name.endswith("norm.weight") and stored else 0.0
            values = as_float32(weight) + np.float32(shift)
            decoder.load_vector(place.layer, place.role, values.data.cast("B"))
        else:
            _load_matrix(decoder, place, weight, config)
        weight.release()
        progress("weights", (done + 1) / len(wanted))


def _load_matrix(decoder: EmbeddedDecoder, place: Place, weight: StoredWeight, config: ModelConfig) -> None:
    keep = kept_format(place, weight.format, config)
    if keep is None and weight.format in PLAIN:
        weight = narrowed(weight, config.dtype)
    if weight.format == "F64" or (weight.format not in KNOWN and weight.format not in PLAIN):
        weight = widened(weight)
    rows, columns = place.shape
    decoder.load_matrix(place.layer, place.role, weight.format, weight.read().data, rows, columns, keep=keep)


def kept_bytes(model: Description, stored: Mapping[str, StoredWeight], config: ModelConfig) -> int:
    """Bytes of all weights in the decoder, about (it packs some formats a little wider)."""
    narrow = 32.0 if config.dtype == "float32" else 16.0
    bits = 0.0
    for name, place in places(model).items():
        own = stored[name].format if name in stored else "F32"
        kept = (kept_format(place, own, config) or own) if len(place.shape) > 1 else "F32"
        bits += math.prod(place.shape) * {**PLAIN_BITS, **KNOWN}.get(kept, narrow)
    return int(bits / 8)


def kept_format(place: Place, stored: str, config: ModelConfig) -> str | None:
    """What a matrix in the format `stored` is made into; None: it stays as it is, plain numbers in --dtype.

    Plain numbers are quantized where --quantization says so; quantized ones are widened where --dtype asks for it.
    """
    wanted = QUANTIZED.get(config.quantization)
    if wanted is not None and stored in PLAIN:
        if place.shape[1] % BLOCK:
            return RAGGED
        return FINE if place.layer == TOP else wanted
    if config.dtype == "float32":
        return "F32"
    return None if stored in PLAIN or stored in KNOWN else FINE
