"""Which configuration a skinny product runs with: measured winners, and a rule for shapes that nobody measured.

Measured inside a chain of whole layers (alone, other configurations win) on one H200 at context 1024, one row's at 190
(tests/kernels/gpu_tune.py); Llama-3.1-8B's at 128 rows in a chain of products (gpu_ring.py there), its head alone.
Other `head` entries for more than one row are by analogy; everything else is a winner of that tuning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

MAX_ROWS: Final = 128
BUCKETS: Final = (1, 16, 32, 64, MAX_ROWS)
"""Rows are padded up to one of these (on chip only)."""
SHARED_BYTES: Final = 227 << 10
"""What a program may use on sm_90."""


@dataclass(frozen=True, slots=True)
class Gemv:
    """See gemv.py."""

    block_n: int
    block_k: int
    warps: int
    is_masked: bool = False
    """The last block may be wider than what is left of k."""

    def fits(self, op: str, n: int, k: int, item_bytes: int = 2) -> bool:
        """Blocks cover the matrix exactly."""
        return n % self.block_n == 0 and (k % self.block_k == 0 or (self.is_masked and k % 64 == 0))


@dataclass(frozen=True, slots=True)
class Ring:
    """See ring_gemm.py. `swap`: W is the left operand, so that rows may be fewer than the tensor core's 64."""

    block_m: int
    block_n: int
    block_k: int
    split_k: int
    stages: int
    swap: bool
    warps: int

    def shared_bytes(self, op: str, item_bytes: int = 2) -> int:
        """Of the ring; barriers come on top."""
        matrices = 2 if op == "gate_up" else 1
        return item_bytes * self.stages * (matrices * self.block_n + self.block_m) * self.block_k

    def fits(self, op: str, n: int, k: int, item_bytes: int = 2) -> bool:
        """Blocks cover the matrix exactly and the ring fits on chip."""
        covered = n % self.block_n == 0 and k % (self.split_k * self.block_k) == 0
        return covered and self.shared_bytes(op, item_bytes) + 1024 <= SHARED_BYTES


Config = Gemv | Ring
OPS: Final = ("qkv", "o", "gate_up", "down", "head")
"""n of gate_up is that of its output: the matrix has 2 n rows."""

TABLE: Final[dict[tuple[str, int, int], dict[int, Config]]] = {
    # Llama-3.1-8B
    ("qkv", 6144, 4096): {
        1: Gemv(4, 2048, 8),
        16: Ring(16, 64, 128, 1, 6, True, 4),
        32: Ring(32, 64, 128, 1, 6, True, 4),
        64: Ring(64, 64, 128, 1, 5, True, 4),
        128: Ring(128, 64, 128, 1, 4, False, 4),
    },
    ("o", 4096, 4096): {
        1: Gemv(8, 1024, 4),
        16: Ring(16, 64, 128, 4, 5, True, 4),
        32: Ring(32, 64, 128, 2, 6, True, 4),
        64: Ring(64, 32, 128, 1, 6, False, 4),
        128: Ring(128, 64, 128, 2, 4, True, 4),
    },
    ("gate_up", 14336, 4096): {
        1: Gemv(2, 2048, 4),
        16: Ring(16, 64, 128, 1, 3, True, 4),
        32: Ring(32, 64, 128, 1, 3, True, 4),
        64: Ring(64, 64, 128, 1, 2, True, 4),
        128: Ring(128, 128, 64, 1, 4, False, 8),
    },
    ("down", 4096, 14336): {
        1: Gemv(8, 1024, 4),
        16: Ring(16, 64, 128, 2, 6, True, 4),
        32: Ring(32, 64, 128, 2, 5, True, 4),
        64: Ring(64, 32, 128, 1, 6, False, 4),
        128: Ring(128, 64, 128, 2, 4, False, 8),
    },
    ("head", 128256, 4096): {
        1: Gemv(1, 2048, 4),
        16: Ring(16, 64, 128, 1, 5, True, 4),
        32: Ring(32, 64, 128, 1, 4, True, 4),
        64: Ring(64, 64, 64, 1, 6, False, 4),
        128: Ring(128, 128, 64, 1, 3, True, 4),
    },
    # Qwen3-0.6B
    ("qkv", 4096, 1024): {
        1: Gemv(8, 1024, 4),
        16: Ring(16, 64, 128, 1, 6, True, 4),
        32: Ring(32, 64, 128, 1, 4, True, 4),
        64: Ring(64, 16, 128, 1, 5, False, 4),
        128: Ring(128, 32, 128, 1, 4, False, 4),
    },
    ("o", 1024, 2048): {
        1: Gemv(4, 2048, 8),
        16: Ring(16, 64, 128, 4, 6, True, 4),
        32: Ring(32, 64, 128, 4, 5, True, 4),
        64: Ring(64, 32, 128, 2, 6, False, 4),
        128: Ring(128, 32, 128, 2, 4, False, 4),
    },
    ("gate_up", 3072, 1024): {
        1: Gemv(8, 1024, 4),
        16: Ring(16, 64, 128, 1, 3, True, 4),
        32: Ring(32, 64, 128, 1, 3, True, 4),
        64: Ring(64, 32, 128, 1, 3, False, 4),
        128: Ring(128, 32, 128, 1, 3, False, 4),
    },
    ("down", 1024, 3072): {
        1: Gemv(4, 1024, 4),
        16: Ring(16, 64, 128, 4, 4, True, 4),
        32: Ring(32, 64, 128, 4, 6, True, 4),
        64: Ring(64, 32, 128, 2, 6, False, 4),
        128: Ring(128, 32, 128, 2, 4, False, 4),
    },
    ("head", 151936, 1024): {
        1: Gemv(4, 512, 4),
        16: Ring(16, 64, 128, 1, 5, True, 4),
        32: Ring(32, 64, 128, 1, 4, True, 4),
        64: Ring(64, 64, 64, 1, 6, False, 4),
        128: Ring(128, 64, 64, 1, 4, False, 8),
    },
}

FP8_TABLE: Final[dict[tuple[str, int, int], dict[int, Config]]] = {
    # Llama-3.1-8B
    ("qkv", 6144, 4096): {
        1: Gemv(8, 2048, 4),
        16: Ring(16, 64, 256, 1, 4, True, 4),
        32: Ring(32, 64, 256, 1, 4, True, 4),
        64: Ring(64, 64, 256, 1, 4, True, 4),
        128: Ring(128, 64, 256, 1, 4, True, 4),
    },
    ("o", 4096, 4096): {
        1: Gemv(8, 2048, 8),
        16: Ring(16, 64, 256, 1, 4, True, 4),
        32: Ring(32, 64, 256, 1, 4, True, 4),
        64: Ring(64, 64, 256, 1, 4, True, 4),
        128: Ring(128, 32, 256, 1, 5, False, 4),
    },
    ("gate_up", 14336, 4096): {
        1: Gemv(4, 2048, 4),
        16: Ring(16, 64, 256, 1, 3, True, 4),
        32: Ring(32, 128, 256, 1, 3, True, 4),
        64: Ring(64, 64, 256, 1, 2, True, 4),
        128: Ring(128, 64, 128, 1, 3, False, 8),
    },
    ("down", 4096, 14336): {
        1: Gemv(8, 2048, 4),
        16: Ring(16, 64, 256, 2, 5, True, 4),
        32: Ring(32, 64, 256, 1, 8, True, 4),
        64: Ring(64, 64, 256, 2, 4, True, 4),
        128: Ring(128, 64, 256, 2, 4, False, 8),
    },
}
"""Matrices in e4m3: one row of bf16 times them, or more rows in e4m3 too. Tuned at 8 and 64 rows (context 1024), and at
1, 32 and 128 (190)."""

PLAIN: Final[dict[int, tuple[Config, ...]]] = {
    1: (Gemv(8, 512, 4), Gemv(8, 256, 4), Gemv(8, 128, 4), Gemv(8, 1024, 8, is_masked=True)),
    16: (Ring(16, 64, 128, 1, 3, True, 4), Ring(16, 64, 64, 1, 6, True, 4)),
    32: (Ring(32, 64, 128, 1, 3, True, 4), Ring(32, 64, 64, 1, 6, True, 4)),
    64: (Ring(64, 64, 128, 1, 3, True, 4), Ring(64, 64, 64, 1, 4, True, 4)),
    128: (Ring(128, 64, 64, 1, 4, True, 4),),
}
"""Fit every shape whose n and k are multiples of 64 (one row: of 8 and 64); taken when no measured one does."""

FP8_PLAIN: Final[dict[int, tuple[Config, ...]]] = {
    1: PLAIN[1],
    16: (Ring(16, 64, 256, 1, 3, True, 4), Ring(16, 64, 128, 1, 6, True, 4)),
    32: (Ring(32, 64, 256, 1, 3, True, 4), Ring(32, 64, 128, 1, 6, True, 4)),
    64: (Ring(64, 64, 256, 1, 2, True, 4), Ring(64, 64, 128, 1, 4, True, 4)),
    128: (Ring(128, 64, 128, 1, 4, True, 4),),
}
"""The same in e4m3; k must be a multiple of 128."""

SQUARES_TABLE: Final[dict[tuple[str, int, int], dict[int, Config]]] = {
    # Llama-3.1-8B
    ("qkv", 6144, 4096): {
        1: Gemv(8, 2048, 8),
        16: Ring(16, 64, 256, 1, 5, True, 4),
        32: Ring(32, 64, 256, 1, 4, True, 4),
        64: Ring(64, 64, 256, 1, 3, False, 4),
        128: Ring(128, 64, 256, 1, 2, False, 8),
    },
    ("o", 4096, 4096): {
        1: Gemv(4, 1024, 4),
        16: Ring(16, 64, 256, 4, 5, True, 4),
        32: Ring(32, 64, 256, 2, 4, True, 4),
        64: Ring(64, 32, 256, 2, 4, False, 4),
        128: Ring(128, 64, 256, 2, 2, False, 8),
    },
    ("gate_up", 14336, 4096): {
        1: Gemv(4, 2048, 4),
        16: Ring(16, 64, 256, 1, 3, True, 4),
        32: Ring(32, 64, 256, 1, 2, True, 4),
        64: Ring(64, 64, 128, 1, 4, False, 4),
        128: Ring(128, 32, 256, 1, 2, False, 4),
    },
    ("down", 4096, 14336): {
        1: Gemv(8, 2048, 4),
        16: Ring(16, 64, 256, 4, 5, True, 4),
        32: Ring(32, 64, 256, 4, 4, True, 4),
        64: Ring(64, 64, 256, 4, 3, False, 4),
        128: Ring(128, 64, 256, 2, 2, False, 8),
    },
}
"""The same with scales of squares, and of 128 features of rows: rings walk k by multiples of so many. Tuned at 1, 8,
32, 64 and 128 rows (context 190)."""

SQUARES_PLAIN: Final[dict[int, tuple[Config, ...]]] = {
    1: PLAIN[1],
    16: (Ring(16, 64, 128, 1, 6, True, 4),),
    32: (Ring(32, 64, 128, 1, 5, True, 4),),
    64: (Ring(64, 64, 128, 1, 4, True, 4),),
    128: (Ring(128, 64, 128, 1, 6, False, 8),),
}

TABLES: Final = {
    "half": (TABLE, PLAIN),
    "fp8": (FP8_TABLE, FP8_PLAIN),
    "squares": (SQUARES_TABLE, SQUARES_PLAIN),
}
"""By what the matrix is kept in."""


def bucket_for(num_rows: int) -> int:
    """The smallest bucket that holds the rows (at most MAX_ROWS)."""
    return next(bucket for bucket in BUCKETS if num_rows <= bucket)


def choose(op: str, n: int, k: int, bucket: int, *, fp8: bool = False, share: int = 0) -> Config | None:
    """The configuration for a product of `op` at a bucket: that of the measured shape nearest in log n and log k among
    those that fit this shape; None when the shape can't run. `fp8`: the matrix is in e4m3; so many of its rows `share`
    scales of squares (0: it has none)."""
    return next(candidates(op, n, k, bucket, fp8=fp8, share=share), None)


def candidates(op: str, n: int, k: int, bucket: int, *, fp8: bool = False, share: int = 0) -> Iterator[Config]:
    """Those that fit the shape, the best first. Rows of a block of a matrix with squares have one scale."""
    table, plain = TABLES["squares" if share else "fp8" if fp8 else "half"]
    item_bytes = 1 if fp8 else 2

    def distance(shape: tuple[str, int, int]) -> float:
        return abs(math.log(shape[1] / n)) + abs(math.log(shape[2] / k))

    near = sorted((shape for shape in table if shape[0] == op), key=distance)
    found = (*(table[shape][bucket] for shape in near), *plain[bucket])
    return (config for config in found if config.fits(op, n, k, item_bytes) and share % config.block_n == 0)
