"""Gives a Transformers model on the meta device its memory, and computes the buffers that no checkpoint holds.

Buffers (rotary frequencies, embedding scales) are computed by the class's own initialisation, with every parameter
marked as done; a buffer that it leaves untouched is an error, not garbage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from octavo.errors import ModelError

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rope types whose frequencies Transformers changes with the length of the sequence at hand."""

INITIALIZED = "_is_hf_initialized"
"""Transformers' mark of what its initialisation must leave alone (modules and tensors)."""


@dataclass(frozen=True, slots=True)
class FrozenRope:
    """A rotary embedding that was made static, and the frequencies (computed on the CPU) that it will have."""

    module: nn.Module
    frequency_f: Tensor


def freeze_rope(causal: Any, max_length: int) -> list[FrozenRope]:
    """Fix length-dependent rotary embeddings at the longest served length: packed rows have many lengths, and cached
    keys can't be rotated again. Up to the trained length, the frequencies are those of short sequences."""
    frozen = []
    for module in causal.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict) and any(value in LENGTH_DEPENDENT for value in kind.values()):
            raise ModelError("rope types that differ by layer and depend on the sequence's length are not supported")
        if isinstance(kind, str) and kind in LENGTH_DEPENDENT:
            with torch.device("cpu"):
                frequency_f, scale = ROPE_INIT_FUNCTIONS[kind](module.config, torch.device("cpu"), seq_len=max_length)
            module.rope_type, module.attention_scaling = "default", scale
            frozen.append(FrozenRope(module, frequency_f))
    return frozen


def materialize(causal: Any, device: torch.device, frozen: list[FrozenRope]) -> None:
    """Allocate parameters (uninitialised) and buffers (computed), but on the meta device. ModelError for a buffer that
    can't be computed."""
    if device.type == "meta":
        return
    causal.to_empty(device=device)
    causal.tie_weights()
    causal.requires_grad_(False)
    for module in causal.modules():
        module.__dict__.pop(INITIALIZED, None)
    for parameter in causal.parameters():
        setattr(parameter, INITIALIZED, True)
    stored = causal.state_dict().keys()
    computed = {name: x for name, x in causal.named_buffers() if name not in stored and x.is_floating_point()}
    for buffer in computed.values():
        buffer.fill_(torch.nan)
    causal.initialize_weights()
    for rope in frozen:
        rope.module.get_buffer("inv_freq").copy_(rope.frequency_f)
        rope.module.get_buffer("original_inv_freq").copy_(rope.frequency_f)
    left = [name for name, buffer in computed.items() if buffer.isnan().any()]
    left += [
        f"{name}.{attribute}"
        for name, module in causal.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, Tensor) and value.is_meta
    ]
    if left:
        raise ModelError(f"{type(causal).__name__}: can't compute {', '.join(left[:5])} from config.json")
