"""A checkpoint's weights into the embedded decoder: each in its own format, or in what --dtype says.

Not here: where tensors lie in files (models/stored_weights.py), how matrices are packed (rust/cpu).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from octavo._core import EmbeddedDecoder
from octavo.config import ModelConfig
from octavo.models.description import Description
from octavo.models.plain_weights import as_float32, narrowed, random_weight
from octavo.models.stored_weights import PLAIN, Place, StoredWeight, places

if TYPE_CHECKING:
    from octavo.worker.base import Progress


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
            _load_matrix(decoder, place, weight, config.dtype)
        progress("weights", (done + 1) / len(wanted))


def _load_matrix(decoder: EmbeddedDecoder, place: Place, weight: StoredWeight, dtype: str) -> None:
    if weight.format in PLAIN and dtype != "float32":
        weight = narrowed(weight, dtype)
    rows, columns = place.shape
    wide = dtype == "float32"
    decoder.load_matrix(place.layer, place.role, weight.format, weight.read().data, rows, columns, wide=wide)
