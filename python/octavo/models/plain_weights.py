"""Numbers of stored weights where the embedded decoder does not take them as they are: vectors, other float types, and
random weights. Pure: no torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.models.stored_weights import StoredWeight

DEVIATION = 0.02
"""Of random matrices."""

Floats = npt.NDArray[np.float32]


def as_float32(weight: StoredWeight) -> Floats:
    """A tensor's values. ModelError for a format that can't be dequantized."""
    values = weight.read()
    if weight.format == "BF16":
        wide: Floats = (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return wide.reshape(weight.shape)
    kinds = {"F32": np.float32, "F16": np.float16, "F64": np.float64}
    if weight.format in kinds:
        return values.view(kinds[weight.format]).astype(np.float32).reshape(weight.shape)
    from gguf import GGMLQuantizationType, quants

    rows = values.reshape(*weight.shape[:-1], -1)
    numbers: Floats = quants.dequantize(rows, GGMLQuantizationType[weight.format])
    return numbers.reshape(weight.shape)


def narrowed(weight: StoredWeight, dtype: str) -> StoredWeight:
    """A tensor of plain numbers, rounded to "bfloat16" or "float16" if it is not of that type."""
    name = {"bfloat16": "BF16", "float16": "F16"}[dtype]
    if weight.format == name:
        return weight

    def read() -> npt.NDArray[np.uint8]:
        values = np.ascontiguousarray(as_float32(weight))
        if name == "F16":
            return values.astype(np.float16).reshape(-1).view(np.uint8)
        bits = values.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
        return rounded.astype(np.uint16).reshape(-1).view(np.uint8)

    return StoredWeight(name, weight.shape, read)


def widened(weight: StoredWeight) -> StoredWeight:
    """A tensor as float32, whatever it is stored in."""

    def read() -> npt.NDArray[np.uint8]:
        return np.ascontiguousarray(as_float32(weight)).reshape(-1).view(np.uint8)

    return StoredWeight("F32", weight.shape, read)


def random_weight(shape: tuple[int, ...], generator: np.random.Generator) -> StoredWeight:
    """Matrices normal with deviation 0.02; vectors 1."""

    def read() -> npt.NDArray[np.uint8]:
        if len(shape) == 1:
            return np.ones(shape, dtype=np.float32).view(np.uint8)
        values = generator.standard_normal(shape, dtype=np.float32) * np.float32(DEVIATION)
        return values.reshape(-1).view(np.uint8)

    return StoredWeight("F32", shape, read)
