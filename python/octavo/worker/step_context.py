"""The forward pass's view of a step, from its kind and its arrays: for steps that run, and for those that are only
compiled (build_kernels.py)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from octavo.attention.base import ForwardContext
from octavo.worker.batch import StepArrays
from octavo.worker.slots import Slots
from octavo.worker.step_kernels import PreparedTokens
from octavo.worker.step_kinds import StepKind


@dataclass(frozen=True, slots=True)
class HeaderParts:
    """What only the device knows of a step whose graph serves many; see `StepArenas`."""

    num_decode_rows_1: Tensor
    shared_2: Tensor


def step_context(
    kind: StepKind,
    arrays: StepArrays,
    tokens: PreparedTokens,
    slots: Slots,
    kv_cache: list[Tensor],
    header: HeaderParts,
    block_size: int,
) -> ForwardContext:
    """See `ForwardContext`. The parts of the header are used where the kind says so."""
    first, *more = slots.places(tokens.slot_mapping_gt)
    return ForwardContext(
        kv_cache=kv_cache,
        block_table_sb=first.block_table_sb,
        row_slot_r=arrays.row_slot_r,
        query_start_r=arrays.query_start_r,
        kv_len_r=arrays.kv_len_r,
        position_t=tokens.position_t,
        slot_mapping_t=first.slot_mapping_t,
        layer_groups=slots.layer_groups,
        more_places=more,
        block_size=block_size,
        num_rows=kind.num_rows,
        num_decode_rows=kind.num_decode_rows,
        num_tokens=kind.num_tokens,
        max_query_len=kind.max_query_len,
        max_kv_len=kind.max_kv_len,
        num_decode_rows_1=header.num_decode_rows_1 if kind.is_counted else None,
        shared_2=header.shared_2 if kind.reads_together else None,
    )
