"""Which tiles the products of a mixture of experts run with. Chosen by how many pairs an expert has on average: that is
known on the host, what was routed is not.

The last row of HALF is measured on an H200 at 8192 rows (`tests/kernels/gpu_moe.py --parts variants`: its "down" takes
6% off the block); all others come from compile-time study (registers, spills, shared memory).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from octavo.kernels.reference.squares import SIDE

SHARED_BYTES: Final = 227 << 10
"""What a program may use on sm_90."""


@dataclass(frozen=True, slots=True)
class Tile:
    """See moe_gemm.py. `swap`: weights are the left operand."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int
    swap: bool

    def shared_bytes(self, op: str, item: int = 2) -> int:
        """Of the pipeline; barriers come on top."""
        return self.stages * self.turn_bytes(2 if op == "gate_up" else 1, item)

    def turn_bytes(self, matrices: int, item: int) -> int:
        """What a turn of the loop over k loads, with so many matrices."""
        return item * (matrices * self.block_n + self.block_m) * self.block_k


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Rows and columns of a matrix that a program of moe_gemv.py reads at a time."""

    block_n: int
    block_k: int
    warps: int


HALF: Final[tuple[tuple[float, dict[str, Tile]], ...]] = (
    (10, {"gate_up": Tile(16, 64, 128, 3, 4, True), "down": Tile(16, 64, 128, 4, 4, True)}),
    (24, {"gate_up": Tile(32, 64, 128, 3, 4, True), "down": Tile(32, 64, 128, 4, 4, True)}),
    (96, {"gate_up": Tile(64, 64, 64, 4, 4, False), "down": Tile(64, 128, 64, 4, 4, False)}),
    (192, {"gate_up": Tile(128, 128, 64, 4, 8, False), "down": Tile(128, 128, 64, 4, 8, False)}),
    (math.inf, {"gate_up": Tile(128, 128, 64, 4, 8, False), "down": Tile(128, 256, 64, 3, 8, False)}),
)
"""(pairs an expert up to which it holds, tiles by op), of 2-byte numbers. Both products walk the same tiles of places:
their `block_m` is equal."""
HALF_SMALL: Final[tuple[tuple[float, dict[str, Tile]], ...]] = (
    *HALF[:3],
    (math.inf, {"gate_up": Tile(128, 64, 64, 4, 8, False), "down": Tile(128, 128, 64, 4, 8, False)}),
)
"""The same for devices that are `is_small`, whose sums of larger tiles do not fit into registers."""
EIGHT: Final[tuple[tuple[float, dict[str, Tile]], ...]] = (
    (10, {"gate_up": Tile(16, 128, 128, 3, 4, True), "down": Tile(16, 128, 128, 5, 4, True)}),
    (24, {"gate_up": Tile(32, 128, 128, 3, 4, True), "down": Tile(32, 128, 128, 5, 4, True)}),
    (96, {"gate_up": Tile(64, 128, 128, 3, 8, False), "down": Tile(64, 128, 128, 4, 8, False)}),
    (math.inf, {"gate_up": Tile(128, 128, 128, 3, 8, False), "down": Tile(128, 128, 128, 4, 8, False)}),
)
"""The same in e4m3. What the first product makes at a time (`block_n`) has one scale, so it is
the second one's `block_k`."""
EIGHT_SQUARES: Final[tuple[tuple[float, dict[str, Tile]], ...]] = (
    *EIGHT[:2],
    (96, {"gate_up": Tile(64, 128, 128, 3, 8, False), "down": Tile(64, 128, 128, 4, 8, False)}),
    (math.inf, {"gate_up": Tile(128, 64, 128, 3, 8, False), "down": Tile(128, 128, 64, 4, 8, False)}),
)
"""Of weights with a scale a square block, whose products take twice the registers; and of all on devices that are
`is_small`."""
PAIRS_PER_EXPERT: Final = tuple(most for most, _ in HALF if most < math.inf)
"""Where other tiles begin, in all tables."""
SINGLE: Final = Tile(16, 32, 32, 2, 4, False)
"""Of 4-byte numbers, at full precision."""

LEAST_COLUMNS: Final = 128
"""Blocks that divide k are at least so wide."""
WASTE: Final = 1.1
"""Columns of blocks that do not, as a multiple of k's."""
GATE_UP_ROWS: Final = RowBlocks(2, 2048, 4)
DOWN_ROWS: Final = RowBlocks(4, 256, 4)

LEAST: Final = 16
"""Sizes must be multiples of this: the least block of a product."""
LEAST_EIGHT: Final = 32
"""The same of products in e4m3."""
MAX_EXPERTS: Final = 512
"""What one program sorts by."""
MAX_COMPARED: Final = 256
"""What one program compares all with all of (decode steps in fused kernels)."""


def supports(width: int, inner: int, num_experts: int, top_k: int) -> bool:
    """Whether the kernels can run experts of these sizes."""
    return width % LEAST == 0 and inner % LEAST == 0 and top_k <= num_experts <= MAX_EXPERTS


def supports_eight(width: int, inner: int) -> bool:
    """Whether the kernels can run experts of these sizes in e4m3."""
    return width % LEAST_EIGHT == 0 and inner % LEAST_EIGHT == 0


def supports_squares(width: int, inner: int) -> bool:
    """Whether they apply scales of square blocks: no block reaches from one expert's matrix into the next."""
    return width % SIDE == 0 and inner % SIDE == 0


def tiles_for(
    pairs_per_expert: float, width: int, inner: int, item: int, *, squares: bool = False, small: bool = False
) -> dict[str, Tile]:
    """op -> tile for matrices [inner, width] (gate_up, two of them) and [width, inner] (down), `item` bytes a number.
    `squares`: blocks of e4m3 weights have scales. `small`: on a device that is `target.is_small`.

    Blocks shrink until they divide the matrix.
    """
    sizes = {"gate_up": (inner, width), "down": (width, inner)}
    eight, half = EIGHT_SQUARES if squares or small else EIGHT, HALF_SMALL if small else HALF
    table = {1: eight, 2: half}.get(item, ((math.inf, dict.fromkeys(sizes, SINGLE)),))
    chosen = next(tiles for most, tiles in table if pairs_per_expert <= most)
    return {op: fit_tile(tile, *sizes[op]) for op, tile in chosen.items()}


def fit_tile(tile: Tile, n: int, k: int) -> Tile:
    """The tile with blocks that divide n and k."""
    return replace(tile, block_n=math.gcd(n, tile.block_n), block_k=math.gcd(k, tile.block_k))


def fit_rows(blocks: RowBlocks, n: int, k: int) -> RowBlocks:
    """The blocks of rows, as far as they divide n and k. Where k has no large divisor (2880), the widest blocks that
    pass its end by little."""
    block_k = math.gcd(k, blocks.block_k)
    if block_k < min(k, LEAST_COLUMNS):
        block_k = blocks.block_k
        while -(-k // block_k) * block_k > WASTE * k:
            block_k //= 2
    return replace(blocks, block_n=math.gcd(n, blocks.block_n), block_k=block_k)
