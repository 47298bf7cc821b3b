"""Presence, frequency and repetition penalties, in the order and with the meaning of octavo's sampling parameters.

Shape suffixes: s slots, r rows, v vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply_penalties(
    logits_rv: Tensor,
    slot_r: Tensor,
    in_prompt_sv: Tensor,
    count_sv: Tensor,
    repetition_s: Tensor,
    frequency_s: Tensor,
    presence_s: Tensor,
) -> None:
    """Change float32 logits in place: those of tokens in prompt (bool) or output (counted, int32) are divided by the
    repetition penalty if positive, else multiplied; then those in the output lose frequency * count + presence. A slot
    with penalties 1, 0, 0 keeps its logits to the bit."""
    count_rv = count_sv[slot_r]
    in_output_rv = count_rv > 0
    seen_rv = in_prompt_sv[slot_r] | in_output_rv
    repetition_r1 = repetition_s[slot_r].unsqueeze(1)
    scaled_rv = torch.where(logits_rv > 0, logits_rv / repetition_r1, logits_rv * repetition_r1)
    logits_rv.copy_(torch.where(seen_rv, scaled_rv, logits_rv))
    logits_rv.sub_(frequency_s[slot_r].unsqueeze(1) * count_rv)
    logits_rv.sub_(presence_s[slot_r].unsqueeze(1) * in_output_rv)
