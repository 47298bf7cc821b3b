"""What an image encoder makes, kept in blocks of the KV cache's pool: the bytes of an image go on from block to block,
and within a block from lane to lane. Which blocks, and for how long, the control plane says
(rust/core/src/media.rs).

Shape suffixes: i tokens that stand for an image, m values a token, n blocks, b bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class OutputBlocks:
    """`lanes`: uint8 [num_blocks, bytes] each; outputs have `width` values of `dtype` a token."""

    lanes: Sequence[Tensor]
    width: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return sum(lane.shape[1] for lane in self.lanes)

    def write(self, blocks: Sequence[int], feature_im: Tensor) -> None:
        """An image's outputs into blocks that have room for them."""
        row_b = feature_im.contiguous().view(torch.uint8).flatten()
        used = math.ceil(len(row_b) / self.block_bytes)
        part_nb = row_b.new_zeros(used, self.block_bytes)
        part_nb.view(-1)[: len(row_b)] = row_b
        index_n = torch.tensor(blocks[:used], device=row_b.device)
        for lane, part in zip(self.lanes, torch.split(part_nb, self._sizes(), dim=1), strict=True):
            lane.index_copy_(0, index_n, part)

    def read(self, blocks: Sequence[int], num_tokens: int) -> Tensor:
        """[i, m] of an image with so many tokens."""
        num_bytes = num_tokens * self.token_bytes
        used = math.ceil(num_bytes / self.block_bytes)
        index_n = torch.tensor(blocks[:used], device=self.lanes[0].device)
        part_nb = torch.cat([lane.index_select(0, index_n) for lane in self.lanes], dim=1)
        return part_nb.view(-1)[:num_bytes].view(self.dtype).view(num_tokens, self.width)

    def _sizes(self) -> list[int]:
        return [lane.shape[1] for lane in self.lanes]
