"""The memory plan: how much of the device's memory the KV cache gets, before anything is allocated.

`plan_memory` is arithmetic over facts; `make_plan` collects the facts. When something can't fit, the error names the
flag to change and the value that works. Not here: what weights, activations and graphs take beside it (usage.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.multimodal.limits import ImageLimits
from octavo.protocol import Progress, unwatched
from octavo.worker.cache_bytes import kv_token_bytes, layer_bytes, with_state_blocks
from octavo.worker.cache_groups import CacheLayout, lane_bytes, layout_of, one_group
from octavo.worker.device import DeviceFacts, check_backend, find_device
from octavo.worker.resolve import (
    Limits,
    check_torch_kv_dtype,
    kv_dtype,
    limits_of,
    resolve_config,
    resolve_quantization,
    with_fewer_tokens,
)
from octavo.worker.usage import Usage, usage_of

if TYPE_CHECKING:
    from octavo.models.config import NormalConfig
    from octavo.models.sources import ModelSource
    from octavo.worker.encoder_memory import EncoderUsage

logger = logging.getLogger(__name__)

GIB = 1 << 30
MIB = 1 << 20
CPU_CACHE_BYTES = 4 * GIB
CUDA_RESERVE_BYTES = 512 << 20
"""For what is not counted: library workspaces, fragmentation, graph bookkeeping of the driver."""
MAX_SHARE = 0.98
FEW_TOKENS = 1024
USEFUL_BATCHES = 4
"""Without an explicit size, the cache holds at most so many full batches of the longest context."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The outcome. `config` is fully resolved."""

    config: EngineConfig
    device: DeviceFacts
    usage: Usage
    kv_token_bytes: int
    """Of all layers."""
    block_bytes: int
    layout: CacheLayout
    num_blocks: int
    max_model_len: int
    limits: Limits
    source: ModelSource
    model: NormalConfig
    encoder: EncoderUsage | None = None
    """Of a model that takes images."""

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the cache holds of one sequence (block 0 is the null block); groups of windows hold any number,
        up to the model's longest."""
        return kv_tokens(self.layout, self.limits, self.num_blocks, self.model.max_position_embeddings)

    def concurrency(self, length: int) -> float:
        """Sequences of `length` tokens that run at once, as the cache and `max_num_seqs` allow."""
        blocks = self.layout.blocks_for(length, self.limits.block_size, self.limits.overlap_depth)
        return min((self.num_blocks - 1) / blocks, self.limits.max_num_seqs)

    def _groups(self) -> str:
        """What layers keep, where it is not all; for people."""
        counts: dict[str, int] = {}
        for group in self.layout.layer_groups:
            keep = self.layout.keeps[group]
            name = {"all": "all", "state": "states"}.get(keep.kind, f"a {keep.kind} of {keep.size} tokens")
            counts[name] = counts.get(name, 0) + 1
        parts = ", ".join(f"{count} layers keep {name}" for name, count in counts.items())
        return "" if counts.keys() == {"all"} else f"; {parts} ({len(self.layout.keeps)} groups)"

    def _images(self, encoder: EncoderUsage) -> str:
        """What images take, for people."""
        width, height = encoder.picture
        how = "" if encoder.is_counted else ", estimated"
        return (
            f"{_size(self.usage.image_bytes)}  {_size(encoder.work_bytes)} to encode (up to {width} x {height} pixels, "
            f"{encoder.num_tokens} tokens{how}), {_size(self.usage.image_bytes - encoder.work_bytes)} of outputs in a "
            f"step, others in free blocks; {_size(encoder.weight_bytes)} of the weights are the encoder's"
        )

    def report(self) -> str:
        """Lines for people."""
        device, limits, usage = self.device, self.limits, self.usage
        lengths = sorted({n for n in (1024, 4096, 16384, 65536) if n < self.max_model_len} | {self.max_model_len})
        concurrency = ", ".join(f"{self.concurrency(n):.1f} x {n}" for n in lengths)
        num_graphs = len(self.config.execution.cuda_graph_sizes)
        blocks = f"{self.num_blocks} blocks of {limits.block_size} tokens, {self.kv_token_bytes / 1024:.1f} KiB a token"
        rows = [
            ("model", f"{self.config.model.model} ({self.model.architecture}, {self.config.model.dtype})"),
            ("device", f"{device.name}, {_size(device.free_bytes)} free of {_size(device.total_bytes)}"),
            ("weights", _size(usage.weight_bytes) + ("  fp8" if self.config.model.quantization == "fp8" else "")),
            ("activations", f"{_size(usage.activation_bytes)}  {limits.max_num_batched_tokens} tokens a step"),
            ("sampling", f"{_size(usage.sampling_bytes)}  {limits.max_num_seqs} sequences a step"),
            ("graphs", f"{_size(usage.graph_bytes)}  {num_graphs} sizes"),
            ("KV cache", f"{_size(self.kv_bytes)}  {blocks}{self._groups()}"),
            ("longest context", f"{self.max_model_len} tokens; the cache holds {self.num_kv_tokens}"),
            ("concurrency", f"{concurrency} tokens"),
        ]
        if self.encoder is not None:
            rows.insert(4, ("images", self._images(self.encoder)))
        return "\n".join(f"{name:<17}{value}" for name, value in rows)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 100 else f"{num_bytes / MIB:.2f} MiB"


def kv_tokens(layout: CacheLayout, limits: Limits, num_blocks: int, most: int) -> int:
    """Tokens of the longest sequence that the cache holds, or at least `most`."""
    if len(layout.keeps) == 1 and layout.keeps[0].kind == "all":
        return max(0, num_blocks - 1) * limits.block_size
    return layout.tokens_in(num_blocks - 1, limits.block_size, limits.overlap_depth, most)


def cache_blocks(config: EngineConfig, device: DeviceFacts, room: int, block_bytes: int, useful_blocks: int) -> int:
    """Blocks of the KV cache in `room` bytes, as flags say; ConfigError when they ask for more."""
    blocks, asked = config.cache.num_gpu_blocks_override, config.cache.kv_cache_memory_bytes
    if blocks is not None:
        if blocks * block_bytes > room:
            raise ConfigError(
                f"--num-gpu-blocks-override {blocks}: memory holds {room // block_bytes} blocks;"
                f" use --num-gpu-blocks-override {room // block_bytes}",
                "num_gpu_blocks_override",
            )
        return blocks
    if asked is not None:
        if asked > room:
            raise ConfigError(
                f"--kv-cache-memory-bytes {asked}: only {room} bytes are left beside weights and activations;"
                f" use --kv-cache-memory-bytes {room}",
                "kv_cache_memory_bytes",
            )
        return asked // block_bytes
    budget = room if device.kind == "cuda" else min(room, device.free_bytes // 4, CPU_CACHE_BYTES)
    return min(budget // block_bytes, useful_blocks)


def usable_bytes(config: EngineConfig, device: DeviceFacts) -> int:
    """Bytes that Octavo may still allocate."""
    if device.kind == "cpu":
        return device.free_bytes
    in_use = device.total_bytes - device.free_bytes
    share = int(device.total_bytes * config.cache.gpu_memory_utilization)
    return min(share - in_use, device.free_bytes) - CUDA_RESERVE_BYTES


def plan_memory(
    config: EngineConfig,
    source: ModelSource,
    model: NormalConfig,
    device: DeviceFacts,
    weight_bytes: int,
    *,
    is_even: bool = True,
    encoder: EncoderUsage | None = None,
) -> MemoryPlan:
    """Size the cache of a config that `resolve_config` made. ConfigError names the flag and value that would fit.

    `is_even`: all layers have keys and values of one size, and the config says what they read. `encoder`: of a model
    that takes images.
    """
    limits = limits_of(config)
    usage = usage_of(config, model, device, weight_bytes, encoder)
    sizes = layer_bytes(model, kv_dtype(config), limits.block_size)
    asked = config.model.max_model_len
    wanted_len = asked if isinstance(asked, int) else model.max_position_embeddings
    is_grouped = is_even and (config.cache.cache_groups or any(model.state_sizes))
    layout = layout_of(model, wanted_len) if is_grouped else one_group(model.num_layers)
    longest_blocks = layout.blocks_for(wanted_len, limits.block_size, limits.overlap_depth)
    useful_blocks = USEFUL_BATCHES * limits.max_num_seqs * longest_blocks + 1
    one_bytes = sum(lane_bytes(layout, sizes))
    least_bytes = (1 + len(layout.keeps)) * one_bytes
    room = usable_bytes(config, device) - usage.total
    if room < least_bytes:
        _weights_do_not_fit(config, model, device, usage, least_bytes)
    num_blocks = cache_blocks(config, device, room, one_bytes, useful_blocks)
    max_model_len = wanted_len
    fit_len = kv_tokens(layout, limits, num_blocks, wanted_len)
    if wanted_len > fit_len:
        if asked != "auto" or fit_len < limits.block_size:
            _context_does_not_fit(config, device, usage, num_blocks, one_bytes, wanted_len, longest_blocks + 1, fit_len)
        max_model_len = fit_len
    return MemoryPlan(
        config=replace(config, model=replace(config.model, max_model_len=max_model_len)),
        device=device,
        usage=usage,
        kv_token_bytes=kv_token_bytes(model, kv_dtype(config), limits.block_size),
        block_bytes=one_bytes,
        layout=layout,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        limits=limits,
        source=source,
        model=model,
        encoder=encoder,
    )


def _larger_share(device: DeviceFacts, need_bytes: int) -> list[str]:
    """The share of a CUDA device's memory with which `need_bytes` fit, if there is one."""
    if device.kind == "cpu":
        return []
    in_use = device.total_bytes - device.free_bytes
    share = math.ceil(100 * (need_bytes + CUDA_RESERVE_BYTES + in_use) / device.total_bytes) / 100
    return [f"--gpu-memory-utilization {share:.2f}"] if share <= MAX_SHARE else []


def _weights_do_not_fit(
    config: EngineConfig, model: NormalConfig, device: DeviceFacts, usage: Usage, least_kv_bytes: int
) -> NoReturn:
    """ConfigError that names each single change with which weights, activations and a least cache fit."""
    usable, need_bytes = usable_bytes(config, device), usage.total + least_kv_bytes
    ways = _larger_share(device, need_bytes)
    fewer = with_fewer_tokens(config, FEW_TOKENS)
    fewer_bytes = usage_of(fewer, model, device, usage.weight_bytes).total + usage.image_bytes + least_kv_bytes
    if fewer_bytes <= usable:
        ways.append(f"--max-num-batched-tokens {FEW_TOKENS}")
    elif not ways:
        ways += [f"--max-num-batched-tokens {FEW_TOKENS} {share}" for share in _larger_share(device, fewer_bytes)]
    shorter = replace(config, model=replace(config.model, dtype="bfloat16"))
    halved = usage.weight_bytes // 2 + (1 << 20)  # tables that stay float32
    if (
        config.model.dtype == "float32"
        and usage_of(shorter, model, device, halved).total + usage.image_bytes + least_kv_bytes <= usable
    ):
        ways.append("--dtype bfloat16")
    fix = " or ".join(ways) or f"a device with {_size(need_bytes)} free"
    raise ConfigError(
        f"the model does not fit: it takes {_size(usage.total)} ({_size(usage.weight_bytes)} of weights) and"
        f" {_size(max(0, usable))} of {device.name} may be used; use {fix}"
    )


def _context_does_not_fit(
    config: EngineConfig,
    device: DeviceFacts,
    usage: Usage,
    num_blocks: int,
    block_bytes: int,
    wanted_len: int,
    blocks: int,
    fit_len: int,
) -> NoReturn:
    """ConfigError that names each single change with which one sequence of the wanted length fits, which takes
    `blocks`; one of `fit_len` tokens does."""
    room, need_bytes = usable_bytes(config, device) - usage.total, blocks * block_bytes
    ways = [f"--max-model-len {fit_len}"] if fit_len else []
    if config.cache.num_gpu_blocks_override is not None:
        ways += [f"--num-gpu-blocks-override {blocks}"] if need_bytes <= room else []
    elif config.cache.kv_cache_memory_bytes is not None or device.kind == "cpu":
        ways += [f"--kv-cache-memory-bytes {min(need_bytes, room)}"] if need_bytes <= room or not fit_len else []
    else:
        ways += _larger_share(device, usage.total + need_bytes)
    fix = " or ".join(ways) or f"a device with {_size(usage.total + need_bytes)} free"
    raise ConfigError(
        f"a context of {wanted_len} tokens takes {_size(need_bytes)} of KV cache, and there are"
        f" {_size(num_blocks * block_bytes)} beside {_size(usage.total)} for the model on {device.name}; use {fix}",
        "max_model_len",
    )


@contextmanager
def memory_errors(config: EngineConfig) -> Iterator[None]:
    """Turn a device's out-of-memory error into a ConfigError: the plan was too bold, or somebody else took memory."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        share = config.cache.gpu_memory_utilization
        less = max(0.01, share - 0.05)
        raise ConfigError(
            f"the device ran out of memory at start: {error}; use --gpu-memory-utilization {less:.2f} instead of"
            f" {share:g}, or a smaller --max-num-batched-tokens"
        ) from error


def make_plan(config: EngineConfig, progress: Progress | None = None, source: ModelSource | None = None) -> MemoryPlan:
    """Find the model (unless it is given) and the device, resolve the config, and plan. Reads no weights. Errors:
    ConfigError, ModelError."""
    from octavo.attention.base import AttentionSpec
    from octavo.models.registry import as_attended, footprint, read_config, with_wide_ends
    from octavo.models.sources import resolve_source
    from octavo.worker.kv_cache import DTYPES

    if source is None:
        source = resolve_source(config.model, progress or unwatched)
    model = read_config(source.raw_config, source.generation_config)
    device = find_device(config.execution.device)
    resolved = resolve_config(config, device, model.max_position_embeddings)
    check_backend(resolved.execution.attention_backend, device)
    check_torch_kv_dtype(config, device)
    quantization = resolve_quantization(config.model.quantization, model, device)
    resolved = replace(resolved, model=replace(resolved.model, quantization=quantization))
    if quantization == "fp8":
        model = with_wide_ends(model, config.model.fp8_wide_attention, config.model.fp8_wide_mlp)
    kept = quantization if device.has_fp8 else "none"
    if kept == "none" and (quantization != "none" or model.quantization is not None):
        reason = f"{device.name} does not multiply them" if not device.has_fp8 else f"--quantization {quantization}"
        logger.info("fp8 weights are kept as %s: %s", resolved.model.dtype, reason)
    taken = footprint(model, DTYPES[resolved.model.dtype], quantization=kept)
    if not taken.is_capturable:
        resolved = replace(resolved, execution=replace(resolved.execution, enforce_eager=True, cuda_graph_sizes=[]))
    attended, specs = as_attended(model, taken.attention_specs), taken.attention_specs
    if any(attended.state_sizes):
        resolved = with_state_blocks(resolved, attended, is_asked=config.cache.block_size is not None)
    shapes = {spec.cache_shape(1, 1) for spec in specs if isinstance(spec, AttentionSpec)}
    is_even = len(specs) == len(attended.layer_windows) and len(shapes) <= 1
    encoder = None
    if taken.images is not None and ImageLimits.of(config.media).max_images:
        from octavo.worker.encoder_memory import encoder_usage  # imports Transformers

        encoder = encoder_usage(taken.images, source.folder, config.media)
    plan = plan_memory(resolved, source, attended, device, taken.weight_bytes, is_even=is_even, encoder=encoder)
    return replace(plan, model=model)
