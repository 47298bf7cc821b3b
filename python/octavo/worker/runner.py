"""The runner that executes plans with PyTorch: upload, update, forward; sample; wait. What runs is the plan's business.

Nothing in `launch` or `sample` waits for the device. Not here: which graph a step runs in (step_forward.py), how tokens
are chosen (octavo.sampling), how attention reads the cache (octavo.attention), how big everything is (memory.py).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from octavo.attention.base import make_backend
from octavo.attention.whole import WholeImageAttention
from octavo.config import EngineConfig
from octavo.models.loader import load_model
from octavo.protocol import Progress
from octavo.sampling.sampler import Sampler
from octavo.worker.batch import OutputArenas, StepArenas
from octavo.worker.facts import model_facts
from octavo.worker.fixed_rows import FixedRows
from octavo.worker.image_facts import image_facts
from octavo.worker.kernel_build import KernelBuild
from octavo.worker.kv_cache import DTYPES, allocate_kv_cache
from octavo.worker.media import StepMedia
from octavo.worker.memory import make_plan, memory_errors
from octavo.worker.output_blocks import OutputBlocks
from octavo.worker.resolve import GRAPH_BACKENDS, kv_dtype
from octavo.worker.slots import Slots
from octavo.worker.step_forward import StepForward
from octavo.worker.step_graphs import StepGraphs
from octavo.worker.step_kernels import StepKernels
from octavo.worker.step_sampling import StepSampling
from octavo.worker.usage import rows_at_a_time
from octavo.worker.warm_up import WarmUp

if TYPE_CHECKING:
    from octavo._core import Core, StepPlan
    from octavo.models.sources import ModelSource


ON_DEVICE = (
    "_model", "_media", "_backend", "_kernels", "_slots", "_sampler", "_sampling", "_fixed_rows", "_arenas", "_outputs",
    "_launched", "_graphs", "_forward", "_events", "chores", "_core",
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
        execution = self.config.execution
        self._graphs = StepGraphs.make(
            execution.cuda_graph_sizes,
            prompt_tokens=execution.prompt_graph_tokens or 0,
            max_model_len=self.plan.max_model_len,
            reads_together=self._model.reads_together,
        )

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
        self._core = core
        self._allocate_arenas(core)
        self._forward = StepForward(
            self._model, self._backend, self._kernels, self._slots, self._kv_cache, self._limits.block_size,
            self._media, self._fixed_rows, self._graphs, self._arenas,
        )  # fmt: skip
        self._sampling = StepSampling(
            self._model, self._sampler, self._graphs.decode, self._fixed_rows, self._arenas, self._outputs,
            last_token_s=self._slots.last_token_s, chunk_rows=self._chunk_rows,
        )  # fmt: skip
        warm_up = self._warm_up()
        self.chores = warm_up.chores()
        if self._device.type == "cuda":
            with memory_errors(self.config):
                warm_up.largest(self._build)

    def _allocate_arenas(self, core: Core) -> None:
        """One more than steps in flight."""
        count = self._limits.overlap_depth + 1
        self._arenas = StepArenas(core.arena_layout, count=count, null_slot=self._slots.null_slot, device=self._device)
        self._outputs = OutputArenas(core.output_layout, count=count, device=self._device)
        self._events = _events(count, self._device)
        core.register(
            [array.data for array in self._arenas.host_arrays], [array.data for array in self._outputs.host_arrays]
        )
        core.register_masks(self._sampler.masks.host.numpy().data)

    def _warm_up(self) -> WarmUp:
        return WarmUp(
            self._forward, self._sampling, self._sampler, self._limits, self.plan.max_model_len, self._chunk_rows,
            self._progress,
        )  # fmt: skip

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """See `Runner.launch`."""
        media = None if self._media is None else self._media.begin(plan, self._arenas)
        run = self._forward.way_of(plan, media)
        arena = self._arenas.upload(plan.arena)
        update_u3, copy_c2 = self._arenas.updates(arena, plan)
        self._kernels.apply_updates(self._slots, update_u3, self._kv_cache.lanes, copy_c2)
        self._launched = run(arena)

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
