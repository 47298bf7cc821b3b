"""What a mixture's launches (moe_launches.py) are made from: a layer's weights and sizes, and the buffers
between its kernels.

Shape suffixes: m rows, h model dim, e experts, i inner dim, f flat pairs (row * top_k + choice), s places, t tiles, g
groups of inner features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
from torch import Tensor

from octavo.kernels.reference.quantize_rows import FP8
from octavo.kernels.reference.squares import SIDE
from octavo.kernels.triton import moe_table
from octavo.kernels.triton.moe_table import Tile
from octavo.kernels.triton.skinny_table import BUCKETS, MAX_ROWS
from octavo.kernels.triton.target import is_small

ROUTER_K: Final = 128
"""Columns of the router that one program multiplies: its parts are this wide."""
ROW_NUMBERS = FP8
"""How rows are kept on their way into an fp8 product. (Triton's interpreter rounds wrongly: tests keep them wide.)"""


@dataclass(frozen=True, slots=True)
class ExpertScales:
    """fp32 scales of experts in e4m3: of output channels, gate_up [e, 2 i] (or [e, i]) and down [e, h]; or of squares
    of `block` rows and columns, gate_up [e, 2 i / block, h / block] and down [e, h / block, i / block]."""

    gate_up: Tensor
    down: Tensor
    block: int = 0

    @classmethod
    def of(cls, gate_up: Tensor, down: Tensor) -> ExpertScales:
        """Scales of channels, or (with an axis more) of squares of the one side that kernels know."""
        return cls(gate_up, down, SIDE if down.ndim == 3 else 0)


@dataclass(frozen=True, slots=True)
class Experts:
    """One layer's weights: router [e, h], gate above up [e, 2 i, h] (not `is_gated`: up alone, [e, i, h]), down
    [e, h, i]; and how rows are routed.

    Biases are the products', as long as their matrices are high. `limit` and `slope` are of the clamped activation
    (reference/moe.py); a limit of 0 means another one, by its name in reference/activations.py.
    """

    router_eh: Tensor
    gate_up_e2ih: Tensor
    down_ehi: Tensor
    top_k: int
    renormalize: bool
    gate_up_bias_e2i: Tensor | None = None
    down_bias_eh: Tensor | None = None
    limit: float = 0.0
    slope: float = 1.0
    scales: ExpertScales | None = None
    """Of matrices in e4m3."""
    router_bias_e: Tensor | None = None
    """Decode steps add it to the router's logits; other rows come with finished ones."""
    activation: str = "silu"
    is_gated: bool = True

    @property
    def block(self) -> int:
        """Side of the squares that have scales; 0: there are none."""
        return 0 if self.scales is None else self.scales.block

    @property
    def num_experts(self) -> int:
        return self.router_eh.shape[0]

    @property
    def width(self) -> int:
        return self.router_eh.shape[1]

    @property
    def inner(self) -> int:
        return self.down_ehi.shape[2]

    def tiles(self, num_rows: int) -> dict[str, Tile]:
        """How both products are cut for so many rows."""
        per_expert = num_rows * self.top_k / self.num_experts
        item = self.down_ehi.element_size()
        small = is_small(self.down_ehi.device)
        return moe_table.tiles_for(per_expert, self.width, self.inner, item, squares=self.block > 0, small=small)

    def num_tiles(self, num_rows: int, block_m: int) -> int:
        """Tiles that so many rows can need at most: every expert has a started one, whatever the routing."""
        pairs = num_rows * self.top_k
        started = min(self.num_experts, pairs)
        return started + (pairs - started) // block_m


@dataclass(frozen=True, slots=True)
class Routing:
    """Between the router and the products."""

    expert_f: Tensor
    """int32, a pair each."""
    weight_f: Tensor
    """fp32."""
    scale_m: Tensor
    """fp32: 1 / rms of each row."""
    pair_s: Tensor
    expert_t: Tensor

    @classmethod
    def allocate(cls, experts: Experts, num_rows: int, num_tiles: int, block_m: int) -> Routing:
        """Uninitialised, for so many rows in tiles of `block_m` places."""
        device, pairs = experts.router_eh.device, num_rows * experts.top_k

        def empty(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(count, dtype=dtype, device=device)

        return cls(
            expert_f=empty(pairs),
            weight_f=empty(pairs, torch.float32),
            scale_m=empty(num_rows, torch.float32),
            pair_s=empty(num_tiles * block_m),
            expert_t=empty(num_tiles),
        )


@dataclass(frozen=True, slots=True)
class InnerRows:
    """What the first product makes of every place: numbers [s, i], and in fp8 a scale (fp32) for each of its tiles'
    groups of features, [s, g] flat."""

    number_si: Tensor
    scale_f: Tensor

    @classmethod
    def allocate(cls, experts: Experts, places: int, groups: int, dtype: torch.dtype) -> InnerRows:
        """Uninitialised; numbers are in `dtype` but for experts in e4m3."""
        device, is_fp8 = experts.down_ehi.device, experts.scales is not None
        return cls(
            torch.empty(places, experts.inner, dtype=ROW_NUMBERS if is_fp8 else dtype, device=device),
            torch.empty(places * groups if is_fp8 else 1, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """Everything between the kernels of a decode step, for MAX_ROWS rows."""

    logit_f: Tensor
    routing: Routing
    number_mh: Tensor
    """Rows of the first product in e4m3."""
    inner: InnerRows
    one_ji: Tensor
    """What the first product makes of one row."""
    pair_fh: Tensor
    """[pairs, width] of the second."""

    @classmethod
    def allocate(cls, experts: Experts) -> DecodeBuffers:
        """For experts of these sizes."""
        tiles = {bucket: experts.tiles(bucket)["gate_up"] for bucket in BUCKETS}
        counts = {bucket: experts.num_tiles(bucket, tile.block_m) for bucket, tile in tiles.items()}
        most = max(counts.values())
        places = max(tile.block_m * counts[bucket] for bucket, tile in tiles.items())
        groups = max(experts.inner // tile.block_n for tile in tiles.values())
        is_fp8, device = experts.scales is not None, experts.down_ehi.device
        dtype = experts.router_eh.dtype if is_fp8 else experts.down_ehi.dtype
        parts = triton.cdiv(experts.width, ROUTER_K)

        def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            logit_f=empty(parts * MAX_ROWS * experts.num_experts, dtype=torch.float32),
            routing=Routing.allocate(experts, MAX_ROWS, most, triton.cdiv(places, most)),
            number_mh=empty(MAX_ROWS if is_fp8 else 1, experts.width, dtype=ROW_NUMBERS if is_fp8 else dtype),
            inner=InnerRows.allocate(experts, places, groups, dtype),
            one_ji=empty(experts.top_k, experts.inner),
            pair_fh=empty(MAX_ROWS * experts.top_k, experts.width),
        )
