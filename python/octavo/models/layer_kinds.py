"""What the layers of hybrids are, from the many ways in which a config.json says it: attention or a recurrent layer, or
an MLP by itself. Pure: no torch.
"""

from __future__ import annotations

from octavo.errors import ModelError
from octavo.models.config_reader import Reader

RECURRENT, ATTENTION, MLP, EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
OTHER_NAMES = {"mamba": RECURRENT, "mamba2": RECURRENT, "attention": ATTENTION}
LETTERS = {"M": RECURRENT, "*": ATTENTION, "-": MLP, "E": EXPERTS}
"""Of `hybrid_override_pattern`."""
UNKNOWN_ELSEWHERE = (RECURRENT, "recurrent", "mamba")
"""Layer types that no family has but hybrids, whose `DEFAULTS` have `layer_types`."""


def num_layers_of(reader: Reader) -> int:
    """`num_hidden_layers`, or as many as are listed where a family goes by its list."""
    listed = _listed(reader) if reader.model_type == "nemotron_h" else None
    return reader.integer("num_hidden_layers") if listed is None else len(listed)


def read_layer_kinds(reader: Reader, layers: int) -> tuple[str, ...]:
    """Of a hybrid's layers; empty for other families. ModelError: a list of another length, or of unknown names."""
    if "layer_types" not in reader.defaults:
        for kind in reader.raw.get("layer_types") or ():
            if kind in UNKNOWN_ELSEWHERE:
                raise ModelError(f"config.json: layers of type {kind} are not supported in {reader.model_type} models")
        return ()
    kinds = _listed(reader)
    if kinds is None:
        kinds = _counted(reader, layers)
    known = set(LETTERS.values()) if reader.model_type == "nemotron_h" else {RECURRENT, ATTENTION}
    if len(kinds) != layers or not known.issuperset(kinds):
        raise ModelError(f"config.json: layer_types is {kinds!r}, not a list of {layers} of {', '.join(sorted(known))}")
    return tuple(kinds)


def _listed(reader: Reader) -> list[str] | None:
    for name in ("layers_block_type", "layer_types"):
        types = reader.raw.get(name)
        if isinstance(types, list) and types:
            return [OTHER_NAMES.get(kind, kind) if isinstance(kind, str) else repr(kind) for kind in types]
    pattern = reader.raw.get("hybrid_override_pattern")
    return [LETTERS.get(letter, letter) for letter in pattern] if isinstance(pattern, str) and pattern else None


def _counted(reader: Reader, layers: int) -> list[str]:
    """By the layers that attend: each so-manieth, or by number."""
    attending: set[int] = set()
    if reader.get("full_attention_interval") is not None:
        step = reader.integer("full_attention_interval")
        attending = {layer for layer in range(layers) if (layer + 1) % step == 0}
    indices = reader.get("attn_layer_indices")
    if isinstance(indices, list):
        attending = set(indices)
    return [ATTENTION if layer in attending else RECURRENT for layer in range(layers)]
