"""Watches the modules of a Transformers class while it runs without values: which are called, with what, what they
return, and whose weights are read by somebody else than themselves.

Not here: what follows from it (transformers_probe.py, transformers_layers.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D


class Given(NamedTuple):
    """A tensor that a module was called with."""

    dtype: torch.dtype
    width: int
    """Its last dimension."""


@dataclass(slots=True)
class Calls:
    """What happened to the submodules of a model, by their names."""

    names: list[str] = field(default_factory=list)
    """In the order of their calls."""
    outputs: dict[str, Any] = field(default_factory=dict)
    given: dict[str, set[Given | None]] = field(default_factory=dict)
    """What each module got; None: something else than one tensor."""
    shapes: dict[str, tuple[torch.Size, ...]] = field(default_factory=dict)
    """Of the tensors that a module was given last, if there was nothing else."""
    read: set[str] = field(default_factory=set)
    """Linear layers whose weight somebody read without a call."""

    @contextmanager
    def recorded(self, root: nn.Module) -> Iterator[None]:
        """Record the calls inside."""
        handles = []
        for name, module in root.named_modules():
            if module is not root:
                handles += [
                    module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True),
                    module.register_forward_hook(partial(self._leave, name)),
                ]
        try:
            with _watched_weights(root, self.read):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, module: nn.Module, args: Any, options: Any) -> None:
        self.names.append(name)
        is_plain = len(args) == 1 and not options and isinstance(args[0], Tensor) and args[0].ndim > 0
        is_tensors = not options and all(isinstance(x, Tensor) for x in args)
        self.shapes[name] = tuple(x.shape for x in args) if is_tensors else ()
        self.given.setdefault(name, set()).add(Given(args[0].dtype, args[0].shape[-1]) if is_plain else None)

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.outputs[name] = output


def _find(module: Any, name: str) -> Any:
    """A watched layer's parameter; that its weight was asked for is noted."""
    if name == "weight":
        module.read.add(module.place)
    return nn.Module.__getattr__(module, name)


class WatchedLinear(nn.Linear):
    """A linear layer that tells when its weight is read from outside."""

    read: set[str]
    place: str

    __getattr__ = _find

    def forward(self, x: Tensor) -> Tensor:
        """The product, without a reader."""
        return F.linear(x, self._parameters["weight"], self._parameters["bias"])  # type: ignore[arg-type]


class WatchedConv1D(Conv1D):  # type: ignore[misc]
    """The same of GPT-2's linear layers, whose weight is turned."""

    read: set[str]
    place: str

    __getattr__ = _find

    def forward(self, x: Tensor) -> Tensor:
        """The product, without a reader."""
        return F.linear(x, self._parameters["weight"].t(), self._parameters["bias"])


WATCHED: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: WatchedLinear, Conv1D: WatchedConv1D}


@contextmanager
def _watched_weights(root: nn.Module, read: set[str]) -> Iterator[None]:
    """Linear layers note their names in `read` when their weight is read."""
    turned = [(name, module, type(module)) for name, module in root.named_modules() if type(module) in WATCHED]
    for name, module, kind in turned:
        module.__dict__ |= {"read": read, "place": name}
        module.__class__ = WATCHED[kind]
    try:
        yield
    finally:
        for _, module, kind in turned:
            module.__class__ = kind
            del module.__dict__["read"], module.__dict__["place"]


@contextmanager
def experts_on_meta(causal: Any) -> Iterator[None]:
    """Mixtures of experts run without looking at which experts are chosen, which meta tensors can't tell."""
    chosen = causal.get_experts_implementation()
    causal.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        causal.set_experts_implementation(chosen)
