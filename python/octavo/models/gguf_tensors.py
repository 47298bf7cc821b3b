"""Tensors of a .gguf file under their Hugging Face names and values, as torch tensors.

What the GGUF converters did to a checkpoint is undone here: names, the row order of Llama's Q and K, the 1 added to
Gemma's norms, quantization. Not here: the names (gguf_names.py), the file's layout (gguf_file.py) and the
hyper-parameters (gguf_config.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.errors import ModelError
from octavo.models.gguf_file import GGUFFile, GGUFTensor
from octavo.models.gguf_names import PERMUTED, SHIFTED_NORMS, tensor_names, type_name

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
"""Types that are stored plainly; everything else is dequantized to float32."""


def dequantize(file: GGUFFile, tensor: GGUFTensor) -> Tensor:
    """The tensor's values, [shape], in the file's type where that is in `FLOATS`, else in float32.

    ModelError names a type that can't be dequantized.
    """
    from gguf import quants
    from gguf.constants import GGMLQuantizationType

    dtype = FLOATS.get(type_name(tensor))
    if dtype is not None:
        return torch.frombuffer(bytearray(file.data(tensor)), dtype=dtype).reshape(tensor.shape)
    kind = GGMLQuantizationType(tensor.type)
    rows: npt.NDArray[Any] = np.frombuffer(file.data(tensor), dtype=np.uint8)
    rows = rows.reshape(*tensor.shape[:-1], -1)
    try:
        values = quants.dequantize(rows, kind)
    except NotImplementedError:
        raise ModelError(
            f"{file.path}: tensor {tensor.name} has type {kind.name}, which can't be dequantized"
        ) from None
    return torch.from_numpy(values).reshape(tensor.shape)


def restore(file: GGUFFile, name: str) -> Callable[[Tensor], Tensor]:
    """How a tensor's values (Hugging Face name `name`) become the checkpoint's again."""
    architecture = file.metadata["general.architecture"]
    if architecture in SHIFTED_NORMS and name.endswith("norm.weight"):
        return lambda t: t - 1
    if architecture in PERMUTED and ".self_attn." in name:
        heads: int = file.metadata[f"{architecture}.attention.head_count"]
        kv_heads: int = file.metadata.get(f"{architecture}.attention.head_count_kv", heads)
        if ".q_proj." in name:
            return lambda t: _unpermute(file, name, t, heads)
        if ".k_proj." in name:
            return lambda t: _unpermute(file, name, t, kv_heads)
    return lambda t: t


def _unpermute(file: GGUFFile, name: str, rows: Tensor, num_heads: int) -> Tensor:
    """Row order [head, i, half] -> [head, half, i]: the two halves of a head one after the other again."""
    if num_heads < 1 or rows.shape[0] % (2 * num_heads):
        raise ModelError(f"{file.path}: {rows.shape[0]} rows of {name} do not divide into {num_heads} heads")
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def iter_gguf(file: GGUFFile) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, values) of every weight, in the file's order."""
    for name, tensor in sorted(tensor_names(file).items(), key=lambda item: item[1].offset):
        yield name, restore(file, name)(dequantize(file, tensor))
