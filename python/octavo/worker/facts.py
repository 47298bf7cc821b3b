"""What an engine says of its model at the handshake, from the checkpoint's config.json and generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.protocol import ImageFacts, ModelFacts
from octavo.sampling_params import MAX_LOGPROBS
from octavo.worker.cache_groups import CacheLayout, one_group
from octavo.worker.resolve import limits_of

RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields of generation_config.json that become the defaults of requests."""


def model_facts(
    config: EngineConfig,
    *,
    num_blocks: int,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    generation_config: Mapping[str, Any],
    tokenizer_path: Path | None,
    images: ImageFacts | None = None,
    no_images: str = "",
    layout: CacheLayout | None = None,
) -> ModelFacts:
    """Facts of a resolved config's engine; without `layout`, all layers keep all."""
    limits, length = limits_of(config), config.model.max_model_len
    assert isinstance(length, int), "the memory plan comes first"
    return ModelFacts(
        model=config.model.model,
        vocab_size=vocab_size,
        max_model_len=length,
        block_size=limits.block_size,
        num_blocks=num_blocks,
        max_num_seqs=limits.max_num_seqs,
        eos_token_ids=eos_token_ids,
        dtype=config.model.dtype,
        device=config.execution.device,
        max_logprobs=min(MAX_LOGPROBS, vocab_size),
        tokenizer_path=None if tokenizer_path is None else str(tokenizer_path),
        default_sampling_params=_recommended(generation_config),
        images=images,
        no_images=no_images,
        cache_groups=tuple((keep.kind, keep.size) for keep in (layout or one_group(1)).keeps),
    )


def _recommended(generation_config: Mapping[str, Any]) -> dict[str, float]:
    """Only what the file says: Transformers fills in no values that a checkpoint's author didn't write."""
    return {name: generation_config[name] for name in RECOMMENDED if generation_config.get(name) is not None}
