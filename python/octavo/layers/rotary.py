"""Rotary position embedding: a table of cosines and sines, and the rotation of q and k.

Rotation pairs dimension i with i + rotary_dim / 2 (GPT-NeoX order, which most Hugging Face checkpoints use), or 2 i
with 2 i + 1 (GPT-J order: `RotarySpec.is_interleaved`). Where tokens have positions in three dimensions (images), each
angle goes by one of them (`RotarySpec.axes`). Not here: the angles of each type (frequencies.py).

Shape suffixes: t tokens, n heads (of q or of k), d head dim, r rotary_dim, f rotary_dim / 2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.layers.frequencies import Floats, RotarySpec, frequencies


def powers(theta: float, dim: int) -> Floats:
    """theta ** (0/dim, 2/dim, …), fp32 [f], to the bit what Transformers computes."""
    power_f: Tensor = theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    return power_f.numpy()


def rotate(x_tnd: Tensor, cos_sin_tr: Tensor, *, is_interleaved: bool = False) -> Tensor:
    """Rotate the first rotary_dim dims of every head in fp32; x's dtype. `cos_sin_tr` is [cosines f | sines f]."""
    rotary_dim = cos_sin_tr.shape[-1]
    cos_t1f, sin_t1f = cos_sin_tr.unsqueeze(1).chunk(2, dim=-1)
    x_tnr = x_tnd[..., :rotary_dim]
    first_tnf, second_tnf = (x_tnr[..., ::2], x_tnr[..., 1::2]) if is_interleaved else x_tnr.chunk(2, dim=-1)
    pair = first_tnf * cos_t1f - second_tnf * sin_t1f, second_tnf * cos_t1f + first_tnf * sin_t1f
    rotated_tnr = (torch.stack(pair, dim=-1).flatten(-2) if is_interleaved else torch.cat(pair, dim=-1)).to(x_tnd.dtype)
    if rotary_dim == x_tnd.shape[-1]:
        return rotated_tnr
    return torch.cat((rotated_tnr, x_tnd[..., rotary_dim:]), dim=-1)


class Rotary(nn.Module):
    """The table [max_length, r] (fp32: cosines, then sines), gathered once a step and applied in every layer.

    ModelError for an unknown type or an odd rotary_dim.
    """

    table: Tensor
    axis_r: Tensor

    def __init__(self, spec: RotarySpec, max_length: int, *, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.register_buffer("table", self._make_table(max_length, device), persistent=False)
        axis_r = torch.tensor(spec.axes * 2, dtype=torch.int64, device=device)
        self.register_buffer("axis_r", axis_r, persistent=False)

    def _make_table(self, max_length: int, device: torch.device) -> Tensor:
        values_f, scale = frequencies(self.spec, max_length, powers)
        if device.type == "meta":
            return torch.empty((max_length, self.spec.rotary_dim), dtype=torch.float32, device=device)
        frequency_f = torch.from_numpy(values_f)
        position = torch.arange(max_length, dtype=torch.float32, device=device)
        angle = position[:, None] * frequency_f.to(device)
        return torch.cat((angle.cos() * scale, angle.sin() * scale), dim=-1)

    def gather(self, position_t: Tensor) -> Tensor:
        """The step's rows of the table [t, r]. With `RotarySpec.axes`, positions may be [3, t]."""
        if position_t.ndim == 1:
            return self.table[position_t]
        column_r = torch.arange(self.table.shape[1], device=position_t.device)
        return self.table[position_t[self.axis_r].T, column_r]

    def forward(self, q_thd: Tensor, k_tgd: Tensor, cos_sin_tr: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated (q, k); `cos_sin_tr` comes from `gather`."""
        interleaved = self.spec.is_interleaved
        return (
            rotate(q_thd, cos_sin_tr, is_interleaved=interleaved),
            rotate(k_tgd, cos_sin_tr, is_interleaved=interleaved),
        )
