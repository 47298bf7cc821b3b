"""The runner that executes plans with PyTorch: upload, update, forward; sample; wait. What runs is the plan's business.

Nothing in `launch` or `sample` waits for the device. Not here: how tokens are chosen (octavo.sampling), how attention
reads the cache (octavo.attention), how big everything is (memory.py).

Shape suffixes: t tokens, s sampled rows, m model dim.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from octavo.attention.base import make_backend
from octavo.attention.media import MediaInput
from octavo.attention.whole import WholeImageAttention
from octavo.config import EngineConfig
from octavo.models.loader import load_model
from octavo.protocol import Progress
from octavo.sampling.sampler import SamplePlan, Sampler
from octavo.worker.batch import OutputArenas, StepArenas
from octavo.worker.facts import model_facts
from octavo.worker.fixed_rows import FixedRows
from octavo.worker.graphs import PATIENCE, DecodeGraphs
from octavo.worker.image_facts import image_facts
from octavo.worker.kernel_build import KernelBuild
from octavo.worker.kv_cache import DTYPES, allocate_kv_cache
from octavo.worker.media import StepMedia
from octavo.worker.memory import make_plan, memory_errors
from octavo.worker.mixed_graphs import MixedGraphs
from octavo.worker.output_blocks import OutputBlocks
from octavo.worker.resolve import GRAPH_BACKENDS, kv_dtype
from octavo.worker.slots import Slots
from octavo.worker.step_context import HeaderParts, step_context
from octavo.worker.step_kernels import StepKernels
from octavo.worker.step_kinds import StepKind, decode_kind, mixed_kinds
from octavo.worker.step_sampling import Launched, StepSampling
from octavo.worker.together_graphs import TogetherGraphs
from octavo.worker.usage import rows_at_a_time

if TYPE_CHECKING:
    from octavo._core import Core, StepPlan
    from octavo.models.sources import ModelSource


ON_DEVICE = (
    "_model", "_media", "_backend", "_kernels", "_slots", "_sampler", "_sampling", "_fixed_rows", "_arenas", "_outputs",
    "_launched", "_graphs", "_mixed_graphs", "_together_graphs", "_events", "chores", "_core",
)  # fmt: skip
"""Attributes of a runner that hold tensors, or what does; gone once it is closed."""


class TorchRunner:
    """See `octavo.worker.base.Runner`. `source`, `kernels`: the model, if it was found already, and the build of its
    kernels."""

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress,
        source: ModelSource | None = None,
        kernels: KernelBuild | None = None,
    ) -> None:
        progress("device", 0.0)
        self._build = kernels
        self.plan = make_plan(config, progress, source)
        self.config = self.plan.config
        self.num_blocks = self.plan.num_blocks
        progress(self.plan.report(), 1.0)
        self._progress = progress
        self._limits = self.plan.limits
        self._device = torch.device(self.config.execution.device)
        if self._device.type == "cpu":
            torch.set_num_threads(self._limits.cpu_threads)
        with memory_errors(self.config):
            self._load()
        self.facts = model_facts(
            self.config,
            num_blocks=self.num_blocks,
            vocab_size=self._model.vocab_size,
            eos_token_ids=self.plan.model.eos_token_ids,
            generation_config=self.plan.source.generation_config,
            tokenizer_path=self.plan.source.tokenizer_path,
            images=self._image_facts,
            no_images=self._no_images,
            layout=self.plan.layout,
        )

    @torch.inference_mode()
    def _load(self) -> None:
        """Everything on the device whose size does not depend on the arenas."""
        self._load_model()
        self._set_backend()
        self._progress("memory", 0.0)
        self._allocate_cache()
        self._media = self._keep_images()
        self._prepare_steps()
        self._make_graphs()

    def _load_model(self) -> None:
        """Weights, and whether images are taken."""
        plan, model, execution = self.plan, self.config.model, self.config.execution
        self._model = load_model(
            plan.source,
            plan.model,
            device=self._device,
            dtype=DTYPES[model.dtype],
            load_format=model.load_format,
            seed=model.seed,
            max_model_len=plan.max_model_len,
            decode_kernels=execution.decode_kernels,
            deterministic=execution.deterministic,
            quantization=model.quantization,
            progress=self._progress,
        )
        media, folder = self.config.media, plan.source.folder
        self._image_facts, self._no_images = image_facts(self._model, folder, media, self._device)

    def _set_backend(self) -> None:
        """How the model's layers attend."""
        execution = self.config.execution
        self._backend = make_backend(
            execution.attention_backend, num_threads=self._limits.cpu_threads, deterministic=execution.deterministic
        )
        if self._image_facts is not None and self._image_facts.is_whole:
            self._backend = WholeImageAttention(self._backend)
        self._model.set_attention_backend(self._backend)

    def _allocate_cache(self) -> None:
        """Blocks, and what is kept a slot."""
        plan, limits = self.plan, self._limits
        layout = plan.layout.of_model(self._model.attention_specs)
        self._kv_cache = allocate_kv_cache(
            self._model.attention_specs,
            layout,
            num_blocks=plan.num_blocks,
            block_size=limits.block_size,
            dtype=DTYPES[kv_dtype(self.config)],
            device=self._device,
        )
        max_blocks = math.ceil(plan.max_model_len / limits.block_size)
        self._slots = Slots(limits.max_num_seqs, max_blocks, self._device, layout.layer_groups)

    def _prepare_steps(self) -> None:
        """What comes before the forward pass and after it: kernels, rows to sample, the sampler."""
        plan, num_slots, device = self.plan, self._limits.max_num_seqs, self._device
        backend, dtype = self.config.execution.attention_backend, DTYPES[self.config.model.dtype]
        self._kernels = StepKernels(backend, self._limits.block_size)
        self._fixed_rows = FixedRows(
            self._kernels, num_slots, plan.model.hidden_size, dtype, device, self._slots.null_slot
        )
        self._chunk_rows = rows_at_a_time(plan.device, self._model.vocab_size, num_slots)
        self._sampler = Sampler(
            vocab_size=self._model.vocab_size,
            num_slots=num_slots,
            device=device,
            max_fused_rows=self._chunk_rows if backend in GRAPH_BACKENDS else 0,
        )

    def _make_graphs(self) -> None:
        """Of each kind of step; none is captured yet."""
        execution, max_len = self.config.execution, self.plan.max_model_len
        sizes = execution.cuda_graph_sizes
        self._graphs = DecodeGraphs(sizes, max_len)
        self._mixed_graphs = MixedGraphs(self._graphs, sizes, execution.prompt_graph_tokens or 0, max_len)
        self._together_graphs = TogetherGraphs(self._graphs, sizes if self._model.reads_together else [], max_len)

    def _keep_images(self) -> StepMedia | None:
        """For a model that takes images: their encoder's outputs lie in blocks of the cache."""
        images, facts = self._model.images, self._image_facts
        if images is None or facts is None:
            return None
        kept = OutputBlocks(self._kv_cache.lanes, images.width, images.dtype)
        self._image_facts = replace(facts, token_bytes=kept.token_bytes, block_bytes=kept.block_bytes)
        return StepMedia(
            images,
            kept,
            max_values=0 if self.plan.encoder is None else self.plan.encoder.num_values,
            num_slots=self._limits.max_num_seqs,
            device=self._device,
        )

    @torch.inference_mode()
    def attach(self, core: Core) -> None:
        """Allocate and register arenas; on CUDA also run the largest steps once, so that kernels are compiled, memory
        is taken, and the first request waits for neither."""
        count = self._limits.overlap_depth + 1
        self._core = core
        self._arenas = StepArenas(core.arena_layout, count=count, null_slot=self._slots.null_slot, device=self._device)
        self._outputs = OutputArenas(core.output_layout, count=count, device=self._device)
        self._sampling = StepSampling(
            self._model, self._sampler, self._graphs, self._fixed_rows, self._arenas, self._outputs,
            last_token_s=self._slots.last_token_s, chunk_rows=self._chunk_rows,
        )  # fmt: skip
        self._events = _events(count, self._device)
        core.register(
            [array.data for array in self._arenas.host_arrays], [array.data for array in self._outputs.host_arrays]
        )
        core.register_masks(self._sampler.masks.host.numpy().data)
        self.chores = self._capture_ahead()
        if self._device.type == "cuda":
            with memory_errors(self.config):
                self._warm_up()

    def _warm_up(self) -> None:
        self._load_products()
        if self._build is not None:
            self._build.wait(self._progress)
        self._compile_mixed_steps()
        self._progress("graphs", 0.0)
        arenas, limits = self._arenas, self._limits
        length = min(limits.max_num_batched_tokens, self.plan.max_model_len)
        num_rows = min(limits.max_num_batched_tokens // length, limits.max_num_seqs)
        arenas.fill_null_rows(0, num_rows, length)
        hidden_tm = self._forward(arenas.upload(0), StepKind(num_rows, 0, num_rows * length, length, length)).hidden_tm
        self._model.logits(hidden_tm[: min(limits.max_num_seqs, self._chunk_rows)])
        for num_rows in self.config.execution.cuda_graph_sizes[-1:]:
            arenas.fill_null_rows(0, num_rows, 1)
            self._decode(arenas.upload(0), num_rows, self.plan.max_model_len)
        self._sampler.warm_up(limits=False)
        torch.cuda.synchronize()
        self._progress("graphs", 1.0)

    def _load_products(self) -> None:
        """Start cuBLAS, which takes a while, when there is nothing else to do: the kernels are being built."""
        some = torch.zeros(256, 256, dtype=DTYPES[self.config.model.dtype], device=self._device)
        torch.mm(some, some)
        torch.cuda.synchronize()

    def _capture_ahead(self) -> Iterator[str]:
        """Capture the graphs that the start left out, over rows of the null slot, and the usual ways of sampling, one
        at a time: requests may come in between."""
        self._sampler.warm_up(limits=True)
        yield "sampling kernels"
        for size, bound in self._graphs.missing():
            self._capture_decode(size, bound)
            yield f"graph of {size} rows, context {bound}"
            for work in self._sampler.usual_plans():
                self._capture_sampling(size, bound, work)
                yield f"graph of sampling {size} rows"
        for kind in self._together_graphs.missing():
            self._capture_together(kind)
            yield f"graph of {kind.num_rows} rows that share blocks, context {kind.max_kv_len}"
        for kind in self._mixed_graphs.missing():
            self._capture_mixed(kind)
            yield f"graph of {kind.num_tokens} tokens, {kind.num_rows} rows"

    @torch.inference_mode()
    def _capture_mixed(self, kind: StepKind) -> None:
        count = kind.num_decode_rows
        self._arenas.fill_null_rows(0, count, 1)
        self._arenas.pad_empty(0, count, kind.num_rows, count)
        self._mixed(self._arenas.upload(0), kind)
        torch.cuda.synchronize()

    @torch.inference_mode()
    def _capture_together(self, kind: StepKind) -> None:
        self._arenas.fill_null_rows(0, kind.num_rows, 1)
        self._together(self._arenas.upload(0), kind)
        torch.cuda.synchronize()

    @torch.inference_mode()
    def _capture_decode(self, size: int, bound: int) -> Launched:
        """Capture it, if it is not there; then it is there, and the tensors of a replay stay where they are."""
        self._arenas.fill_null_rows(0, size, 1)
        arena = self._arenas.upload(0)
        self._decode(arena, size, bound)
        return self._decode(arena, size, bound)

    @torch.inference_mode()
    def _capture_sampling(self, size: int, bound: int, work: SamplePlan) -> None:
        """After a decode step, and after a step with prompts."""
        launched = self._capture_decode(size, bound)
        null_slots = np.full(size, self._slots.null_slot, dtype=np.int32)
        after_mixed = self._fixed_rows.fill(launched.hidden_tm, launched.arrays, size, size)
        for hidden_sm, rows in ((launched.hidden_tm[:size], launched.arrays), after_mixed):
            for _ in range(PATIENCE):
                self._sampling.by_graph(size, hidden_sm, rows, 0, null_slots, work)
        torch.cuda.synchronize()

    def _compile_mixed_steps(self) -> None:
        """Compile the kernels of steps without a graph, so that no request waits for a compiler."""
        compile_only = self._kernels.compile_only()
        if compile_only is None:
            return
        self._progress("kernels", 0.0)
        max_rows = min(self._limits.max_num_seqs, self._limits.max_num_batched_tokens)
        kinds = mixed_kinds(max_rows, self.plan.max_model_len)
        self._arenas.fill_null_rows(0, max(kind.num_rows for kind in kinds), 1)
        arena = self._arenas.upload(0)
        with compile_only:
            for kind in kinds:
                self._forward(arena, kind)
        torch.cuda.synchronize()
        self._progress("kernels", 1.0)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """See `Runner.launch`."""
        media = None if self._media is None else self._media.begin(plan, self._arenas)
        only_decodes = plan.num_rows == plan.num_decode_rows
        share = self._model.reads_together and self._arenas.share_blocks(plan)
        together = graph = mixed = None
        if media is None and share:
            together = self._together_graphs.choose(plan)
        if media is None and only_decodes and together is None:
            graph = self._graphs.choose(plan.num_rows, plan.max_kv_len)
        elif media is None and not only_decodes:
            mixed = self._mixed_graphs.choose(plan)
        if together is not None:
            self._arenas.pad(plan.arena, plan.num_rows, together.num_rows)
        if graph is not None:
            self._arenas.pad(plan.arena, plan.num_rows, graph[0])
        if mixed is not None:
            self._arenas.pad_empty(plan.arena, plan.num_rows, mixed.num_rows, plan.num_tokens)
        arena = self._arenas.upload(plan.arena)
        update_u3, copy_c2 = self._arenas.updates(arena, plan)
        self._kernels.apply_updates(self._slots, update_u3, self._kv_cache.lanes, copy_c2)
        if together is not None:
            self._launched = self._together(arena, together)
        elif graph is not None:
            self._launched = self._decode(arena, *graph)
        elif mixed is not None:
            self._launched = self._mixed(arena, mixed)
        else:
            sizes = plan.num_rows, plan.num_decode_rows, plan.num_tokens, plan.max_query_len, plan.max_kv_len
            kind = StepKind(*sizes, reads_together=share)
            self._launched = self._forward(arena, kind, media)

    def _forward(self, arena: Tensor, kind: StepKind, media: MediaInput | None = None) -> Launched:
        """Run rows of any kind as they are."""
        arrays = self._arenas.arrays(arena, kind.num_rows, kind.num_tokens)
        tokens = self._kernels.prepare(arrays, self._slots)
        header = HeaderParts(self._arenas.counts(arena)[0], self._arenas.shared_blocks(arena))
        ctx = step_context(kind, arrays, tokens, self._slots, self._kv_cache.layers, header, self._limits.block_size)
        if self._media is not None:
            ctx.media, ctx.rope_position_3t = media, self._media.rope_positions(tokens.position_t, arrays, media)
        self._backend.prepare(ctx)
        return Launched(self._model.forward(tokens.token_id_t, tokens.position_t, ctx), arrays)

    def _decode(self, arena: Tensor, size: int, bound: int) -> Launched:
        """Run `size` decode rows, padding included, with contexts up to `bound`, through their graph. The arena has one
        address and `prepare` makes its tensors inside the graph, so a replay reads the step's own values."""
        graph_rows = size if self._graphs.has(size, bound) else 0
        kind = decode_kind(size, bound)
        hidden_tm = self._graphs.run(size, bound, lambda: self._forward(arena, kind).hidden_tm)
        return Launched(hidden_tm, self._arenas.arrays(arena, size, size), graph_rows)

    def _together(self, arena: Tensor, kind: StepKind) -> Launched:
        """As `_decode`, for rows that begin with the same blocks."""
        size = kind.num_rows
        graph_rows = size if self._together_graphs.has(kind) else 0
        hidden_tm = self._together_graphs.run(kind, lambda: self._forward(arena, kind).hidden_tm)
        return Launched(hidden_tm, self._arenas.arrays(arena, size, size), graph_rows)

    def _mixed(self, arena: Tensor, kind: StepKind) -> Launched:
        """Run a step with prompts through the graph of its kind, which leaves the rows to sample in `FixedRows`."""

        def forward() -> Tensor:
            launched = self._forward(arena, kind)
            _, num_sampled_1 = self._arenas.counts(arena)
            return self._fixed_rows.fill(launched.hidden_tm, launched.arrays, num_sampled_1, kind.num_rows)[0]

        hidden_sm = self._mixed_graphs.run(kind, forward)
        return Launched(hidden_sm, self._arenas.arrays(arena, kind.num_rows, kind.num_tokens), is_fixed=True)

    @torch.inference_mode()
    def sample(self, plan: StepPlan) -> None:
        """See `Runner.sample`."""
        if plan.num_new_rows:
            self._sampler.admit(plan.new_rows)
        self._sampling.start(plan, self._launched)
        if self._events:
            self._events[plan.arena].record()

    def result(self, plan: StepPlan) -> int:
        """See `Runner.result`. Prompt logprobs go to the core here, once they are on the host."""
        if self._events:
            self._events[plan.arena].synchronize()
        self._sampling.deliver_prompt_logprobs(plan, self._core)
        return plan.arena

    def close(self) -> None:
        """See `Runner.close`. What is on the device goes now, not when this object does: modules refer to each other in
        circles, which are looked for here even where they were frozen."""
        if self._build is not None:
            self._build.close()
        self._mixed_graphs.close()
        self._together_graphs.close()
        self._graphs.close()
        self._kv_cache.layers.clear()
        self._kv_cache.lanes.clear()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        for name in ON_DEVICE:
            self.__dict__.pop(name, None)
        gc.unfreeze()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _events(count: int, device: torch.device) -> list[torch.cuda.Event]:
    """One an arena, to wait for its step; none on CPU, where a step is done when `sample` returns."""
    make: Callable[[], torch.cuda.Event] = torch.cuda.Event
    return [make() for _ in range(count)] if device.type == "cuda" else []
