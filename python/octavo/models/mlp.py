"""The MLPs of native decoders' blocks: gated, plain, or experts with one MLP beside them that every token takes. Not
here: the mixture itself (layers/moe.py).

Shape suffixes: t tokens of the step, m model dim.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from octavo.layers.activation import GatedActivation, LearnedActivation, activation
from octavo.layers.fused.base import GatedWeights, Weights
from octavo.layers.linear import Linear
from octavo.layers.moe import Merged, SparseMLP
from octavo.layers.parts import Parts
from octavo.layers.weighed_sum import WeighedSum
from octavo.models.family import BlockSpec, Names

LEARNED = "xielu"
"""The activation that has parameters."""


class GatedMLP(nn.Module):
    """down(act(gate) * up), gate and up from one product."""

    def __init__(self, spec: BlockSpec, names: Names, parts: Parts) -> None:
        super().__init__()
        inner, outer = spec.intermediate_size, spec.hidden_size
        shards = {names.gate_up: 2 * inner} if names.gate_up else {names.gate: inner, names.up: inner}
        self.gate_up = parts.linear(outer, shards, bias=spec.mlp_bias)
        self.act = GatedActivation(spec.hidden_act)
        self.down = parts.linear(inner, {names.down: outer}, bias=spec.mlp_bias)

    def forward(self, hidden_tm: Tensor) -> Tensor:
        """[t, m] -> [t, m]."""
        result_tm: Tensor = self.down(self.act(self.gate_up(hidden_tm)))
        return result_tm

    def slots(self) -> dict[str, Tensor]:
        """Checkpoint names below the layer's prefix."""
        return {**self.gate_up.slots(), **self.down.slots()}

    def merged_slots(self) -> dict[str, Merged]:
        """No tensor of a checkpoint takes the place of several."""
        return {}

    def weights(self) -> GatedWeights:
        """The parameters, by what they are for."""
        return GatedWeights(weights_of(self.gate_up), weights_of(self.down))


class PlainMLP(nn.Module):
    """down(act(up))."""

    def __init__(self, spec: BlockSpec, names: Names, parts: Parts) -> None:
        super().__init__()
        inner, outer, bias = spec.intermediate_size, spec.hidden_size, spec.mlp_bias
        self.up = parts.linear(outer, {names.up: inner}, bias=bias)
        self.act = LearnedActivation(parts) if spec.hidden_act == LEARNED else activation(spec.hidden_act)
        self.act_name = names.act
        self.down = parts.linear(inner, {names.down: outer}, bias=bias)

    def forward(self, hidden_tm: Tensor) -> Tensor:
        """[t, m] -> [t, m]."""
        result_tm: Tensor = self.down(self.act(self.up(hidden_tm)))
        return result_tm

    def slots(self) -> dict[str, Tensor]:
        """Checkpoint names below the layer's prefix."""
        learned = self.act.slots(self.act_name) if isinstance(self.act, LearnedActivation) else {}
        return {**self.up.slots(), **self.down.slots(), **learned}

    def merged_slots(self) -> dict[str, Merged]:
        """No tensor of a checkpoint takes the place of several."""
        return {}


class SharedMLP(nn.Module):
    """A mixture of experts, and an MLP for every token, which a sigmoid may weigh."""

    def __init__(self, spec: BlockSpec, names: Names, sparse: SparseMLP, parts: Parts) -> None:
        super().__init__()
        self.names = names.shared
        prefix, whole = f"{self.names.mlp}.", self.names.gate_up
        inside = replace(
            names,
            gate=f"{prefix}gate_proj",
            up=f"{prefix}up_proj",
            gate_up=whole and f"{prefix}{whole}",
            down=f"{prefix}{self.names.down}",
        )
        self.sparse = sparse
        make = GatedMLP if spec.is_gated else PlainMLP
        self.shared = make(replace(spec, intermediate_size=spec.shared_size), inside, parts)
        self.join = WeighedSum(spec.hidden_size, parts) if self.names.gate else None

    def forward(self, hidden_tm: Tensor) -> Tensor:
        """[t, m] -> [t, m]."""
        shared_tm: Tensor = self.shared(hidden_tm)
        sparse_tm: Tensor = self.sparse(hidden_tm)
        result_tm: Tensor = sparse_tm + shared_tm if self.join is None else self.join(hidden_tm, shared_tm, sparse_tm)
        return result_tm

    def slots(self) -> dict[str, Tensor]:
        """Checkpoint names below the layer's prefix."""
        found = {**self.sparse.slots(), **self.shared.slots()}
        return found if self.join is None else found | {f"{self.names.gate}.weight": self.join.gate}

    def merged_slots(self) -> dict[str, Merged]:
        """The experts'."""
        return self.sparse.merged_slots()


def make_mlp(spec: BlockSpec, names: Names, parts: Parts) -> GatedMLP | PlainMLP | SparseMLP | SharedMLP:
    """What a block has."""
    if spec.experts is None:
        return (GatedMLP if spec.is_gated else PlainMLP)(spec, names, parts)
    sparse = SparseMLP(spec.hidden_size, spec.experts, spec.hidden_act, names.experts, parts)
    return SharedMLP(spec, names, sparse, parts) if spec.shared_size else sparse


def weights_of(linear: Linear) -> Weights:
    """A layer's parameters, by what they are for."""
    return Weights(linear.weight, linear.bias, linear.weight_scale, linear.share)
