"""Ours in the place of linear layers, norms, gated MLPs and experts of a Transformers class, where that is certain; a
line says what was put there, and what was left and why.

The class is on the meta device and has been run there (transformers_watch.py). Norms and MLPs are taken for ours when
a copy gives the same numbers (transformers_trials.py); on CUDA fused kernels run them then.

Shape suffixes: t tokens, m model dim.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from octavo.layers.activation import GatedActivation
from octavo.layers.linear import Linear
from octavo.layers.norm import LayerNorm, RMSNorm
from octavo.layers.parts import Parts
from octavo.models.transformers_experts import ExpertsMatch, try_experts
from octavo.models.transformers_linears import Kinds, Swap, SwappedLinear
from octavo.models.transformers_trials import (
    GatedMatch,
    NormMatch,
    UnlikeError,
    plain_attributes,
    try_gated_mlp,
    try_norm,
)
from octavo.models.transformers_watch import Calls

Match = TypeVar("Match", NormMatch, GatedMatch, ExpertsMatch)

NORM, MLP = re.compile("norm", re.IGNORECASE), re.compile("mlp|feedforward|ffn|glu", re.IGNORECASE)
EXPERTS = re.compile("Experts$")
"""Names of classes that are named in the report when they stay."""


class SwappedMLP(nn.Module):
    """down(act(gate) * up) in the place of a class's MLP, gate and up from one product."""

    def __init__(self, gate_up: SwappedLinear, act: str, down: SwappedLinear) -> None:
        super().__init__()
        self.gate_up, self.act, self.down = gate_up, GatedActivation(act), down

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., m] -> [..., m]."""
        gate_up_t2i = Linear.forward(self.gate_up, hidden.flatten(0, -2))
        hidden_tm = Linear.forward(self.down, self.act(gate_up_t2i))  # in rows of fp8 where kernels join them
        return hidden_tm.view(*hidden.shape[:-1], self.down.out_features)


@dataclass(slots=True)
class Replaced:
    """What of a class is ours now."""

    architecture: str
    splits: Counter[str] = field(default_factory=Counter)
    """Linear layers by how a plan cuts them."""
    num_linears: int = 0
    """That the class called."""
    can_be_rounded: bool = False
    """Quantization may change some of them."""
    norms: Counter[str] = field(default_factory=Counter)
    mlps: Counter[str] = field(default_factory=Counter)
    """By class, how many were replaced."""
    experts: Counter[str] = field(default_factory=Counter)
    """Mixtures, by the class of their experts."""
    left: dict[str, str] = field(default_factory=dict)
    """Norms and MLPs by class -> why not."""

    def __str__(self) -> str:
        """One line for people."""
        total = self.splits.total()
        cut = f" (cut by {self.splits['columns']} columns, {self.splits['rows']} rows)" if self.splits["rows"] else ""
        parts = [f"{total} of {self.num_linears} linear layers{cut}"]
        parts += [f"{counts.total()} {what}" for what, counts in (("norms", self.norms), ("gated MLPs", self.mlps))]
        parts += [f"{self.experts.total()} mixtures of experts"] if self.experts else []
        left = "".join(f"; not {name}: {reason}" for name, reason in sorted(self.left.items()))
        return f"{', '.join(parts)}{left}"


def replace_layers(
    causal: Any, below: str, calls: Calls, mixers: Set[nn.Module], choose: Kinds, dtype: torch.dtype
) -> Replaced:
    """Put ours into a class on the meta device, among the modules whose names start with `below`."""
    swap = Swap.find(causal, below, calls, mixers, choose, dtype)
    replaced = Replaced(type(causal).__name__)
    replaced.num_linears = sum(
        isinstance(module, nn.Linear | Conv1D) and name in calls.given for name, module in _below(causal, below)
    )
    replaced.can_be_rounded = any(swap.can_be_rounded(causal, name) for name in swap.whole)
    _replace_norms(causal, below, swap, replaced)
    _replace_mlps(causal, below, swap, replaced)
    _replace_experts(causal, below, calls, swap, replaced)
    for name in list(swap.whole):
        linear = swap.linear(causal, name)
        replaced.splits[linear.split] += 1
        causal.set_submodule(name, linear)
    return replaced


def _below(causal: Any, below: str) -> Iterator[tuple[str, nn.Module]]:
    for name, module in list(causal.named_modules()):
        if name.startswith(below):
            yield name, module


def _replace_norms(causal: Any, below: str, swap: Swap, replaced: Replaced) -> None:
    tried: dict[Hashable, NormMatch | UnlikeError] = {}
    for name, module in _below(causal, below):
        kind = type(module).__name__
        if type(module) is nn.LayerNorm or not NORM.search(kind) or not swap.may_replace(name):
            continue
        width = swap.width(name)
        key = plain_attributes(module), width
        if key not in tried:
            tried[key] = _tried(partial(try_norm, module, width, swap.dtype))
        match = tried[key]
        if isinstance(match, UnlikeError):
            replaced.left[kind] = str(match)
        else:
            causal.set_submodule(name, match.make(torch.device("meta")))
            replaced.norms[kind] += 1


def _tried(trial: Callable[[], Match]) -> Match | UnlikeError:
    """A trial's match, or why there is none."""
    try:
        return trial()
    except UnlikeError as reason:
        return reason


def _replace_mlps(causal: Any, below: str, swap: Swap, replaced: Replaced) -> None:
    tried: dict[Hashable, GatedMatch | UnlikeError] = {}
    for name, module in _below(causal, below):
        kind = type(module).__name__
        children = {f"{name}.{child}" for child, part in module.named_children() if type(part) is nn.Linear}
        if not children or (len(children) != 3 and not MLP.search(kind)) or not swap.may_replace(name):
            continue
        width = swap.width(name)
        key = plain_attributes(module), width
        if key not in tried:
            tried[key] = _tried(partial(try_gated_mlp, module, width, swap.dtype))
        match = tried[key]
        if not isinstance(match, UnlikeError):
            match = _joined(causal, name, match, children, swap, replaced)
        if isinstance(match, UnlikeError) and MLP.search(kind):
            replaced.left[kind] = str(match)


def _joined(
    causal: Any, name: str, match: GatedMatch, children: set[str], swap: Swap, replaced: Replaced
) -> GatedMatch | UnlikeError:
    """Put an MLP of ours at a place, if nobody else has a hold on its parts."""
    parts = [f"{name}.{child}" for child in (match.gate, match.up) if child]
    if not children <= swap.whole.keys() or children & swap.read:
        return UnlikeError("its weights are read or shared elsewhere")
    if not swap.agree(causal, parts[0], parts[-1]):
        return UnlikeError("its gate and up are kept differently")
    gate_up, down = swap.linear(causal, *parts), swap.linear(causal, f"{name}.{match.down}")
    for linear, count in ((gate_up, len(parts)), (down, 1)):
        replaced.splits[linear.split] += count
    replaced.mlps[type(causal.get_submodule(name)).__name__] += 1
    causal.set_submodule(name, SwappedMLP(gate_up, match.act, down))
    for child in children:
        del swap.whole[child]
    return match


def _replace_experts(causal: Any, below: str, calls: Calls, swap: Swap, replaced: Replaced) -> None:
    tried: dict[Hashable, ExpertsMatch | UnlikeError] = {}
    for name, module in _below(causal, below):
        kind = type(module).__name__
        if not EXPERTS.search(kind) or isinstance(module, nn.ModuleList) or not swap.may_replace(name):
            continue
        key = plain_attributes(module), calls.shapes[name]
        if key not in tried:
            tried[key] = _tried(partial(try_experts, module, calls.shapes[name], swap.dtype))
        match = tried[key]
        if isinstance(match, UnlikeError):
            replaced.left[kind] = str(match)
            continue
        parts = Parts(swap.choose(name, False), swap.dtype, torch.device("meta"))
        causal.set_submodule(name, match.make(name, parts))
        replaced.experts[kind] += 1
        replaced.can_be_rounded = True


def use_kernels(model: nn.Module) -> None:
    """Run what was put there with fused kernels; `model` is on CUDA, its weights need not be there yet."""
    from octavo.layers.fused.fp8_joins import quantize_between  # these load Triton
    from octavo.layers.fused.joins import use_joins
    from octavo.layers.fused.support import DeviceTraits

    pdl = DeviceTraits.of(next(model.parameters()).device).has_dependent_launches
    use_joins(model, pdl=pdl)
    for module in model.modules():
        if isinstance(module, SwappedMLP):
            quantize_between(module.act, module.down, pdl=pdl)


def finish_norms(model: nn.Module) -> None:
    """Once, when the weights are filled; norms without weights have ones."""
    for module in model.modules():
        if isinstance(module, RMSNorm | LayerNorm):
            module.finish()
            if not module.has_weight:
                module.weight.fill_(1.0)
