"""What a .gguf file's tensors are called in a Hugging Face checkpoint, and what its converters did to them.

Not here: the file's layout (gguf_file.py), values (gguf_tensors.py) and the hyper-parameters (gguf_config.py).
"""

from __future__ import annotations

import re

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
