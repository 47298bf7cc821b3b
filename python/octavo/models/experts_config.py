"""Which layers of a model have mixtures of experts, and how large, from its config.json. Not here: how tokens are
routed (the family's file). Pure: no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import ModelError
from octavo.models.config_reader import Reader
from octavo.models.layer_kinds import EXPERTS, read_layer_kinds


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A decoder's mixtures of experts: of each token the `top_k` that a router likes best."""

    num_experts: int
    top_k: int
    intermediate_size: int
    """Of one expert."""
    renormalize: bool
    """The weights of the chosen are divided by their sum."""
    is_sparse: tuple[bool, ...]
    """Of each layer: it has experts (otherwise a plain MLP)."""


def read_experts(reader: Reader, layers: int) -> ExpertsConfig | None:
    """Layer i has experts if i + 1 is a multiple of `decoder_sparse_step`, i is not below `first_k_dense_replace` nor
    past `moe_layer_end_index`, and `mlp_only_layers` does not name it; or `moe_layers` names it,
    or `mlp_layer_types` (of Nemotron-H: the layers' kinds) says so. None for models without experts."""
    if "num_experts" not in reader.defaults or reader.get("num_experts") == 0:
        return None
    num_experts, top_k = _of_all_layers(reader, "num_experts"), _of_all_layers(reader, "num_experts_per_tok")
    if top_k > num_experts:
        raise ModelError(f"config.json: num_experts_per_tok {top_k} is more than there are experts ({num_experts})")
    dense = reader.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in dense):
        raise ModelError(f"config.json: mlp_only_layers is {dense!r}, not a list of layer numbers")
    step, first = reader.integer("decoder_sparse_step", 1), int(reader.number("first_k_dense_replace", 0))
    end = reader.number("moe_layer_end_index", -1)
    last = end if end >= 0 else layers - 1
    kinds = reader.raw.get("mlp_layer_types")
    sparse = reader.get("moe_layers")
    if reader.model_type == "nemotron_h":
        sparse = [i for i, kind in enumerate(read_layer_kinds(reader, layers)) if kind == EXPERTS]
    if isinstance(kinds, list):
        sparse = [i for i, kind in enumerate(kinds) if kind == "sparse"]
    is_sparse = (
        (i in sparse if isinstance(sparse, list) else (i + 1) % step == 0 and first <= i <= last and i not in dense)
        for i in range(layers)
    )
    has_own_size = reader.get("moe_intermediate_size") is not None
    return ExpertsConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=reader.integer("moe_intermediate_size" if has_own_size else "intermediate_size"),
        renormalize=bool(reader.get("norm_topk_prob")),
        is_sparse=tuple(is_sparse),
    )


def _of_all_layers(reader: Reader, name: str) -> int:
    """A number, or a list with the same one for every layer."""
    value = reader.get(name)
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        return Reader({**reader.raw, name: value[0]}).integer(name)
    return reader.integer(name)
