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

    def covers(self, layer: str) -> bool:
        """Whether the checkpoint keeps the layer quantized."""
        is_target = any(re.match(pattern, layer) for pattern in self.targets)
        return is_target and not any(re.match(pattern, layer) for pattern in self.ignored)
