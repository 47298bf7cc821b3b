"""The Mamba 2 layers of hybrids from a config.json: two sets of names for the same sizes. Not here: which layers they
are (layer_kinds.py), and Mamba 2 by itself (mamba2.py)."""

from __future__ import annotations

import math
from typing import Any

from octavo.errors import ModelError
from octavo.layers.state_space import StateSpaceSpec
from octavo.models.config import NormalConfig
from octavo.models.config_reader import Reader
from octavo.models.family import Names


def space_spec(config: NormalConfig) -> StateSpaceSpec:
    """Of Bamba, Granite 4 and Falcon-H1, whose fields begin with `mamba_`. ModelError: sizes that can't be."""
    reader = Reader(config.raw)
    heads, inner = reader.integer("mamba_n_heads"), reader.integer("mamba_expand") * config.hidden_size
    if reader.get("mamba_d_ssm") is not None:
        inner = reader.integer("mamba_d_ssm")
    given = reader.get("mamba_d_head")
    head_dim = inner // heads if given == "auto" else reader.integer("mamba_d_head")
    if heads * head_dim != inner:
        raise ModelError(f"config.json: {heads} mamba_n_heads of {head_dim} are not the {inner} features of the layer")
    return checked(
        StateSpaceSpec(
            hidden_size=config.hidden_size,
            num_heads=heads,
            head_dim=head_dim,
            state_dim=reader.integer("mamba_d_state"),
            num_groups=reader.integer("mamba_n_groups"),
            taps=reader.integer("mamba_d_conv"),
            norm_eps=config.norm_eps,
            has_bias=bool(reader.get("mamba_proj_bias")),
            has_conv_bias=bool(reader.get("mamba_conv_bias")),
            step_limits=step_limits(reader.get("time_step_limit")),
        )
    )


def checked(spec: StateSpaceSpec) -> StateSpaceSpec:
    """ModelError: heads can't be shared out among groups."""
    if spec.num_heads % spec.num_groups:
        raise ModelError(f"config.json: {spec.num_heads} Mamba heads are no multiple of {spec.num_groups} groups")
    return spec


def step_limits(value: Any) -> tuple[float, float]:
    """Of two numbers, as Transformers writes them too; all that is positive if nothing is said."""
    if value is None:
        return 0.0, math.inf
    try:
        low, high = (float(item["__float__"] if isinstance(item, dict) else item) for item in value)
    except (KeyError, TypeError, ValueError):
        raise ModelError(f"config.json: time_step_limit is {value!r}, not two numbers") from None
    return low, high


SPACE_NAMES = Names(
    final_norm="model.final_layernorm",
    mlp_norm="pre_ff_layernorm",
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
    recurrent="mamba",
)
"""Of Bamba and Falcon-H1."""

SPACE_DEFAULTS: dict[str, Any] = {
    "layer_types": None,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
"""Of the families that `space_spec` reads."""
