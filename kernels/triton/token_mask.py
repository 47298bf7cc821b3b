"""Tokens that a grammar forbids get -inf, in one launch that reads bits and only writes logits that change.

Shape suffixes: s slots, r rows, v vocabulary, w words of 32 tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TOKENS = 4096
"""Tokens of a program."""


@triton.jit(do_not_specialize_on_alignment=["slot_ptr"])
def token_mask_kernel(
    logits_ptr, slot_ptr, mask_ptr, row_stride, num_words, vocab_size,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of a row."""
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    id_v = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists_v = id_v < vocab_size
    word_v = tl.load(mask_ptr + slot * num_words + id_v // 32, mask=exists_v, other=-1)
    forbidden_v = ((word_v >> (id_v % 32)) & 1) == 0
    tl.store(logits_ptr + row * row_stride + id_v, float("-inf"), mask=exists_v & forbidden_v)


def apply_token_mask(logits_rv: Tensor, slot_r: Tensor, mask_sw: Tensor) -> None:
    """As `kernels.reference.token_mask.apply_token_mask`; rows of logits and masks are dense."""
    num_rows, vocab_size = logits_rv.shape
    if num_rows:
        token_mask_kernel[(triton.cdiv(vocab_size, TOKENS), num_rows)](
            logits_rv, slot_r, mask_sw, logits_rv.stride(0), mask_sw.shape[1], vocab_size,
            TOKENS=TOKENS, num_warps=4,
        )  # fmt: skip
