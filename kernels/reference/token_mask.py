"""Tokens that a grammar forbids get -inf; the others keep their logits to the bit.

Shape suffixes: s slots, r rows, v vocabulary, w words of 32 tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply_token_mask(logits_rv: Tensor, slot_r: Tensor, mask_sw: Tensor) -> None:
    """Change logits in place. `mask_sw` (int32): bit i % 32 of word i // 32 says whether token i is allowed."""
    vocab_size = logits_rv.shape[1]
    bits = torch.arange(32, dtype=torch.int32, device=mask_sw.device)
    allowed_rwb = (mask_sw[slot_r].unsqueeze(2) >> bits) & 1
    logits_rv.masked_fill_(allowed_rwb.flatten(1)[:, :vocab_size] == 0, -torch.inf)
