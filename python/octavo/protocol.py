"""What callers get back and what the engine tells about itself: plain data shared by every process.

Not here: requests on the wire (Rust, `rust/core/src/frames.rs`) and HTTP bodies (server/schema).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

Progress = Callable[[str, float], None]
"""Told how a start goes: (stage, fraction done in 0..1); a text of several lines is to be shown."""


def unwatched(stage: str, fraction: float) -> None:
    """Progress that nobody watches."""


class Logprob(NamedTuple):
    """Log probability of one token at one position; `rank` 1 is the most probable of the vocabulary."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's `n` sequences.

    Attributes:
        index: Which of the `n`.
        text: Generated text (all of it, or the new part of a delta).
        token_ids: Generated ids, like `text`.
        logprobs: One mapping (token id to `Logprob`) per token, the chosen token first; None unless asked for.
        cumulative_logprob: Sum over the chosen tokens so far; None unless logprobs were asked for.
        finish_reason: "stop", "length", "abort", "error", or None while running.
        stop_reason: The stop string or stop token id that ended the sequence; None for EOS.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds; `arrival_s` is `time.monotonic()`, the others count from arrival."""

    arrival_s: float
    queue_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """The state of a request: all sequences so far, or the sequences that gained something (delta)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None


@dataclass(slots=True)
class EmbeddingOutput:
    """The vector of a text."""

    embedding: list[float]


@dataclass(slots=True)
class ClassificationOutput:
    """Probabilities of the model's labels, and the most probable label."""

    probs: list[float]
    label: str


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts go together."""

    score: float


@dataclass(slots=True)
class PoolingOutput:
    """The numbers of a text: its vector, or its labels' probabilities."""

    data: list[float]


@dataclass(slots=True)
class PoolingRequestOutput(Generic[T]):
    """What a model that does not generate made of one text."""

    prompt_token_ids: list[int]
    outputs: T


@dataclass(frozen=True, slots=True)
class PoolingFacts:
    """What a model that does not generate makes of a text."""

    num_outputs: int
    """Numbers a text: the dimensions of an embedding, or one logit a label."""
    labels: tuple[str, ...] = ()
    """Of the logits; empty for embeddings."""
    activation: str = "none"
    """From logits to scores: "sigmoid", "softmax" or "none"."""
    pairs: str = "segments"
    """How a pair of texts becomes one input: "segments" (the tokenizer's own form) or "yes_no" (a question to a
    decoder)."""


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """How a model takes images."""

    folder: str
    """Of the checkpoint: it has the processor's files."""
    is_whole: bool
    """A step must compute all tokens of an image."""
    token_bytes: int = 0
    """Of what the encoder makes for a token."""
    block_bytes: int = 0
    """Of a block of the cache, which keeps that."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What an engine says of itself at the handshake."""

    model: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    max_logprobs: int
    tokenizer_path: str | None
    """Folder with tokenizer.json, tokenizer_config.json (bos_token, eos_token, …) and the chat template
    (chat_template.jinja, or in tokenizer_config.json); None for a model without a tokenizer."""
    default_sampling_params: dict[str, float]
    """What the checkpoint's generation_config.json recommends (temperature, top_k, top_p, repetition_penalty)."""
    cache_groups: tuple[tuple[str, int], ...] = (("all", 0),)
    """What the layers of each cache group keep: `CoreConfig.groups`."""
    task: str = "generate"
    """"generate", "embed", "score" or "classify"."""
    pooling: PoolingFacts | None = None
    """None for a model that generates."""
    images: ImageFacts | None = None
    """None for a model that takes no images."""
    no_images: str = ""
    """Why an image-text model takes no images."""

    @property
    def image_refusal(self) -> str:
        """What to say of images to a model that takes none."""
        reason = f" ({self.no_images})" if self.no_images else ""
        return f"this model reads text only, not images{reason}"

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, body: bytes) -> ModelFacts:
        values = json.loads(body)
        values["eos_token_ids"] = tuple(values["eos_token_ids"])
        values["cache_groups"] = tuple((kind, size) for kind, size in values["cache_groups"])
        pooling = values["pooling"]
        if pooling is not None:
            values["pooling"] = PoolingFacts(**{**pooling, "labels": tuple(pooling["labels"])})
        if values["images"] is not None:
            values["images"] = ImageFacts(**values["images"])
        return cls(**values)
