"""Filling a model's parameters from named checkpoint tensors, strictly: every tensor has one place of its shape, every
place gets its tensor. Not here: reading files (loader.py) and names of a family (the family's file).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from octavo.errors import ModelError
from octavo.layers.linear import Linear
from octavo.layers.moe import Merged, SparseMLP
from octavo.models.base import CausalLM
from octavo.models.checkpoint_names import IGNORABLE, misfit

EIGHT_BIT_DEVIATION = 100.0
"""Of dummy weights in e4m3, so that a channel's largest is near 448."""


def load_strict(
    slots: Mapping[str, Tensor],
    tied: Mapping[str, str],
    tensors: Iterable[tuple[str, Tensor]],
    merged: Mapping[str, Merged] | None = None,
) -> None:
    """Copy each tensor into `slots[name]` (cast to its dtype).

    `merged` tensors fill the slots of several names at once. `tied` maps names that share another name's slot (a tied
    head): such a tensor may be there, and must then equal what it is tied to. ModelError names what is missing,
    unexpected, of a wrong shape or type, or unequal.
    """
    missing = dict.fromkeys(slots)
    problems: dict[str, list[str]] = {"unexpected": [], "of a wrong shape or type": []}
    held: dict[str, Tensor] = {}
    for name, tensor in tensors:
        slot = slots.get(tied.get(name, name))
        whole = merged.get(name) if merged and slot is None else None
        if whole is not None:
            slot = whole.slot
        if slot is None:
            if not IGNORABLE.search(name):
                problems["unexpected"].append(name)
            continue
        for filled in whole.names if whole is not None else (name,):
            missing.pop(filled, None)
        if slot.shape != tensor.shape or tensor.is_floating_point() != slot.is_floating_point():
            found, wanted = (f"{list(shape)}" for shape in (tensor.shape, slot.shape))
            problems["of a wrong shape or type"].append(f"{name} is {tensor.dtype} {found}, not {wanted}")
        elif name in tied:
            held[name] = tensor
        else:
            slot.copy_(tensor)
    misfit({"missing": list(missing), **problems})
    _check_tied(slots, tied, held)


def _check_tied(slots: Mapping[str, Tensor], tied: Mapping[str, str], held: Mapping[str, Tensor]) -> None:
    for name, tensor in held.items():
        slot = slots[tied[name]]
        if not torch.equal(tensor.to(device=slot.device, dtype=slot.dtype), slot):
            raise ModelError(
                f"config.json ties {name} to {tied[name]} (tie_word_embeddings), but the checkpoint has both and "
                "they differ; set tie_word_embeddings to false if the checkpoint's own head is meant"
            )


def init_dummy_weights(model: CausalLM, seed: int) -> None:
    """Norms 1, everything else normal with deviation 0.02; the same for the same seed, device and dtype."""
    assert isinstance(model, nn.Module)
    for linear in linears_of(model):
        if linear.weight_scale is not None:
            linear.weight_scale.fill_(0.02 / EIGHT_BIT_DEVIATION)
    for mixture in mixtures_of(model):
        for scale in (mixture.gate_up_scale, mixture.down_scale):
            if scale is not None:
                scale.fill_(0.02 / EIGHT_BIT_DEVIATION)
    generators: dict[torch.device, torch.Generator] = {}
    for name, parameter in model.named_parameters():
        device = parameter.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        if name.endswith("_scale"):
            continue
        if parameter.ndim == 1 and name.endswith("weight"):
            parameter.fill_(1.0)
        elif parameter.dtype == torch.float8_e4m3fn:
            for part in parameter if parameter.ndim == 3 else (parameter,):
                wide = torch.empty(part.shape, dtype=torch.bfloat16, device=device)
                wide.normal_(0.0, EIGHT_BIT_DEVIATION, generator=generators[device]).clamp_(-448.0, 448.0)
                part.copy_(wide)
        else:
            parameter.normal_(0.0, 0.02, generator=generators[device])
    finish_products(model)


def linears_of(model: nn.Module) -> list[Linear]:
    """Every linear layer."""
    return [module for module in model.modules() if isinstance(module, Linear)]


def mixtures_of(model: nn.Module) -> list[SparseMLP]:
    """Every mixture of experts."""
    return [module for module in model.modules() if isinstance(module, SparseMLP)]


def finish_products(model: nn.Module) -> None:
    """Tell every linear layer and mixture of experts that it is filled."""
    for linear in linears_of(model):
        linear.method.finish(linear)
    for mixture in mixtures_of(model):
        mixture.finish()
