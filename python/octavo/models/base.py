"""What the worker needs from a model, native or not.

Shape suffixes: t tokens of the step, s sampled rows, m model dim, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from octavo.attention.base import AttentionBackend, CacheSpec, ForwardContext
from octavo.models.images import ImageEncoder


class CausalLM(Protocol):
    """A decoder. Runs token ids of many rows, packed; attention goes through the context's cache."""

    vocab_size: int
    """Width of the logits."""
    images: ImageEncoder | None
    """What makes embeddings of images; None: prompts are text."""
    is_capturable: bool
    """A step reads nothing on the host, so that a CUDA graph can hold it."""

    reads_together: bool
    """Decode steps make use of `ForwardContext.shared_2`."""

    @property
    def attention_specs(self) -> Sequence[CacheSpec]:
        """One a layer that keeps something, in the order of `ForwardContext.kv_cache`."""

    def set_attention_backend(self, backend: AttentionBackend) -> None: ...

    def forward(self, token_id_t: Tensor, position_t: Tensor, ctx: ForwardContext) -> Tensor:
        """Hidden states [t, m] after the final norm. No host synchronization; safe in a CUDA graph capture."""

    def logits(self, hidden_sm: Tensor) -> Tensor:
        """Logits [s, v] in fp32 (soft cap and scale applied)."""

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Fill every parameter from (Hugging Face name, tensor). ModelError names missing, unexpected and misshaped."""
