"""A checkpoint's weights as they lie in its files, for the embedded decoder: a place in the decoder, a format, bytes.

Names and shapes are checked against the description before a byte is read: every tensor has one place, every place its
tensor. Pure: no torch. Not here: what the formats' bytes mean (rust/cpu).
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from octavo.errors import ModelError
from octavo.models.checkpoint_names import IGNORABLE, misfit
from octavo.models.description import Description
from octavo.models.gguf_file import GGUFFile, GGUFTensor
from octavo.models.gguf_names import PERMUTED, SHIFTED_NORMS, tensor_names, type_name
from octavo.models.mapped import release_pages
from octavo.models.safetensors import StoredTensor, find_tensors
from octavo.models.sources import ModelSource

Bytes = npt.NDArray[np.uint8]

PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float32"}
"""Formats of plain numbers -> the dtype they are kept in. Others are quantized."""

TOP = -1
"""The layer of what belongs to none."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor belongs in the decoder: its layer (or `TOP`), what it is there, and its shape."""

    layer: int
    role: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A tensor of a checkpoint. `format` is a type of GGUF ("F32", "BF16", "Q4_1" …; safetensors' share the names)."""

    format: str
    shape: tuple[int, ...]
    read: Callable[[], Bytes] = field(repr=False)
    """Its bytes, row by row; mapped where nothing had to be changed."""
    shift: float = 0.0
    """Already added to the values (the 1 of Gemma's norms)."""
    release: Callable[[], None] = field(default=lambda: None, repr=False)
    """Nobody needs its bytes for now: their pages leave this process's memory."""


def places(model: Description) -> dict[str, Place]:
    """Checkpoint name -> place, of everything that the decoder needs."""
    hidden, inner, dim = model.hidden_size, model.intermediate_size, model.head_dim
    query, key = model.num_heads * dim, model.num_kv_heads * dim
    parts: dict[str, tuple[str, tuple[int, ...]]] = {
        "input_layernorm.weight": ("input_norm", (hidden,)),
        "self_attn.q_proj.weight": ("q", (query, hidden)),
        "self_attn.k_proj.weight": ("k", (key, hidden)),
        "self_attn.v_proj.weight": ("v", (key, hidden)),
        "self_attn.o_proj.weight": ("o", (hidden, query)),
        "mlp.gate_proj.weight": ("gate", (inner, hidden)),
        "mlp.up_proj.weight": ("up", (inner, hidden)),
        "mlp.down_proj.weight": ("down", (hidden, inner)),
    }
    if model.has_output_norms:
        parts["post_attention_layernorm.weight"] = ("attention_out_norm", (hidden,))
        parts["pre_feedforward_layernorm.weight"] = ("mlp_norm", (hidden,))
        parts["post_feedforward_layernorm.weight"] = ("mlp_out_norm", (hidden,))
    else:
        parts["post_attention_layernorm.weight"] = ("mlp_norm", (hidden,))
    if model.has_qk_norm:
        parts["self_attn.q_norm.weight"] = ("q_norm", (dim,))
        parts["self_attn.k_norm.weight"] = ("k_norm", (dim,))
    biased = {
        "self_attn.q_proj": model.qkv_bias,
        "self_attn.k_proj": model.qkv_bias,
        "self_attn.v_proj": model.qkv_bias,
        "self_attn.o_proj": model.o_bias,
        "mlp.gate_proj": model.mlp_bias,
        "mlp.up_proj": model.mlp_bias,
        "mlp.down_proj": model.mlp_bias,
    }
    for name in (name for name, is_biased in biased.items() if is_biased):
        role, shape = parts[f"{name}.weight"]
        parts[f"{name}.bias"] = (f"{role}_bias", shape[:1])
    found = {
        "model.embed_tokens.weight": Place(TOP, "embed", (model.vocab_size, hidden)),
        "model.norm.weight": Place(TOP, "final_norm", (hidden,)),
    }
    if not model.is_tied:
        found["lm_head.weight"] = Place(TOP, "head", (model.vocab_size, hidden))
    for layer in range(len(model.layer_windows)):
        for name, (role, shape) in parts.items():
            found[f"model.layers.{layer}.{name}"] = Place(layer, role, shape)
    return found


def stored_weights(source: ModelSource) -> dict[str, StoredWeight]:
    """Every tensor of a checkpoint by its Hugging Face name, from headers alone. ModelError: it can't be read."""
    if source.gguf_file is not None:
        return dict(_of_gguf(source.gguf_file))
    assert source.folder is not None
    maps: dict[Path, mmap.mmap] = {}
    return {name: _of_safetensors(tensor, maps) for name, tensor in find_tensors(source.folder).items()}


def check_fit(model: Description, stored: Mapping[str, StoredWeight]) -> None:
    """ModelError names tensors that are missing, unexpected, or of a wrong shape or type."""
    wanted = places(model)
    tied = {"lm_head.weight"} if model.is_tied else set()
    wrong = [
        f"{name} is {stored[name].format} {list(stored[name].shape)}, not {list(place.shape)}"
        for name, place in wanted.items()
        if name in stored and (stored[name].shape != place.shape or not _is_float(stored[name].format))
    ]
    unexpected = [name for name in stored if name not in wanted and name not in tied and not IGNORABLE.search(name)]
    misfit(
        {
            "missing": [name for name in wanted if name not in stored],
            "unexpected": unexpected,
            "of a wrong shape or type": wrong,
        }
    )
    for name in tied & stored.keys():
        _check_tied(name, stored[name], stored["model.embed_tokens.weight"])


def _is_float(kind: str) -> bool:
    return not re.fullmatch(r"[IU]\d+|BOOL", kind)


def _check_tied(name: str, head: StoredWeight, embed: StoredWeight) -> None:
    if (head.format, head.shape) != (embed.format, embed.shape) or not np.array_equal(head.read(), embed.read()):
        raise ModelError(
            f"config.json ties {name} to model.embed_tokens.weight (tie_word_embeddings), but the checkpoint has both "
            "and they differ; set tie_word_embeddings to false if the checkpoint's own head is meant"
        )


def _of_safetensors(tensor: StoredTensor, maps: dict[Path, mmap.mmap]) -> StoredWeight:
    def read() -> Bytes:
        if not tensor.num_bytes:
            return np.empty(0, dtype=np.uint8)
        if tensor.path not in maps:
            with tensor.path.open("rb") as f:
                maps[tensor.path] = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(maps[tensor.path], np.uint8, count=tensor.num_bytes, offset=tensor.offset)

    def release() -> None:
        if tensor.path in maps:
            release_pages(maps[tensor.path], tensor.offset, tensor.num_bytes)

    return StoredWeight(tensor.format, tensor.shape, read, release=release)


def _of_gguf(file: GGUFFile) -> Iterator[tuple[str, StoredWeight]]:
    architecture = file.metadata["general.architecture"]
    heads: int = file.metadata.get(f"{architecture}.attention.head_count", 0)
    kv_heads: int = file.metadata.get(f"{architecture}.attention.head_count_kv", heads)
    for name, tensor in tensor_names(file).items():
        paired = 0
        if architecture in PERMUTED and ".self_attn." in name:
            paired = heads if ".q_proj." in name else kv_heads if ".k_proj." in name else 0
        shift = 1.0 if architecture in SHIFTED_NORMS and name.endswith("norm.weight") else 0.0
        read, release = _gguf_reader(file, name, tensor, paired), partial(file.release, tensor)
        yield name, StoredWeight(type_name(tensor), tensor.shape, read, shift, release)


def _gguf_reader(file: GGUFFile, name: str, tensor: GGUFTensor, paired: int) -> Callable[[], Bytes]:
    """`paired`: heads whose rows the converter interleaved, [head, i, half] -> [head, half, i] again; 0: none."""

    def read() -> Bytes:
        rows = np.frombuffer(file.data(tensor), dtype=np.uint8)
        if not paired:
            return rows
        if tensor.shape[0] % (2 * paired):
            raise ModelError(f"{file.path}: {tensor.shape[0]} rows of {name} do not divide into {paired} heads")
        pairs = rows.reshape(paired, tensor.shape[0] // paired // 2, 2, -1)
        return np.ascontiguousarray(pairs.transpose(0, 2, 1, 3)).reshape(-1)

    return read
