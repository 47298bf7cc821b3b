"""A Llama in wider matrices that computes the same: what formats of 256-column blocks need of a model of 576 columns.

Hidden channels, heads and inner channels are added whose weights are zero. A norm's mean square is then over more
channels, which its gain and epsilon make up for. Not here: files and formats (weight_files.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Fields = dict[str, Any]

BLOCK = 256
"""Columns of a block."""


def whole(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a model has, or is to have. Queries and keys are those of all heads."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int

    @staticmethod
    def of(fields: Fields) -> Sizes:
        """From a GGUF file's keys without the architecture's name."""
        heads = fields["attention.head_count"]
        return Sizes(
            fields["embedding_length"],
            fields["feed_forward_length"],
            heads,
            fields["attention.head_count_kv"],
            fields["embedding_length"] // heads,
        )

    def padded(self) -> Sizes:
        """The least sizes of whole blocks, with as many query heads to a KV head and as wide heads."""
        group = self.heads // self.kv_heads
        width = group * self.head_dim
        kv_heads = next(n for n in range(self.kv_heads, self.kv_heads + BLOCK) if n * width % BLOCK == 0)
        hidden = max(whole(self.hidden), kv_heads * width)
        assert hidden == kv_heads * width, "a head's width follows from the hidden size in these files"
        return Sizes(hidden, whole(self.inner), kv_heads * group, kv_heads, self.head_dim)

    def shape(self, part: str) -> tuple[int | None, ...]:
        """Of a tensor of this part (None: as it is)."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int | None, ...]] = {
            "attn_q": (query, self.hidden),
            "attn_k": (key, self.hidden),
            "attn_v": (key, self.hidden),
            "attn_output": (self.hidden, query),
            "ffn_gate": (self.inner, self.hidden),
            "ffn_up": (self.inner, self.hidden),
            "ffn_down": (self.hidden, self.inner),
            "attn_norm": (self.hidden,),
            "ffn_norm": (self.hidden,),
            "output_norm": (self.hidden,),
            "token_embd": (None, self.hidden),
            "output": (None, self.hidden),
        }
        return shapes[part]


def pad_fields(fields: Fields) -> Fields:
    """The keys that change."""
    old = Sizes.of(fields)
    new = old.padded()
    return {
        "embedding_length": new.hidden,
        "feed_forward_length": new.inner,
        "attention.head_count": new.heads,
        "attention.head_count_kv": new.kv_heads,
        "attention.layer_norm_rms_epsilon": fields["attention.layer_norm_rms_epsilon"] * old.hidden / new.hidden,
    }


def padding(fields: Fields) -> Callable[[str, Floats], Floats]:
    """A function that widens a tensor (GGUF name, values in rows)."""
    old = Sizes.of(fields)
    new = old.padded()

    def pad(name: str, x: Floats) -> Floats:
        part = name.split(".")[-2]
        shape = [size or x.shape[i] for i, size in enumerate(new.shape(part))]
        wide = np.pad(x, [(0, size - have) for size, have in zip(shape, x.shape, strict=True)])
        return wide * np.float32((old.hidden / new.hidden) ** 0.5) if part.endswith("norm") else wide

    return pad
