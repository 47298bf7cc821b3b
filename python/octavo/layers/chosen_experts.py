"""A mixture of experts without a router: whoever calls it has chosen already. Matrices of all experts lie in one tensor
in checkpoints, as Transformers 5 writes them. The products are those of moe.py.

Shape suffixes: t tokens, j choices of a token, m model dim.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from octavo.kernels.triton.target import runs_kernels
from octavo.layers.linear import Choice, Form
from octavo.layers.moe import ExpertNames, ExpertsSpec, Merged, SparseMLP
from octavo.layers.parts import Parts

FIRST: Final = {True: "gate_up_proj", False: "up_proj"}
"""Whether experts are gated -> what checkpoints call the first product."""


class ChosenExperts(SparseMLP):
    """Called with rows, the experts of each, and their weights. `name` is its place in a checkpoint."""

    def __init__(self, name: str, hidden_size: int, spec: ExpertsSpec, hidden_act: str, parts: Parts) -> None:
        super().__init__(hidden_size, spec, hidden_act, ExpertNames(experts=name), parts)
        self.router = parts.parameter(0, hidden_size)

    def _form(self, choose: Choice, hidden_size: int) -> Form:
        """Tensors of all experts in one have scales of channels."""
        form = super()._form(choose, hidden_size)
        return "channels" if form == "squares" else form

    def forward(self, hidden_tm: Tensor, expert_tj: Tensor, weight_tj: Tensor) -> Tensor:  # type: ignore[override]
        """[t, m] -> [t, m]."""
        if not (self.has_kernels and runs_kernels(hidden_tm.device)):
            return self._by_expert(hidden_tm, expert_tj, weight_tj)
        from octavo.kernels.triton.moe import mix  # loads Triton

        shape = self.spec.num_experts, hidden_tm.shape[1]
        experts = self.for_kernels(hidden_tm.new_empty(()).expand(shape))
        return mix(experts, hidden_tm.contiguous(), (expert_tj.int().contiguous(), weight_tj.float().contiguous()))

    def slots(self) -> dict[str, Tensor]:
        """By a checkpoint's names."""
        return {name: merged.slot for name, merged in self.merged_slots().items()}

    def merged_slots(self) -> dict[str, Merged]:
        """The same: each tensor holds all experts."""
        first = FIRST[self.spec.is_gated]
        places: dict[str, Tensor] = {first: self.gate_up, "down_proj": self.down}
        if self.gate_up_scale is not None and self.down_scale is not None:
            places |= {f"{first}_scale": self.gate_up_scale, "down_proj_scale": self.down_scale}
        named = {f"{self.names.experts}.{name}": slot for name, slot in places.items()}
        return {name: Merged(slot, (name,)) for name, slot in named.items()}
