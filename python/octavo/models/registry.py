"""From a model's config to the class that runs it. Native families are a table; every other decoder goes through
transformers_backend.py. Whatever can't run is refused here, before a weight is read.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import nn

from octavo.errors import ModelError
from octavo.models.base import CausalLM
from octavo.models.config import NormalConfig
from octavo.models.decoder import Decoder, Family

NATIVE = {
    "LlamaForCausalLM": "octavo.models.llama:FAMILY",
    "MistralForCausalLM": "octavo.models.mistral:FAMILY",
    "Qwen2ForCausalLM": "octavo.models.qwen2:FAMILY",
    "Qwen3ForCausalLM": "octavo.models.qwen3:FAMILY",
}
"""Architecture (config.json `architectures[0]`) -> its `Family`."""


def is_native(architecture: str) -> bool:
    """Octavo runs it with its own layers."""
    return architecture in NATIVE


def build_model(
    config: NormalConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None = None,
    decode_kernels: str = "auto",
) -> CausalLM:
    """The model (an nn.Module too) with parameters allocated on `device`, uninitialised.

    `max_model_len` is the longest sequence that will be served (rotary tables reach that far; types whose frequencies
    depend on the length use it); None: the config's. `decode_kernels` is for native models (see `Decoder`). ModelError
    for an architecture that can't run.
    """
    check_supported(config)
    max_length = max_model_len or config.max_position_embeddings
    if is_native(config.architecture):
        module, attribute = NATIVE[config.architecture].split(":")
        family: Family = getattr(import_module(module), attribute)
        return Decoder(family, config, dtype=dtype, device=device, max_length=max_length, decode_kernels=decode_kernels)
    if decode_kernels == "fused":
        raise ModelError(f"--decode-kernels fused can't run {config.architecture}: use auto or plain")
    from octavo.models.transformers_backend import TransformersModel  # imports Transformers: seconds

    return TransformersModel(config, dtype=dtype, device=device, max_length=max_length)


def check_supported(config: NormalConfig) -> None:
    """ModelError for an encoder-decoder (quantized checkpoints are refused by `normalize_config`)."""
    if config.raw.get("is_encoder_decoder"):
        raise ModelError(f"{config.architecture} is an encoder-decoder; Octavo runs decoders")


def weight_bytes(config: NormalConfig, dtype: torch.dtype, max_model_len: int | None = None) -> int:
    """Bytes of parameters and buffers on the device, exact; allocates nothing. ModelError as `build_model`."""
    model = build_model(config, dtype=dtype, device=torch.device("meta"), max_model_len=max_model_len)
    assert isinstance(model, nn.Module)
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
