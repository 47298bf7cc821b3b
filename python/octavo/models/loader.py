"""From a model source to named tensors and a loaded model.

Names and values are those of the Hugging Face checkpoint, whatever the source. Not here: finding the source
(sources.py) and placing tensors into modules (each model's `load_weights`, which is strict about names and shapes).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.models.base import CausalLM
from octavo.models.gguf_names import tensor_names
from octavo.models.gguf_tensors import iter_gguf
from octavo.models.safetensors import find_tensors
from octavo.models.safetensors_values import iter_safetensors
from octavo.models.sources import ModelSource
from octavo.protocol import Progress

if TYPE_CHECKING:
    from octavo.models.config import NormalConfig


def iter_tensors(
    source: ModelSource, *, dtype: torch.dtype | None = None, progress: Progress | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint on the CPU, one at a time, floats converted to `dtype` where given.

    `progress("weights", f)` is called after each with the share of bytes done. ModelError: it can't be read.
    """
    if source.gguf_file is not None:
        tensors, sizes = (
            iter_gguf(source.gguf_file),
            {n: t.num_bytes for n, t in tensor_names(source.gguf_file).items()},
        )
    else:
        assert source.folder is not None
        stored = find_tensors(source.folder)
        tensors, sizes = iter_safetensors(stored), {n: t.num_bytes for n, t in stored.items()}
    total, done = max(1, sum(sizes.values())), 0
    for name, tensor in tensors:
        yield name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        done += sizes[name]
        if progress is not None:
            progress("weights", done / total)


def load_model(
    source: ModelSource,
    normal: NormalConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    load_format: str = "auto",
    seed: int = 0,
    max_model_len: int | None = None,
    decode_kernels: str = "auto",
    quantization: str = "none",
    deterministic: bool = False,
    progress: Progress | None = None,
) -> CausalLM:
    """Build the model and fill it: from the checkpoint, or (`load_format` "dummy") at random from `seed`.

    `max_model_len` is the longest sequence that will be served, `decode_kernels` the option of that name,
    `quantization` how linear layers keep their weights, `deterministic` whether steps are batch-invariant (see
    `build_model`). ModelError: unsupported architecture, or missing, extra or wrongly shaped tensors.
    """
    from octavo.models.registry import build_model
    from octavo.models.weights import init_dummy_weights

    model = build_model(
        normal,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        decode_kernels=decode_kernels,
        quantization=quantization,
        deterministic=deterministic,
    )
    if load_format == "dummy":
        init_dummy_weights(model, seed)
        if progress is not None:
            progress("weights", 1.0)
    else:
        model.load_weights(iter_tensors(source, progress=progress))  # each place has a type of its own
    return model
