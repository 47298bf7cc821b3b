"""What a model needs on its device beside the KV cache: weights, activations, sampling, graphs, images.

Bytes, from a resolved config and facts of model and device; upper bounds. Not here: what the cache gets of the rest
(memory.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.config import EngineConfig
from octavo.worker.cache_bytes import DTYPE_BYTES
from octavo.worker.device import DeviceFacts
from octavo.worker.resolve import limits_of
from octavo.worker.step_kinds import MAX_MIXED_GRAPHS, graph_kinds

if TYPE_CHECKING:
    from octavo.models.config import NormalConfig
    from octavo.worker.encoder_memory import EncoderUsage

EXPERT_TILE = 128
"""Rows of one expert that the largest tiles of its kernels take."""
MAX_CHUNK_LOGITS = 1 << 24
"""Logits that exist at a time: the runner samples so many rows at once that rows * vocabulary stays below, or uses at
most 1 / `LOGITS_SHARE` of a CUDA device's memory if that is more. Every chunk reads the head's weights again."""
LOGITS_SHARE = 64
LOGIT_BYTES = 40
"""Peak bytes a logit while sampling: logits and a copy in two precisions, sorted values and indices, integer weights
and their sums."""
GRAPH_BYTES = 8 << 20
"""A captured graph's own memory, roughly; intermediate tensors are in `activation_bytes`."""
GRAPHS_A_SIZE = 5
"""One for each bound on the context (graphs.py), and two for rows that share blocks (together_graphs.py)."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes that a resolved config needs beside the KV cache."""

    weight_bytes: int
    activation_bytes: int
    sampling_bytes: int
    graph_bytes: int
    image_bytes: int = 0
    """An encoder's work, and its outputs that a step reads."""

    @property
    def total(self) -> int:
        others = self.activation_bytes + self.sampling_bytes + self.graph_bytes + self.image_bytes
        return self.weight_bytes + others


def rows_at_a_time(device: DeviceFacts, vocab_size: int, max_num_seqs: int) -> int:
    """How many rows are sampled at once."""
    affordable = device.total_bytes // LOGITS_SHARE // LOGIT_BYTES if device.kind == "cuda" else 0
    return min(max_num_seqs, max(1, max(MAX_CHUNK_LOGITS, affordable) // vocab_size))


def usage_of(
    config: EngineConfig,
    model: NormalConfig,
    device: DeviceFacts,
    weight_bytes: int,
    encoder: EncoderUsage | None = None,
) -> Usage:
    """Bytes of a resolved config beside the KV cache. Activations: the sum of what a layer makes, an upper bound."""
    item = DTYPE_BYTES[config.model.dtype]
    limits = limits_of(config)
    max_num_seqs = limits.max_num_seqs
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    per_token = item * (4 * model.hidden_size + 2 * query + 2 * key + 3 * model.intermediate_size)
    per_token += 4 * (2 * model.hidden_size + query + key) + 4 * 8
    if config.model.quantization == "fp8":
        per_token += max(model.intermediate_size, model.hidden_size, query) + 4  # rows in 8 bits
    chunk_rows = rows_at_a_time(device, model.vocab_size, max_num_seqs)
    counts_and_masks = 6 * (max_num_seqs + 1) * model.vocab_size
    sizes, graph_tokens = config.execution.cuda_graph_sizes, config.execution.prompt_graph_tokens or 0
    num_mixed = min(MAX_MIXED_GRAPHS, len(graph_kinds(sizes, graph_tokens, model.max_position_embeddings)))
    return Usage(
        weight_bytes=weight_bytes,
        activation_bytes=limits.max_num_batched_tokens * per_token
        + expert_bytes(model, limits.max_num_batched_tokens, item),
        sampling_bytes=chunk_rows * model.vocab_size * LOGIT_BYTES + counts_and_masks,
        graph_bytes=(len(sizes) * GRAPHS_A_SIZE + num_mixed) * GRAPH_BYTES + graph_tokens * per_token,
        image_bytes=0 if encoder is None else encoder.work_bytes + encoder.output_bytes(limits.max_num_batched_tokens),
    )


def expert_bytes(model: NormalConfig, num_tokens: int, item: int) -> int:
    """What a mixture of experts makes for a step: rows of all chosen experts, each expert's padded to whole tiles."""
    experts = model.experts
    if experts is None:
        return 0
    pairs = num_tokens * experts.top_k
    places = pairs + min(pairs, experts.num_experts) * (EXPERT_TILE - 1)
    routing = num_tokens * experts.num_experts * 4 + (places + 4 * pairs) * 4
    return item * (places * experts.intermediate_size + pairs * model.hidden_size) + routing
