"""What a Transformers module computes, found out by trying a copy of it on random numbers: a norm that is one of ours,
or a gated MLP. A module is only taken for what it is when the results are the same, in fp32 and in the model's dtype.

Not here: what is put in its place (transformers_layers.py). Names and source are not looked at: only parameters, plain
attributes, and what comes out.

Shape suffixes: t rows of a trial, d the norm's width, m outer and i inner features of an MLP.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from octavo.layers.activation import ACTIVATIONS
from octavo.layers.norm import LayerNorm, NormSpec, RMSNorm

SCALES: Final = (1e-3, 0.1, 1.0, 1.0, 10.0, 100.0)
"""Of a trial's rows: small ones show a norm's epsilon, large ones limits."""
OUTER, INNER = 6, 10
"""A tried MLP's sizes: of each matrix, only its shape says what it is for."""
TOLERANCE: Final = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Of a row's largest number; in 16 bits one rounding."""
CPU = torch.device("cpu")


class UnlikeError(Exception):
    """The module is nothing that we have; the message says why, for people."""


@dataclass(frozen=True, slots=True)
class NormMatch:
    """Ours with this spec is the same, its weight kept in this dtype."""

    spec: NormSpec
    dim: int
    dtype: torch.dtype

    def make(self, device: torch.device) -> RMSNorm | LayerNorm:
        """A norm of ours without values."""
        kind = LayerNorm if self.spec.kind == "layer" else RMSNorm
        return kind(self.dim, self.spec, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class GatedMatch:
    """down(act(gate) * up): the names of the MLP's linear layers; `up` is empty where `gate` holds both, gate first."""

    gate: str
    up: str
    down: str
    act: str


def plain_attributes(module: nn.Module) -> tuple[Any, ...]:
    """What tells a module from others of its class: equal ones compute the same with equal parameters."""
    scalars = [(k, v) for k, v in vars(module).items() if isinstance(v, int | float | str | type(None))]
    children = [(name, type(child), repr(child)) for name, child in module.named_children()]
    own = [(name, tuple(x.shape), x.dtype) for name, x in module.named_parameters(recurse=False)]
    return type(module), tuple(scalars), tuple(children), tuple(own)


def try_norm(module: nn.Module, dim: int, dtype: torch.dtype) -> NormMatch:
    """Of a module over `dim` features that may be on the meta device, in a model of `dtype`. UnlikeError."""
    _check_given(dim)
    own = dict(module.named_parameters(recurse=False))
    if next(module.children(), None) is not None or next(module.buffers(), None) is not None:
        raise UnlikeError("it is made of parts")
    if own.keys() not in ({}.keys(), {"weight"}, {"weight", "bias"}) or any(x.shape != (dim,) for x in own.values()):
        raise UnlikeError("its parameters are no weight and bias of features")
    _check_takes_one(module)
    found = [
        match for match in _norms(module, dim, own, dtype) if _same_norm(match, module, own, torch.float32) is not None
    ]
    errors = {match: _same_norm(match, module, own, dtype) for match in found}
    fitting = {match: error for match, error in errors.items() if error is not None}
    if not fitting:
        raise UnlikeError("it gives other numbers than our norms")
    return min(fitting, key=fitting.__getitem__)


def _norms(module: nn.Module, dim: int, own: dict[str, nn.Parameter], dtype: torch.dtype) -> Iterator[NormMatch]:
    """What it may be. Any of its numbers may be the epsilon."""
    has_weight, has_bias = "weight" in own, "bias" in own
    dtype = own["weight"].dtype if has_weight else dtype
    for eps in dict.fromkeys(x for x in vars(module).values() if isinstance(x, float) and 0 < x < 0.1):
        yield NormMatch(NormSpec(eps, "layer", has_bias=has_bias, has_weight=has_weight), dim, dtype)
        if not has_bias:
            yield NormMatch(NormSpec(eps, has_weight=has_weight), dim, dtype)
        if not has_bias and has_weight:
            yield NormMatch(NormSpec(eps), dim, torch.float32)
            yield NormMatch(NormSpec(eps, shift=1.0), dim, torch.float32)


def _same_norm(match: NormMatch, module: nn.Module, own: dict[str, nn.Parameter], dtype: torch.dtype) -> float | None:
    """The mean error in a model of `dtype`; None where it is too large."""
    if not own or (match.dtype == own["weight"].dtype and match.spec.shift == 0.0):
        match = NormMatch(match.spec, match.dim, dtype)
    theirs, ours = _copy(module, {}).to(dtype), match.make(CPU)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in theirs.named_parameters():
        parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
        getattr(ours, name).copy_(parameter)
    ours.finish()
    return _difference(theirs, ours, _rows(match.dim, dtype, generator))


def try_gated_mlp(module: nn.Module, dim: int, dtype: torch.dtype) -> GatedMatch:
    """Of a module over `dim` features that may be on the meta device, in a model of `dtype`. UnlikeError."""
    _check_given(dim)
    linears = {name: child for name, child in module.named_children() if type(child) is nn.Linear}
    others = [child for name, child in module.named_children() if name not in linears]
    inside = next((type(part).__name__ for child in others if (part := _with_state(child)) is not None), None)
    if inside is not None:
        raise UnlikeError(f"it has {inside} inside")
    if (
        next(module.parameters(recurse=False), None) is not None
        or next(module.buffers(recurse=False), None) is not None
    ):
        raise UnlikeError("it has parameters of its own")
    if len(linears) not in (2, 3):
        raise UnlikeError(f"it has {len(linears)} linear layers")
    _check_takes_one(module)
    roles = [match for match in _gated(list(linears)) if _fits(match, linears)]
    if not roles:
        raise UnlikeError("its linear layers are no gate, up and down")
    found = [match for match in roles if _same_mlp(match, module, linears, torch.float32)]
    if not found or not _same_mlp(found[0], module, linears, dtype):
        raise UnlikeError("it gives other numbers than our gated MLPs")
    return found[0]


def _gated(names: list[str]) -> Iterator[GatedMatch]:
    for order in itertools.permutations(names):
        for act in ACTIVATIONS:
            yield GatedMatch(order[0], "" if len(order) == 2 else order[1], order[-1], act)


def _fits(match: GatedMatch, linears: dict[str, nn.Linear]) -> bool:
    """By shapes and biases."""
    gate, up, down = linears[match.gate], linears.get(match.up), linears[match.down]
    if up is None:
        return gate.out_features == 2 * down.in_features and gate.in_features == down.out_features
    same = (gate.in_features, gate.out_features, gate.bias is None) == (
        up.in_features,
        up.out_features,
        up.bias is None,
    )
    return same and (gate.in_features, gate.out_features) == (down.out_features, down.in_features)


def _same_mlp(match: GatedMatch, module: nn.Module, linears: dict[str, nn.Linear], dtype: torch.dtype) -> bool:
    """A small copy gives what our formula gives."""
    generator = torch.Generator().manual_seed(1)
    sizes = {match.gate: (OUTER, INNER), match.up: (OUTER, INNER), match.down: (INNER, OUTER)}
    if not match.up:
        sizes[match.gate] = (OUTER, 2 * INNER)
    small: dict[str, nn.Module] = {}
    for name, linear in linears.items():
        layer = nn.Linear(*sizes[name], bias=linear.bias is not None, dtype=dtype)
        for parameter in layer.requires_grad_(False).parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        small[name] = layer
    theirs = _copy(module, small)

    class Ours(nn.Module):
        def forward(self, x_tm: Tensor) -> Tensor:
            gate_ti = small[match.gate](x_tm)
            gate_ti, up_ti = (gate_ti, small[match.up](x_tm)) if match.up else gate_ti.chunk(2, dim=-1)
            result_tm: Tensor = small[match.down](ACTIVATIONS[match.act](gate_ti) * up_ti)
            return result_tm

    return _difference(theirs, Ours(), _rows(OUTER, dtype, generator)) is not None


def _check_given(dim: int) -> None:
    """UnlikeError for a module whose input has no one width (`Swap.width`)."""
    if not dim:
        raise UnlikeError("it is given something else than one tensor of the model's dtype")


def _check_takes_one(module: nn.Module) -> None:
    """UnlikeError where a call may give it more than one tensor."""
    taken = list(inspect.signature(module.forward).parameters.values())
    if len(taken) != 1 or taken[0].kind not in (taken[0].POSITIONAL_OR_KEYWORD, taken[0].POSITIONAL_ONLY):
        raise UnlikeError(f"its calls take {', '.join(x.name for x in taken)}")


def _with_state(child: nn.Module) -> nn.Module | None:
    """The first module in it with parameters or buffers."""
    return next((part for part in child.modules() if [*part.parameters(False), *part.buffers(False)]), None)


def _copy(module: nn.Module, children: dict[str, nn.Module]) -> nn.Module:
    """On the CPU, with other children (and the very config of the module, which may be large)."""
    shared: dict[int, Any] = {id(child): children[name] for name, child in module.named_children() if name in children}
    config = getattr(module, "config", None)
    copied = deepcopy(module, shared | {id(config): config})
    return copied if children else copied.to_empty(device=CPU)


def _rows(width: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """A trial's input [1, t, width], as packed rows are."""
    scale_t = torch.tensor(SCALES)[:, None]
    return (torch.randn((1, len(SCALES), width), generator=generator) * scale_t + 0.1 * scale_t).to(dtype)


def _difference(theirs: nn.Module, ours: nn.Module, x: Tensor) -> float | None:
    """The mean error of rows; None where one is too large, or theirs can't run so."""
    try:
        wanted, found = theirs(x), ours(x)
    except Exception:  # foreign code on other sizes than it was made for, any error means the same
        return None
    if not isinstance(wanted, Tensor) or wanted.shape != found.shape or wanted.dtype != found.dtype:
        return None
    error_t = (wanted.float() - found.float()).abs().amax(-1) / wanted.float().abs().amax(-1).clamp_min(1e-30)
    largest = error_t.max().item()
    return error_t.mean().item() if largest <= TOLERANCE[x.dtype] else None
