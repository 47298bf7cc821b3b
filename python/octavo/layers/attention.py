"""The attention layer: a spec, and whichever backend the worker gave the model. Not here: how attention is computed."""

from __future__ import annotations

from torch import Tensor, nn

from octavo.attention.base import AttentionBackend, AttentionSpec, ForwardContext


class Attention(nn.Module):
    """Causal attention over the paged cache. `backend` is set (set_attention_backend) before the first step."""

    backend: AttentionBackend

    def __init__(self, spec: AttentionSpec, sink_h: nn.Parameter | None = None) -> None:
        """`sink_h`: see `AttentionBackend.attend`."""
        super().__init__()
        self.spec, self.sink_h = spec, sink_h

    def forward(self, q_thd: Tensor, k_tgd: Tensor, v_tgd: Tensor, ctx: ForwardContext) -> Tensor:
        """Write k and v to the cache, attend: [t, h, out_dim] in q's dtype."""
        return self.backend.attend(self.spec, q_thd, k_tgd, v_tgd, ctx, self.sink_h)

    def attend_cached(self, q_thd: Tensor, ctx: ForwardContext) -> Tensor:
        """The same after k and v have been written."""
        return self.backend.attend_cached(self.spec, q_thd, ctx, self.sink_h)


def set_backend(model: nn.Module, backend: AttentionBackend) -> None:
    """Give every `Attention` below `model` its backend."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.backend = backend
