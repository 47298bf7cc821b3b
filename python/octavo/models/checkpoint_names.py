"""How a checkpoint that does not fit its config.json is told, and which of its tensors nobody needs. Pure: no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from octavo.errors import ModelError

IGNORABLE = re.compile(
    r"(^|\.)rotary_emb\.(\w+_)?inv_freq$"  # computed from the config
    r"|(^|\.)(attn|attention)\.(bias|masked_bias)$"  # causal masks of old GPT-2 and GPT-NeoX checkpoints
    r"|(^|\.)rotary_emb\.(cos|sin)_cached$"
)
"""Tensors that some checkpoints carry and no model needs; only names that the model does not have are looked up."""

MAX_NAMED = 5
"""Names that an error lists of each kind."""


def misfit(problems: Mapping[str, Sequence[str]]) -> None:
    """ModelError when a kind of problem ("missing" …) has tensors."""
    described = [_describe(kind, names) for kind, names in problems.items() if names]
    if described:
        raise ModelError("the checkpoint does not fit its config.json: " + "; ".join(described))


def _describe(kind: str, names: Sequence[str]) -> str:
    """ "3 tensors missing (a, b, c)"."""
    shown = ", ".join(names[:MAX_NAMED]) + (", …" if len(names) > MAX_NAMED else "")
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} {kind} ({shown})"
