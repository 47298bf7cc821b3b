"""Random steps for the kernels of recurrent layers: rows over shuffled blocks of states, with NaN wherever nothing may
be read.

Shape suffixes: t tokens, r rows, b blocks, c channels, h heads, z numbers of a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.kernels.reference.gated_delta import DeltaShape, DeltaWeights
from octavo.kernels.reference.state_rows import StateRows
from octavo.kernels.reference.state_space import StateSpaceShape, StateSpaceWeights

TAPS = 4


@dataclass(frozen=True)
class Layer:
    """What one layer gets: all that the operations of both kinds take."""

    shape: StateSpaceShape | DeltaShape
    rows: StateRows
    input_tc: Tensor
    gate_ti: Tensor
    step_th: Tensor
    strength_th: Tensor
    tap_ck: Tensor
    conv_bias_c: Tensor
    vectors: tuple[Tensor, Tensor, Tensor]
    """Of heads, fp32."""
    state_bz: Tensor

    def with_states(self) -> Layer:
        """The same over its own copy of the states."""
        return replace(self, state_bz=self.state_bz.clone())

    @property
    def space_weights(self) -> StateSpaceWeights:
        return StateSpaceWeights(*self.vectors, step_limits=(0.01, 2.0))

    @property
    def delta_weights(self) -> DeltaWeights:
        return DeltaWeights(*self.vectors[:2])


def make_rows(
    rows: Sequence[tuple[int, int]], block_size: int, generator: torch.Generator, device: str
) -> tuple[StateRows, list[int], int]:
    """Rows of (tokens, positions with them), those of one token first; the blocks that hold a state before, and how
    many blocks there are."""
    rows = sorted(rows, key=lambda row: row[0] != 1)
    num_slots = len(rows) + 2
    slots = torch.randperm(num_slots, generator=generator)[: len(rows)].tolist()
    num_blocks = 1 + sum(-(-length // block_size) for _, length in rows)
    free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    table = torch.zeros(num_slots, max(length for _, length in rows) // block_size + 2, dtype=torch.int32)
    read, starts = [], [0]
    for slot, (count, length) in zip(slots, rows, strict=True):
        blocks = [free.pop() for _ in range(-(-length // block_size))]
        table[slot, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        starts.append(starts[-1] + count)
        if length > count:
            read.append(blocks[(length - count - 1) // block_size])

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    found = StateRows(
        block_table_sb=table.to(device),
        row_slot_r=ints(slots),
        query_start_r=ints(starts),
        kv_len_r=ints([length for _, length in rows]),
        block_size=block_size,
        num_rows=len(rows),
        num_decode_rows=sum(count == 1 for count, _ in rows),
        max_query_len=max(count for count, _ in rows),
    )
    return found, read, num_blocks


def make_layer(
    shape: StateSpaceShape | DeltaShape,
    rows: Sequence[tuple[int, int]],
    *,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str = "cpu",
) -> Layer:
    """A step. Inputs are parts of wider products, and blocks of states lie apart."""
    generator = torch.Generator().manual_seed(seed)
    found, read, num_blocks = make_rows(rows, block_size, generator, device)
    tokens = int(found.query_start_r[-1])
    heads = shape.num_heads if isinstance(shape, StateSpaceShape) else shape.num_value_heads

    def random(*sizes: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*sizes, generator=generator)

    product = random(tokens, shape.inner + shape.channels).to(device, dtype)
    steps = random(tokens, 2 * heads).to(device, dtype)
    size = shape.state_size + shape.channels * (TAPS - 1)
    whole = torch.full((num_blocks, size + 8), float("nan"))
    whole[read, :size] = random(len(read), size, scale=0.3)
    vectors = random(heads, scale=0.3), random(heads, scale=0.3) - 1.0, random(heads)
    return Layer(
        shape,
        found,
        product[:, shape.inner :],
        product[:, : shape.inner],
        steps[:, heads:],
        steps[:, :heads],
        random(shape.channels, TAPS, scale=0.5).to(device, dtype),
        random(shape.channels, scale=0.3).to(device, dtype),
        (vectors[0].to(device), vectors[1].to(device), vectors[2].to(device)),
        whole.to(device)[:, :size],
    )


def counted(layer: Layer, extra_rows: int, extra_tokens: int) -> Layer:
    """The same step as a graph has it: more rows and tokens than there are, and only the device knows how many."""
    rows = layer.rows
    actual, prompts = rows.num_decode_rows, rows.num_rows - rows.num_decode_rows

    def longer(values_r: Tensor, value: int) -> Tensor:
        return torch.cat((values_r, values_r.new_full((extra_rows,), value)))

    def padded(x: Tensor) -> Tensor:
        return torch.cat((x, x.new_full((extra_tokens, x.shape[1]), 3.0)))

    more = StateRows(
        block_table_sb=rows.block_table_sb,
        row_slot_r=longer(rows.row_slot_r, int(rows.row_slot_r[0])),
        query_start_r=longer(rows.query_start_r, int(rows.query_start_r[-1])),
        kv_len_r=longer(rows.kv_len_r, 1),
        block_size=rows.block_size,
        num_rows=rows.num_rows + extra_rows,
        num_decode_rows=rows.num_rows + extra_rows - prompts - 1,
        max_query_len=rows.max_query_len + extra_tokens,
        num_decode_rows_1=torch.tensor([actual], dtype=torch.int32, device=rows.kv_len_r.device),
    )
    width = layer.gate_ti.shape[1]
    product = padded(torch.cat((layer.gate_ti, layer.input_tc), 1))
    heads = layer.step_th.shape[1]
    steps = padded(torch.cat((layer.strength_th, layer.step_th), 1))
    return replace(
        layer,
        rows=more,
        gate_ti=product[:, :width],
        input_tc=product[:, width:],
        strength_th=steps[:, :heads],
        step_th=steps[:, heads:],
    )
