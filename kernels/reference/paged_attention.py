"""Attention of packed query rows over a paged KV cache, row by row in fp32. Every attention backend computes this.

Shape suffixes: t tokens, r rows, s slots, b blocks, h query heads, g KV heads, q a row's queries, k keys, d head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.reference.kv_write import as_stored


def gather_row(kv_cache: Tensor, block_s: Tensor, start: int, end: int, value_dim: int = 0) -> tuple[Tensor, Tensor]:
    """K and V, both fp32 [g, end - start, d], at positions start .. end of the row whose block ids are `block_s`; in a
    cache without V, that is the first `value_dim` dims of K."""
    block_size = kv_cache.shape[3]
    first = start // block_size
    blocks = block_s[first : (end + block_size - 1) // block_size].long()
    pages = as_stored(kv_cache)[blocks].view(kv_cache.dtype)
    pages = pages.float().permute(1, 2, 0, 3, 4).flatten(2, 3)  # [2, g, blocks * block_size, d]
    pages = pages[:, :, start - first * block_size : end - first * block_size]
    return pages[0], pages[0, ..., :value_dim] if value_dim else pages[1]


def attend_row(
    q_qhd: Tensor,
    k_gkd: Tensor,
    v_gkd: Tensor,
    visible_qk: Tensor,
    scale: float,
    soft_cap: float,
    sink_h: Tensor | None = None,
) -> Tensor:
    """Softmax attention of one row, fp32 [q, h, V's dims]; query head j reads KV head j // (h / g). The softmax of head
    j has one more score, sink_h[j], that weighs nothing."""
    queries, heads, dim = q_qhd.shape
    groups = k_gkd.shape[0]
    q = q_qhd.float().reshape(queries, groups, heads // groups, dim)
    scores = torch.einsum("qghd,gkd->ghqk", q, k_gkd) * scale
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~visible_qk, -torch.inf)
    if sink_h is not None:
        sinks = sink_h.float().view(groups, -1, 1, 1).expand(-1, -1, queries, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)[..., : k_gkd.shape[1]]
    return torch.einsum("ghqk,gkd->qghd", weights, v_gkd).reshape(queries, heads, v_gkd.shape[-1])


def paged_attention(
    q_thd: Tensor,
    kv_cache: Tensor,
    block_table_sb: Tensor,
    row_slot_r: Tensor,
    query_start_r: Tensor,
    kv_len_r: Tensor,
    *,
    num_rows: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    chunk: int = 0,
    value_dim: int = 0,
    sink_h: Tensor | None = None,
) -> Tensor:
    """Attention output [t, h, d] in q's dtype; tokens outside the rows get zeros.

    kv_cache [num_blocks, 2, g, block_size, d] already holds this step's K and V. Query i of a row with n queries
    stands at position kv_len - n + i and sees the positions up to its own, at most `window` of them (0 = all), of its
    own run of `chunk` positions (0 = of all). A cache [num_blocks, 1, g, block_size, d] holds no V: it is the first
    `value_dim` dims of K, and as many has the output. `sink_h`: see `attend_row`.
    """
    out = q_thd.new_zeros(*q_thd.shape[:2], value_dim or q_thd.shape[2])
    starts = query_start_r[: num_rows + 1].tolist()
    slots, lengths = row_slot_r[:num_rows].tolist(), kv_len_r[:num_rows].tolist()
    for row in range(num_rows):
        first, last, length = starts[row], starts[row + 1], lengths[row]
        if first == last:
            continue
        position_q = torch.arange(length - (last - first), length, device=q_thd.device)
        oldest = length - (last - first)
        low = max(0, oldest - window + 1) if window else oldest // chunk * chunk if chunk else 0
        key_k = torch.arange(low, length, device=q_thd.device)
        visible_qk = key_k[None, :] <= position_q[:, None]
        if window:
            visible_qk &= key_k[None, :] > position_q[:, None] - window
        if chunk:
            visible_qk &= key_k[None, :] >= position_q[:, None] // chunk * chunk
        k_gkd, v_gkd = gather_row(kv_cache, block_table_sb[slots[row]], low, length, value_dim)
        row_qhd = attend_row(q_thd[first:last], k_gkd, v_gkd, visible_qk, scale, soft_cap, sink_h)
        out[first:last] = row_qhd.to(q_thd.dtype)
    return out
