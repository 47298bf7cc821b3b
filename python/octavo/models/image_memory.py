"""What an image encoder allocates while it encodes, counted on the meta device: no memory is taken and nothing is
computed. Attention is counted as fused kernels run it, without a matrix of scores.

Encoders that look at values (sizes kept in tensors, padding) can't run there; `estimate` bounds those by their sizes.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import _config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from transformers import AttentionInterface

COUNTED = "octavo_counted"
"""Attention's name in Transformers while it is counted."""


class AllocationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that are made inside, as long as they live. Tensors of the host that meet tensors of
    the meta device go there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._num_bytes = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count what it returns."""
        given: Any = (args, kwargs or {})
        is_meta = [x.is_meta for x in tree_flatten(given)[0] if isinstance(x, Tensor)]
        if any(is_meta) and not all(is_meta):
            given = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, given)
        made = function(*given[0], **given[1])
        for x in tree_flatten(made)[0]:
            if isinstance(x, Tensor):
                self._count(x)
        return made

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self._num_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._num_bytes)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self._num_bytes -= self._sizes.pop(key, 0)


def _counted_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    """[b, h, t, d] -> [b, t, h, V's dims], empty."""
    return query.transpose(1, 2).new_empty((*query.transpose(1, 2).shape[:-1], value.shape[-1])), None


def count_encoding(base: Any, encode: Callable[[], Any]) -> int | None:
    """Peak bytes that `encode` allocates with the modules of `base`, which are on the meta device and are of no use
    afterwards. None: they look at values."""
    options: Any = _config
    AttentionInterface.register(COUNTED, _counted_attention)
    for module in base.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = COUNTED
    try:
        counter = AllocationCounter()
        with options.patch(meta_nonzero_assume_all_nonzero=True), torch.inference_mode(), counter:
            encode()
        return counter.peak_bytes
    except (NotImplementedError, RuntimeError):  # what the meta device says of operations on values
        return None


def estimate(vision: Any, pixels: Mapping[str, Tensor], item: int) -> int:
    """An upper bound for an encoder of this config: the states of a block of a transformer, and a mask, `item` bytes a
    number. Sizes that the config doesn't have are taken for a large encoder's."""
    patch = getattr(vision, "patch_size", None) or 14
    side = patch if isinstance(patch, int) else int(math.prod(patch) ** (1 / len(patch)))
    hidden = getattr(vision, "hidden_size", None) or 1280
    inner = getattr(vision, "intermediate_size", None) or 4 * hidden
    largest = max((x for x in pixels.values() if x.is_floating_point()), key=Tensor.numel)
    tokens = largest.numel() // (3 * side * side) + 1
    images = largest.shape[1] if largest.ndim == 5 else 1  # several pieces, each attends within itself
    sizes = sum(x.nbytes for x in pixels.values() if not x.is_floating_point())  # and masks
    states = item * (tokens * (10 * hidden + 2 * inner) + (tokens // images) ** 2)
    return states + 3 * item * largest.numel() + 2 * sizes
