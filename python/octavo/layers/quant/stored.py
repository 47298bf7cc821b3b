"""How a checkpoint keeps its linear layers, as far as layers need to know. Pure: no torch. Who reads a config.json for
it: models/quantization.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Quantization:
    """`method` is a name of layers/quant/methods.py. Patterns are regular expressions for `re.match` on layer names."""

    method: str
    block: tuple[int, int] | None
    """Rows and columns that share a scale; None: a scale is a tensor's or a channel's."""
    targets: tuple[str, ...]
    ignored: tuple[str, ...]
    beginnings: tuple[str, ...] = ("model.",)
    """What layers' "model." may be called in the patterns. Several, of a text model within another: its place in the
    class of today and in those of former times."""

    def covers(self, layer: str) -> bool:
        """Whether the checkpoint keeps the layer quantized."""
        below = layer.removeprefix("model.")
        names = [layer] if below == layer else [beginning + below for beginning in self.beginnings]
        return _match(self.targets, names) and not _match(self.ignored, names)


def _match(patterns: tuple[str, ...], names: list[str]) -> bool:
    return any(re.match(pattern, name) for pattern in patterns for name in names)
