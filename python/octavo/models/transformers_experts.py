"""Experts of a Transformers class, which its own router has chosen: Octavo's kernels in the place of its module that
holds all of them, [e, 2 i, m] (without gates [e, i, m]) and [e, m, i].

As everywhere (transformers_trials.py) a copy is tried first; and only what the kernels run is replaced. Not here: the
router, which stays the class's, and what is done with the sum.

Shape suffixes: t tokens, j choices of a token, m model dim, e experts, i inner dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from octavo.layers.chosen_experts import FIRST, ChosenExperts
from octavo.layers.linear import dense
from octavo.layers.moe import ExpertsSpec
from octavo.layers.parts import Parts
from octavo.models.transformers_trials import CPU, SCALES, TOLERANCE, UnlikeError

ACTS = ("silu", "gelu_pytorch_tanh", "gelu", "relu", "relu2")
"""The activations of the kernels, by a name in config.json."""
WIDTH, INNER = 16, 24
"""Of a tried copy; PyTorch's grouped products want multiples of 16 bytes."""


@dataclass(frozen=True, slots=True)
class ExpertsMatch:
    """Sizes of a module that is a mixture of MLPs, and their activation (of ACTS)."""

    width: int
    inner: int
    num_experts: int
    top_k: int
    act: str = ACTS[0]
    is_gated: bool = True

    def make(self, name: str, parts: Parts) -> ChosenExperts:
        """Ours without values, in the place `name` of a class."""
        spec = ExpertsSpec(self.num_experts, self.top_k, self.inner, is_gated=self.is_gated)
        return ChosenExperts(name, self.width, spec, self.act, parts)


def try_experts(module: nn.Module, given: Sequence[torch.Size], dtype: torch.dtype) -> ExpertsMatch:
    """Of a module, which may be on the meta device, that was given tensors of these shapes. UnlikeError."""
    own = dict(module.named_parameters())
    is_gated = FIRST[True] in own
    if own.keys() != {FIRST[is_gated], "down_proj"} or any(x.ndim != 3 or x.dtype != dtype for x in own.values()):
        raise UnlikeError("its parameters are no gate_up_proj (or up_proj) and down_proj of all experts")
    if len(given) != 3 or given[1] != given[2] or any(len(shape) != 2 for shape in given):
        raise UnlikeError("it is given something else than rows, experts and weights")
    num_experts, width, inner = own["down_proj"].shape
    match = ExpertsMatch(width, inner, num_experts, given[1][1], is_gated=is_gated)
    if own[FIRST[is_gated]].shape != (num_experts, (2 if is_gated else 1) * inner, width):
        raise UnlikeError("its matrices are turned or joined in another way")
    if not match.make("", Parts(dense, dtype, torch.device("meta"))).has_kernels:
        raise UnlikeError("no kernel runs experts of these sizes")
    for act in ACTS:
        alike = replace(match, act=act)
        if all(_same(module, own, alike, kind) for kind in dict.fromkeys((torch.float32, dtype))):
            return alike
    raise UnlikeError("it gives other numbers than our experts")


@torch.inference_mode()
def _same(module: nn.Module, own: dict[str, nn.Parameter], match: ExpertsMatch, dtype: torch.dtype) -> bool:
    """A copy with small matrices gives what ours gives."""
    generator = torch.Generator().manual_seed(1)
    small = replace(match, width=WIDTH, inner=INNER)
    ours = small.make("", Parts(dense, dtype, CPU))
    for parameter in (ours.gate_up, ours.down):
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    config = getattr(module, "config", None)
    shared: dict[int, Any] = {id(own[FIRST[match.is_gated]]): ours.gate_up, id(own["down_proj"]): ours.down}
    theirs = deepcopy(module, shared | {id(config): config})
    rows = torch.randn((len(SCALES), WIDTH), generator=generator) * torch.tensor(SCALES)[:, None]
    weight_tj = torch.rand((len(SCALES), match.top_k), generator=generator) + 0.1
    expert_tj = torch.rand((len(SCALES), match.num_experts), generator=generator).topk(match.top_k).indices
    x_tm, weight_tj = rows.to(dtype), weight_tj.to(dtype)
    try:
        wanted_tm = theirs(x_tm, expert_tj, weight_tj)
    except Exception:  # foreign code on other sizes than it was made for, any error means the same
        return False
    found_tm = ours(x_tm, expert_tj, weight_tj)
    if not isinstance(wanted_tm, Tensor) or wanted_tm.shape != found_tm.shape or wanted_tm.dtype != found_tm.dtype:
        return False
    error_t = (wanted_tm.float() - found_tm.float()).abs().amax(-1) / wanted_tm.float().abs().amax(-1).clamp_min(1e-30)
    return bool(error_t.max() <= 4 * TOLERANCE[dtype])
