"""Tensors of a .gguf file under their Hugging Face names and values.

What the GGUF converters did to a checkpoint is undone here: names, the row order of Llama's Q and K, the 1 added to
Gemma's norms, quantization. Not here: the file's layout (gguf_file.py) and the hyper-parameters (gguf_config.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.errors import ModelError
from octavo.models.gguf_file import GGUFFile, GGUFTensor

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

SANDWICH_NAMES = {
    **BLOCK_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Gemma 2 and 3 have a norm before and after both halves of a layer."""

LAYER_NAMES = {"gemma2": SANDWICH_NAMES, "gemma3": SANDWICH_NAMES}
"""GGUF architecture -> names inside a layer; others: BLOCK_NAMES."""

PERMUTED = ("llama", "mistral")
"""Architectures whose Q and K rows the converters interleave (pairs of a rotation side by side)."""

SHIFTED_NORMS = ("gemma", "gemma2", "gemma3")
"""Architectures whose norms are stored with the 1 of `(1 + weight)` added in."""

NOT_WEIGHTS = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")
"""Tables that the config describes (`gguf_config.read_config` reads the ones that matter)."""

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
"""Types that are stored plainly; everything else is dequantized to float32."""


def hf_name(architecture: str, name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor, None for one that is not a weight. ModelError when it is unknown."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    if NOT_WEIGHTS.fullmatch(name):
        return None
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    names = LAYER_NAMES.get(architecture, BLOCK_NAMES)
    if match is None or match[2] not in names:
        raise ModelError(f"tensor {name} is not part of a {architecture} model that this version knows")
    return f"model.layers.{match[1]}.{names[match[2]]}.{match[3]}"


def tensor_names(file: GGUFFile) -> dict[str, GGUFTensor]:
    """Hugging Face name -> tensor. ModelError names the file and the tensor that can't be placed."""
    architecture = file.metadata["general.architecture"]
    names: dict[str, GGUFTensor] = {}
    for tensor in file.tensors.values():
        try:
            name = hf_name(architecture, tensor.name)
        except ModelError as e:
            raise ModelError(f"{file.path}: {e}") from None
        if name is not None:
            names[name] = tensor
    return names


def type_name(tensor: GGUFTensor) -> str:
    """Name of the tensor's ggml type, such as Q4_1."""
    from gguf.constants import GGMLQuantizationType

    return str(GGMLQuantizationType(tensor.type).name)


def stored_dtype(tensor: GGUFTensor) -> torch.dtype:
    """The torch type that the values come in: the file's own where it is a plain float, else float32."""
    return FLOATS.get(type_name(tensor), torch.float32)


def dequantize(file: GGUFFile, tensor: GGUFTensor) -> Tensor:
    """The tensor's values, [shape], in `stored_dtype`. ModelError names a type that can't be dequantized."""
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
