"""What a mixture's launches (moe.py) are made from: a layer's weights and sizes, and the buffers between its kernels.

Shape suffixes: m rows, h model dim, e experts, i inner dim, f flat pairs (row * top_k + choice), s places, t tiles, o
features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
from torch import Tensor

from octavo.kernels.triton import moe_table
from octavo.kernels.triton.moe_table import Tile
from octavo.kernels.triton.skinny_table import BUCKETS, MAX_ROWS

ROUTER_K: Final = 128
"""Columns of the router that one program multiplies: its parts are this wide."""


@dataclass(frozen=True, slots=True)
class Experts:
    """One layer's weights: router [e, h], gate above up [e, 2 i, h], down [e, h, i]; and how rows are routed.

    Biases are the products', [e, 2 i] and [e, h]. `limit` and `slope` are of the clamped activation
    (reference/moe.py); a limit of 0 means silu(gate) * up.
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
        return moe_table.tiles_for(per_expert, self.width, self.inner, self.down_ehi.element_size())

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
class DecodeBuffers:
    """Everything between the kernels of a decode step, for MAX_ROWS rows."""

    logit_f: Tensor
    routing: Routing
    inner_to: Tensor
    """[places, inner] of the first product."""
    pair_to: Tensor
    """[pairs, width] of the second."""

    @classmethod
    def allocate(cls, experts: Experts) -> DecodeBuffers:
        """For experts of these sizes."""
        blocks = {bucket: experts.tiles(bucket)["gate_up"].block_m for bucket in BUCKETS}
        tiles = {bucket: experts.num_tiles(bucket, block) for bucket, block in blocks.items()}
        most = max(tiles.values())
        places = max(block * tiles[bucket] for bucket, block in blocks.items())
        weight = experts.down_ehi
        parts = triton.cdiv(experts.width, ROUTER_K)
        logits = torch.zeros(parts * MAX_ROWS * experts.num_experts, dtype=torch.float32, device=weight.device)
        routing = Routing.allocate(experts, MAX_ROWS, most, triton.cdiv(places, most))
        return cls(
            logit_f=logits,
            routing=routing,
            inner_to=torch.zeros(places, experts.inner, dtype=weight.dtype, device=weight.device),
            pair_to=torch.zeros(MAX_ROWS * experts.top_k, experts.width, dtype=weight.dtype, device=weight.device),
        )
