"""Before the embedded decoder is built: can it run the model, in which number formats, and what fits in memory.

No torch here, nor in what it imports: a machine without a GPU serves within a second. Not here: loading (embedded.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.models.config import NormalConfig, architecture_of, normalize_config
from octavo.models.description import FAMILIES, Description, describe, obstacle
from octavo.models.sources import ModelSource, resolve_source
from octavo.models.stored_weights import PLAIN, StoredWeight, check_fit, stored_weights
from octavo.worker.device import cpu_facts
from octavo.worker.embedded_weights import kept_bytes
from octavo.worker.memory import MemoryPlan, plan_memory
from octavo.worker.resolve import EMBEDDED_KV_DTYPES, EMBEDDED_QUANTIZATIONS, resolve_config

if TYPE_CHECKING:
    from octavo.protocol import Progress

BACKENDS = ("auto", "cpu")
"""Attention backends under which the decoder's own attention is meant."""
QUANTIZATIONS = ("auto", "none", *EMBEDDED_QUANTIZATIONS)
"""Values of --quantization that it takes."""
KV_DTYPES = ("auto", *EMBEDDED_KV_DTYPES)
""" … and of --kv-cache-dtype."""


@dataclass(frozen=True, slots=True)
class EmbeddedPlan:
    """What the runner builds."""

    memory: MemoryPlan
    description: Description
    weights: Mapping[str, StoredWeight]
    """By checkpoint name; of dummy weights none."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model (None: of a family that the embedded decoder has not), and why it can't run as the config asks (None: it
    can)."""

    source: ModelSource
    model: NormalConfig | None
    obstacle: str | None


def find_model(config: EngineConfig, progress: Progress) -> FoundModel:
    """Errors: ModelError when there is none."""
    source = resolve_source(config.model, progress)
    architecture = architecture_of(source.raw_config)
    if architecture not in FAMILIES:
        return FoundModel(source, None, f"it has no {architecture}")
    model = normalize_config(source.raw_config, source.generation_config)
    return FoundModel(source, model, contradiction(config) or obstacle(model))


def contradiction(config: EngineConfig) -> str | None:
    """What the config asks for that the embedded decoder doesn't do."""
    if config.execution.device == "cuda":
        return "it runs on the CPU, and --device is cuda"
    if config.execution.attention_backend not in BACKENDS:
        return f"it attends by itself, and --attention-backend is {config.execution.attention_backend}"
    if config.cache.kv_cache_dtype not in KV_DTYPES:
        return f"it keeps no keys and values in --kv-cache-dtype {config.cache.kv_cache_dtype}"
    if config.model.quantization not in QUANTIZATIONS:
        return f"it does not know --quantization {config.model.quantization}"
    return None


def make_plan(config: EngineConfig, found: FoundModel) -> EmbeddedPlan:
    """Resolve the config and size the cache. Reads no weights. Errors: ConfigError, ModelError."""
    if found.obstacle is not None or found.model is None:
        name = found.source.name
        raise ConfigError(f"--runner embedded can't run {name}: {found.obstacle}; use --runner auto", "runner")
    device = cpu_facts()
    resolved = resolve_config(config, device, found.model.max_position_embeddings)
    is_dummy = config.model.load_format == "dummy"
    stored = {} if is_dummy else stored_weights(found.source)
    dtype = config.model.dtype if config.model.dtype != "auto" else natural_dtype(found.model, stored)
    quantization = "none" if config.model.quantization == "auto" else config.model.quantization
    resolved = replace(resolved, model=replace(resolved.model, dtype=dtype, quantization=quantization))
    full = describe(found.model, found.model.max_position_embeddings)
    if not is_dummy:
        check_fit(full, stored)
    num_bytes = kept_bytes(full, stored, resolved.model)
    memory = plan_memory(resolved, found.source, found.model, device, num_bytes)
    return EmbeddedPlan(memory, describe(found.model, memory.max_model_len), stored)


def natural_dtype(model: NormalConfig, stored: Mapping[str, StoredWeight]) -> str:
    """What --dtype auto means: float32 for a checkpoint of nothing else, else float16 for quantized ones, or its own
    type. Arithmetic is in float32 all the same; this is how keys, values and plain weights are kept."""
    kinds = {weight.format for weight in stored.values() if len(weight.shape) == 2}
    if not kinds:
        return model.dtype
    wide = {PLAIN.get(kind) for kind in kinds}
    if wide == {"float32"}:
        return "float32"
    return "bfloat16" if wide == {"bfloat16"} else "float16"
