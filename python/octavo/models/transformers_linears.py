"""Linear layers of a Transformers class on the meta device, and ours in their place: each with its part in the class's
own plan for tensor parallelism, and its weights kept as `--quantization` says.

A layer is swapped if a run of the class has called it and nothing else shares its weight; GPT-2's turned ones too. It
stays wide where somebody reads its weight without a call, where it chooses experts, and where the checkpoint or
`--fp8-wide-…` say so. Not here: norms and MLPs (transformers_layers.py), and tensors (transformers_weights.py).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from octavo.layers.linear import Choice, Linear, Product, dense
from octavo.models.transformers_watch import Calls, Given

Split = Literal["columns", "rows", "none"]
"""How tensor parallelism may cut a layer: its outputs, its inputs, or not at all."""

SPLITS: Mapping[str, Split] = {
    "colwise": "columns",
    "packed_colwise": "columns",
    "colwise_gather_output": "columns",
    "rowwise": "rows",
    "packed_rowwise": "rows",
    "rowwise_split_input": "rows",
}
"""Transformers' names of them in `base_model_tp_plan`."""

Kinds = Callable[[str, bool], Choice]
"""The methods of the layers of a model, by (name, whether it is in a mixer)."""


class SwappedLinear(Linear):
    """Ours in the place of a class's, whose inputs have any number of dimensions before the last."""

    def __init__(self, *args: Any, split: Split, **options: Any) -> None:
        super().__init__(*args, **options)
        self.split = split

    def forward(self, x: Tensor) -> Tensor:
        """[..., i] -> [..., o]."""
        return self.method.apply(self, x.flatten(0, -2)).view(*x.shape[:-1], self.out_features)


@dataclass(frozen=True, slots=True)
class Swap:
    """How the linear layers of a class are made ours. Names are those of modules in the class."""

    called: Mapping[str, Set[Given | None]]
    """`Calls.given`."""
    read: Set[str]
    """`Calls.read`."""
    fixed: frozenset[str]
    """Names that stay the class's: of tied weights, of modules at several places, of the head."""
    plan: Mapping[str, str]
    mixers: tuple[str, ...]
    """Names of modules that attend."""
    choose: Kinds
    dtype: torch.dtype
    """The model's; layers that the class keeps in another one are not quantized."""
    whole: dict[str, nn.Linear | Conv1D] = field(default_factory=dict)
    """What can be swapped."""
    sources: dict[type[nn.Module], str] = field(default_factory=dict)
    """Code of classes: some ways through it no watched run takes (with kernels of other libraries)."""

    @classmethod
    def find(
        cls, causal: Any, below: str, calls: Calls, mixers: Set[nn.Module], choose: Kinds, dtype: torch.dtype
    ) -> Swap:
        """Of the modules whose name starts with `below`."""
        mixing = tuple(f"{name}." for name, module in causal.named_modules() if module in mixers)
        plan = dict(getattr(causal, "_tp_plan", None) or {})
        swap = cls(calls.given, calls.read, _fixed(causal), plan, mixing, choose, dtype)
        for name, module in causal.named_modules():
            if type(module) in (nn.Linear, Conv1D) and name.startswith(below) and swap.may_replace(name):
                swap.whole[name] = module
        return swap

    def may_replace(self, name: str) -> bool:
        """The module is called, and nobody else has a hold on it."""
        return name in self.called and name not in self.fixed

    def width(self, name: str) -> int:
        """Of the tensors that a module is given; 0: it is also given something else, or in another dtype."""
        (first, *others) = self.called[name]
        return 0 if others or first is None or first.dtype != self.dtype else first.width

    def split(self, name: str) -> Split:
        """By the class's plan, which has * for numbers."""
        return SPLITS.get(self.plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), ""), "none")

    def choice(self, causal: Any, name: str) -> Choice:
        """How a layer may keep its weights."""
        return self.choose(name, name.startswith(self.mixers)) if self.can_be_rounded(causal, name) else dense

    def can_be_rounded(self, causal: Any, name: str) -> bool:
        """Its weight is only multiplied with, in the model's dtype, and not by a router."""
        if name in self.read or self.whole[name].weight.dtype != self.dtype:
            return False
        path, _, own = name.rpartition(".")
        parent: nn.Module = causal.get_submodule(path)
        kind = type(parent)
        if kind not in self.sources:
            self.sources[kind] = inspect.getsource(kind)
        return f"{own}.weight" not in self.sources[kind] and not _chooses_experts(parent, own)

    def linear(self, causal: Any, *names: str) -> SwappedLinear:
        """Ours for one layer, or for several that read the same, on the meta device."""
        layers = [self.whole[name] for name in names]
        sizes = [tuple(x.weight.shape[::-1] if isinstance(x, Conv1D) else x.weight.shape) for x in layers]
        return SwappedLinear(
            sizes[0][1],
            {name: out_features for name, (out_features, _) in zip(names, sizes, strict=True)},
            bias=layers[0].bias is not None,
            dtype=layers[0].weight.dtype,
            device=torch.device("meta"),
            choose=self.choice(causal, names[0]),
            split=self.split(names[0]),
        )

    def agree(self, causal: Any, a: str, b: str) -> bool:
        """Two layers can be one: they keep their weights in the same way."""
        methods = [self.choice(causal, name)(_Shape.of(name, self.whole[name])) for name in (a, b)]
        return methods[0] is methods[1] and self.split(a) == self.split(b)


@dataclass(frozen=True, slots=True)
class _Shape(Product):
    """A layer that is not made yet."""

    in_features: int
    out_features: int
    shards: dict[str, int]

    @classmethod
    def of(cls, name: str, linear: nn.Linear | Conv1D) -> _Shape:
        out_features, in_features = linear.weight.shape
        return cls(in_features, out_features, {name: out_features})


def _fixed(causal: Any) -> frozenset[str]:
    """Modules whose weights are tied, that lie at several places, or that are the head."""
    tied = causal.all_tied_weights_keys
    fixed = {name.rpartition(".")[0] for name in (*tied.keys(), *tied.values())}
    places: dict[nn.Module, list[str]] = {}
    for name, module in causal.named_modules(remove_duplicate=False):
        places.setdefault(module, []).append(name)
    fixed |= {name for names in places.values() if len(names) > 1 for name in names}
    return frozenset(fixed | set(places.get(causal.get_output_embeddings(), ())))


def _chooses_experts(parent: nn.Module, name: str) -> bool:
    """A router: it stands beside experts, or in a module that is called one."""
    if re.search("router|gating|topkgate", type(parent).__name__, re.IGNORECASE):
        return True
    return hasattr(parent, "experts") and name != "gate_proj" and re.search("gate|router", name) is not None
