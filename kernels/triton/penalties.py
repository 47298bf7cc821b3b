"""Presence, frequency and repetition penalties in one launch: one pass over the logits of rows that have penalties,
none over those of others.

Shape suffixes: s slots, r rows, v vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TOKENS = 2048
"""Tokens of a program."""


@triton.jit(do_not_specialize_on_alignment=["slot_ptr"])
def penalty_kernel(
    logits_ptr, slot_ptr, in_prompt_ptr, count_ptr, repetition_ptr, frequency_ptr, presence_ptr, row_stride, vocab_size,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of a row."""
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    repetition = tl.load(repetition_ptr + slot)
    frequency = tl.load(frequency_ptr + slot)
    presence = tl.load(presence_ptr + slot)
    if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
        id_v = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        exists_v = id_v < vocab_size
        count_v = tl.load(count_ptr + slot * vocab_size + id_v, mask=exists_v, other=0)
        in_prompt_v = tl.load(in_prompt_ptr + slot * vocab_size + id_v, mask=exists_v, other=0)
        seen_v = (count_v > 0) | (in_prompt_v != 0)
        x_v = tl.load(logits_ptr + row * row_stride + id_v, mask=seen_v, other=0.0)
        x_v = tl.where(x_v > 0, tl.div_rn(x_v, repetition), x_v * repetition)
        x_v = x_v - frequency * count_v.to(tl.float32)
        x_v = x_v - tl.where(count_v > 0, presence, 0.0)
        tl.store(logits_ptr + row * row_stride + id_v, x_v, mask=seen_v)


def apply_penalties(
    logits_rv: Tensor,
    slot_r: Tensor,
    in_prompt_sv: Tensor,
    count_sv: Tensor,
    repetition_s: Tensor,
    frequency_s: Tensor,
    presence_s: Tensor,
) -> None:
    """As `kernels.reference.penalties.apply_penalties`, but for the last bit (products are fused); rows of logits and
    tables are dense."""
    num_rows, vocab_size = logits_rv.shape
    if num_rows:
        penalty_kernel[(triton.cdiv(vocab_size, TOKENS), num_rows)](
            logits_rv, slot_r, in_prompt_sv, count_sv, repetition_s, frequency_s, presence_s,
            logits_rv.stride(0), vocab_size, TOKENS=TOKENS, num_warps=4,
        )  # fmt: skip
