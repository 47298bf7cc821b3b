"""Which kernels a model's steps launch, found by running the steps over tensors without memory: what build_kernels.py
compiles. Nothing here touches a device.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from octavo.attention.base import make_backend
from octavo.config import ENGINE_SECTIONS, EngineConfig
from octavo.kernels.reference.last_rows import SampledInputs
from octavo.kernels.triton import handles
from octavo.kernels.triton.target import build_driver, build_launcher, compile_for
from octavo.models.base import CausalLM
from octavo.models.config import NormalConfig, normalize_config
from octavo.models.registry import as_attended, build_model, is_native, with_wide_ends
from octavo.sampling.sampler import Sampler
from octavo.worker.batch import StepArrays
from octavo.worker.cache_bytes import with_state_blocks
from octavo.worker.cache_groups import layout_of
from octavo.worker.device import DeviceFacts
from octavo.worker.kv_cache import DTYPES, KvCache, allocate_kv_cache
from octavo.worker.resolve import Limits, kv_dtype, limits_of, resolve_config, resolve_quantization
from octavo.worker.slots import Slots
from octavo.worker.step_context import HeaderParts, step_context
from octavo.worker.step_kernels import StepKernels
from octavo.worker.step_kinds import StepKind, decode_kinds, graph_kinds, mixed_kinds, together_kinds
from octavo.worker.usage import rows_at_a_time

META = torch.device("meta")

Job = Callable[[], Any]


class Collector(Executor):
    """Takes what Triton wants compiled, and leaves it for later: the kernel and its launcher."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []

    def take(self) -> list[Job]:
        """What came since the last call."""
        jobs, self._jobs = self._jobs, []
        return jobs

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._jobs.append(lambda: build_launcher(fn(*args, **kwargs)))
        done: Future[Any] = Future()
        done.set_result(None)
        return done


class QuickShapes(TorchFunctionMode):
    """Makes the results of products and lookups over tensors without memory. PyTorch's own functions for these are in
    Python and import sympy, which takes a second."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        shape = RESULTS.get(func)
        if shape is None or kwargs or not all(isinstance(value, Tensor) and value.is_meta for value in args[:2]):
            return func(*args, **(kwargs or {}))
        return torch.empty(shape(*args), dtype=args[0].dtype, device=META)


RESULTS: dict[Any, Callable[..., tuple[int, ...]]] = {
    F.linear: lambda x_ti, weight_oi, *bias: (*x_ti.shape[:-1], weight_oi.shape[0]),
    torch.empty_like: lambda like: tuple(like.shape),
    Tensor.__getitem__: lambda table, index: (*index.shape, *table.shape[1:]),
}
"""Function -> shape of its result."""


@dataclass(frozen=True, slots=True)
class MetaSteps:
    """Runs steps of a model over tensors without memory."""

    model: CausalLM
    kernels: StepKernels
    slots: Slots
    kv_cache: KvCache
    limits: Limits
    width: int
    dtype: torch.dtype

    @classmethod
    def make(cls, config: EngineConfig, normal: NormalConfig, quantization: str, *, is_asked: bool) -> MetaSteps:
        """For a resolved config; `is_asked`: see `with_state_blocks`."""
        dtype = DTYPES[config.model.dtype]
        max_model_len = longest(config, normal)
        model = build_model(
            normal,
            dtype=dtype,
            device=META,
            max_model_len=max_model_len,
            decode_kernels=config.execution.decode_kernels,
            quantization=quantization,
            deterministic=config.execution.deterministic,
        )
        attended = as_attended(normal, model.attention_specs)
        if any(attended.state_sizes):
            config = with_state_blocks(config, attended, is_asked=is_asked)
        limits = limits_of(config)
        model.set_attention_backend(make_backend("triton", deterministic=config.execution.deterministic))
        kv_cache = allocate_kv_cache(
            model.attention_specs,
            layout_of(attended, max_model_len),
            num_blocks=2,
            block_size=limits.block_size,
            dtype=DTYPES[kv_dtype(config)],
            device=META,
        )
        slots = Slots(limits.max_num_seqs, -(-max_model_len // limits.block_size), META)
        return cls(model, StepKernels("triton", limits.block_size), slots, kv_cache, limits, normal.hidden_size, dtype)

    def run(self, kind: StepKind) -> None:
        """A step of a kind, from the arena to the rows that are sampled."""
        arrays = StepArrays(
            row_slot_r=ints(kind.num_rows),
            query_start_r=ints(kind.num_rows + 1),
            kv_len_r=ints(kind.num_rows),
            token_id_t=ints(kind.num_tokens),
            position_t=ints(kind.num_tokens),
        )
        tokens = self.kernels.prepare(arrays, self.slots)
        header = HeaderParts(ints(1), ints(2))
        ctx = step_context(kind, arrays, tokens, self.slots, self.kv_cache.layers, header, self.limits.block_size)
        hidden_tm = self.model.forward(tokens.token_id_t, tokens.position_t, ctx)
        fixed = SampledInputs(
            torch.empty(kind.num_rows, self.width, dtype=self.dtype, device=META),
            ints(kind.num_rows),
            ints(kind.num_rows),
        )
        count = ints(1) if kind.is_counted else kind.num_rows
        self.kernels.gather_last_rows(hidden_tm, arrays, fixed, count, self.slots.null_slot)
        self.model.logits(fixed.hidden_sm)

    def update_tables(self) -> None:
        """What precedes a step: block table entries and copies."""
        copies = ints(1, 2)
        self.kernels.apply_updates(self.slots, ints(1, 3), self.kv_cache.lanes, copies)


def few_layers(normal: NormalConfig) -> NormalConfig:
    """The model with two layers of each kind, the first ones: others launch the same kernels."""
    experts = normal.experts
    sparse = (False,) * normal.num_layers if experts is None else experts.is_sparse
    chunks, rotates = normal.layer_chunks, normal.layer_rotates
    names, wide = normal.layer_kinds, normal.wide_layers
    parts = (sparse, normal.layer_windows, chunks or sparse, rotates or sparse, names or sparse, wide or sparse)
    kinds = zip(*parts, strict=True)
    seen: Counter[tuple[object, ...]] = Counter()
    kept = []
    for layer, kind in enumerate(kinds):
        seen[kind] += 1
        if seen[kind] <= 2:
            kept.append(layer)
    return replace(
        normal,
        num_layers=len(kept),
        layer_windows=tuple(normal.layer_windows[layer] for layer in kept),
        layer_chunks=tuple(chunks[layer] for layer in kept if chunks),
        layer_rotates=tuple(rotates[layer] for layer in kept if rotates),
        layer_kinds=tuple(names[layer] for layer in kept if names),
        wide_layers=tuple(wide[layer] for layer in kept if wide),
        experts=experts and replace(experts, is_sparse=tuple(sparse[layer] for layer in kept)),
    )


def ints(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=META)


def longest(config: EngineConfig, normal: NormalConfig) -> int:
    """The longest context, or (it depends on memory) the model's."""
    length = config.model.max_model_len
    return length if isinstance(length, int) else normal.max_position_embeddings


@dataclass
class Order:
    """What stdin says."""

    config: EngineConfig
    normal: NormalConfig
    quantization: str
    device: DeviceFacts
    capability: tuple[int, int]
    is_block_asked: bool
    """The user named a block size."""
    limits: Limits = field(init=False)

    def __post_init__(self) -> None:
        self.limits = limits_of(self.config)

    @classmethod
    def read(cls, text: str) -> Order | None:
        """None: Octavo has no layers for the model."""
        message = json.loads(text)
        raw = message["raw_config"]
        if not is_native(raw):
            return None
        sections = {name: ENGINE_SECTIONS[name](**values) for name, values in message["config"].items()}
        device = DeviceFacts(**message["device"])
        normal = normalize_config(raw, {})
        given = EngineConfig(**sections)
        config = resolve_config(given, device, normal.max_position_embeddings)
        quantization = resolve_quantization(config.model.quantization, normal, device)
        if quantization == "fp8":
            normal = with_wide_ends(normal, config.model.fp8_wide_attention, config.model.fp8_wide_mlp)
        major, minor = message["capability"]
        return cls(
            config,
            normal,
            quantization if device.has_fp8 else "none",
            device,
            (major, minor),
            is_block_asked=given.cache.block_size is not None,
        )


@torch.inference_mode()
def rounds_of_jobs(order: Order) -> Iterator[list[Job]]:
    """What the start needs, then the rest."""
    compile_for(order.capability)
    limits = order.limits
    max_model_len, sizes = longest(order.config, order.normal), order.config.execution.cuda_graph_sizes
    collector = Collector()
    with handles.compiling(collector), QuickShapes():
        steps = MetaSteps.make(
            order.config, few_layers(order.normal), order.quantization, is_asked=order.is_block_asked
        )
        steps.update_tables()
        for kind in mixed_kinds(min(limits.max_num_seqs, limits.max_num_batched_tokens), max_model_len):
            steps.run(kind)
        for kind in decode_kinds(sizes[-1:], max_model_len)[-1:]:
            steps.run(kind)
        sampler = Sampler(
            vocab_size=order.normal.vocab_size,
            num_slots=limits.max_num_seqs,
            device=META,
            max_fused_rows=rows_at_a_time(order.device, order.normal.vocab_size, limits.max_num_seqs),
        )
        sampler.warm_up(limits=False)
        yield [build_driver, *collector.take()]
        sampler.warm_up(limits=True)
        for kind in decode_kinds(sizes, max_model_len):
            steps.run(kind)
        if steps.model.reads_together:
            for kind in together_kinds(sizes, max_model_len):
                steps.run(kind)
        for kind in graph_kinds(sizes, order.config.execution.prompt_graph_tokens or 0, max_model_len):
            steps.run(kind)
    yield collector.take()
