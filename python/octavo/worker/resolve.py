"""Fills in what the config tree leaves open once the model and the device are known. Pure.

Not here: sizes that depend on memory (memory.py): `max_model_len` auto and the number of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.worker.device import DeviceFacts

if TYPE_CHECKING:
    from octavo.models.config import NormalConfig

DEFAULTS = {
    "cpu": {"block_size": 16, "max_num_seqs": 64, "max_num_batched_tokens": 512, "overlap_depth": 1},
    "cuda": {"block_size": 64, "max_num_seqs": 256, "max_num_batched_tokens": 8448, "overlap_depth": 2},
}
"""8,448 tokens are 8,192 of prompts beside as many decode rows as there can be: so 128 prompts of 128 tokens take two
steps, and no third one for what would be left."""
BACKENDS = {"cpu": "cpu", "cuda": "triton"}
"""The attention backend that "auto" takes, by the device."""
MAX_PROMPT_GRAPH_TOKENS = 2048
GRAPH_SHARE = 4
"""Steps with prompts of a graph have at most so large a part of the tokens of the largest step."""
EMBEDDED_QUANTIZATIONS = ("int8", "int4")
"""Values of --quantization that torch does not run …"""
EMBEDDED_KV_DTYPES = ("float16", "bfloat16", "int8")
"""… and of --kv-cache-dtype."""
GRAPH_BACKENDS = frozenset({"triton", "flash", "flashinfer"})
"""Backends whose decode steps are Triton kernels: they can run in a CUDA graph, and beside other fused kernels."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of a resolved config, which are never None."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    overlap_depth: int
    cpu_threads: int


def limits_of(config: EngineConfig) -> Limits:
    """The sizes of a config that `resolve_config` made."""
    values = (
        config.cache.block_size,
        config.scheduler.max_num_seqs,
        config.scheduler.max_num_batched_tokens,
        config.scheduler.overlap_depth,
        config.execution.cpu_threads,
    )
    known = [value for value in values if value is not None]
    assert len(known) == len(values), "resolve_config comes first"
    return Limits(*known)


def resolve_config(config: EngineConfig, device: DeviceFacts, max_position: int) -> EngineConfig:
    """The tree with every None and auto filled in but `max_model_len="auto"`. `max_position` is the model's context."""
    defaults = DEFAULTS[device.kind]
    scheduler = replace(
        config.scheduler,
        max_num_seqs=config.scheduler.max_num_seqs or defaults["max_num_seqs"],
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens or defaults["max_num_batched_tokens"],
        overlap_depth=config.scheduler.overlap_depth or defaults["overlap_depth"],
    )
    backend = config.execution.attention_backend
    backend = BACKENDS[device.kind] if backend == "auto" else backend
    if backend == "cpu" and device.kind == "cuda":
        raise ConfigError("--attention-backend cpu contradicts the CUDA device: add --device cpu", "attention_backend")
    eager = config.execution.enforce_eager or device.kind == "cpu" or backend not in GRAPH_BACKENDS
    most_rows = min(scheduler.max_num_seqs or 0, scheduler.max_num_batched_tokens or 0)
    sizes = sorted(set(config.execution.cuda_graph_sizes)) or graph_sizes(most_rows)
    if sizes[-1] > most_rows:
        raise ConfigError(f"--cuda-graph-sizes {sizes[-1]}: a step has at most {most_rows} rows", "cuda_graph_sizes")
    if config.execution.deterministic:
        _check_deterministic(config, device, backend)
    if config.execution.decode_kernels == "fused" and device.kind != "cuda":
        raise ConfigError("--decode-kernels fused needs a CUDA device: use auto here", "decode_kernels")
    if config.cache.kv_cache_dtype == "fp8" and not (device.has_fp8 and backend in GRAPH_BACKENDS):
        raise ConfigError(
            "--kv-cache-dtype fp8 needs a CUDA device with fp8 (compute capability 8.9 or later) and "
            "--attention-backend triton: use auto here",
            "kv_cache_dtype",
        )
    decode_kernels = config.execution.decode_kernels
    if decode_kernels == "auto" and backend not in GRAPH_BACKENDS:
        decode_kernels = "plain"  # fused kernels attend themselves: whoever names another backend wants that one
    execution = replace(
        config.execution,
        device=device.kind,
        attention_backend=backend,
        decode_kernels=decode_kernels,
        enforce_eager=eager,
        cuda_graph_sizes=[] if eager else sizes,
        prompt_graph_tokens=0 if eager else prompt_graph_tokens(config),
        cpu_threads=config.execution.cpu_threads or device.num_cores,
    )
    model = replace(
        config.model,
        dtype=_dtype(config.model.dtype, device),
        max_model_len=_max_model_len(config.model.max_model_len, max_position),
    )
    cache = replace(config.cache, block_size=config.cache.block_size or defaults["block_size"])
    return replace(config, model=model, cache=cache, scheduler=scheduler, execution=execution)


def kv_dtype(config: EngineConfig) -> str:
    """The name of the cache's numbers (`kv_cache.DTYPES`), of a resolved config."""
    return config.model.dtype if config.cache.kv_cache_dtype == "auto" else config.cache.kv_cache_dtype


def _check_deterministic(config: EngineConfig, device: DeviceFacts, backend: str) -> None:
    """ConfigError for what has no batch-invariant form."""
    if device.kind != "cuda" or backend != BACKENDS["cuda"]:
        raise ConfigError(
            "--deterministic needs a CUDA device and --attention-backend triton: leave it out here", "deterministic"
        )
    if config.execution.decode_kernels == "fused":
        raise ConfigError(
            "--deterministic contradicts --decode-kernels fused, whose sums depend on the number of rows: use auto",
            "decode_kernels",
        )


def prompt_graph_tokens(config: EngineConfig) -> int:
    """As asked for, or few enough that the memory which graphs keep is a small part of what the largest step takes."""
    asked = config.execution.prompt_graph_tokens
    most = config.scheduler.max_num_batched_tokens or DEFAULTS["cuda"]["max_num_batched_tokens"]
    if asked is not None and asked > most:
        raise ConfigError(f"--prompt-graph-tokens {asked}: a step has at most {most} tokens", "prompt_graph_tokens")
    return min(MAX_PROMPT_GRAPH_TOKENS, most // GRAPH_SHARE) if asked is None else asked


def with_fewer_tokens(config: EngineConfig, max_num_batched_tokens: int) -> EngineConfig:
    """A resolved config as it would be with smaller steps."""
    graph_tokens = min(config.execution.prompt_graph_tokens or 0, max_num_batched_tokens // GRAPH_SHARE)
    return replace(
        config,
        scheduler=replace(config.scheduler, max_num_batched_tokens=max_num_batched_tokens),
        execution=replace(config.execution, prompt_graph_tokens=graph_tokens),
    )


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Row counts to capture: powers of two, the midpoints between them from 16 on, and the largest batch."""
    powers = [1 << i for i in range(max_num_seqs.bit_length())]
    midpoints = [power * 3 // 2 for power in powers if power >= 16]
    return sorted({size for size in powers + midpoints if size < max_num_seqs} | {max_num_seqs})


def _dtype(choice: str, device: DeviceFacts) -> str:
    if choice != "auto":
        return choice
    if device.has_bfloat16:
        return "bfloat16"
    return "float16" if device.kind == "cuda" else "float32"


def resolve_quantization(choice: str, model: NormalConfig, device: DeviceFacts) -> str:
    """How linear layers keep their weights: "none", or a method's name.

    An fp8 checkpoint is dequantized as it loads where the device has no fp8 products; weights that `fp8` asks to
    quantize are rounded then, and kept wide.
    """
    if choice in EMBEDDED_QUANTIZATIONS:
        raise ConfigError(
            f"--quantization {choice} needs the embedded runner, which runs text models on CPUs and does not run this "
            f"on {device.name} (--runner embedded says why): use {'fp8 or none' if device.has_fp8 else 'none'}",
            "quantization",
        )
    stored = "none" if model.quantization is None else model.quantization.method
    wanted = stored if choice == "auto" else choice
    if wanted == "none" or device.has_fp8:
        return wanted
    return "none" if stored != "none" else wanted


def check_torch_kv_dtype(config: EngineConfig, device: DeviceFacts) -> None:
    """ConfigError for a cache that only the embedded runner has."""
    if config.cache.kv_cache_dtype in EMBEDDED_KV_DTYPES:
        raise ConfigError(
            f"--kv-cache-dtype {config.cache.kv_cache_dtype} needs the embedded runner, which does not run this on "
            f"{device.name}: use auto",
            "kv_cache_dtype",
        )


def _max_model_len(choice: int | str | None, max_position: int) -> int | str:
    if choice is None:
        return max_position
    if isinstance(choice, int) and choice > max_position:
        raise ConfigError(
            f"--max-model-len {choice}: the model's positions end at {max_position}; use at most {max_position}",
            "max_model_len",
        )
    return choice
