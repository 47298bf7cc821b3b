"""Steps over rows of the null slot, so that requests wait neither for a compiler nor for memory nor for a capture: the
largest before the engine is ready, the others while it is idle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from octavo.protocol import Progress
from octavo.sampling.sampler import SamplePlan, Sampler
from octavo.worker.graphs import PATIENCE
from octavo.worker.kernel_build import KernelBuild
from octavo.worker.resolve import Limits
from octavo.worker.step_forward import Launched, StepForward
from octavo.worker.step_kinds import StepKind, mixed_kinds
from octavo.worker.step_sampling import StepSampling


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Of one runner."""

    forward: StepForward
    sampling: StepSampling
    sampler: Sampler
    limits: Limits
    max_model_len: int
    chunk_rows: int
    """Rows that are sampled at a time."""
    progress: Progress

    def largest(self, build: KernelBuild | None) -> None:
        """What the first request must not wait for. `build`: of kernels, beside the load of the weights."""
        self._load_products()
        if build is not None:
            build.wait(self.progress)
        self._compile_mixed_steps()
        self.progress("graphs", 0.0)
        step, limits = self.forward, self.limits
        length = min(limits.max_num_batched_tokens, self.max_model_len)
        num_rows = min(limits.max_num_batched_tokens // length, limits.max_num_seqs)
        step.arenas.fill_null_rows(0, num_rows, length)
        kind = StepKind(num_rows, 0, num_rows * length, length, length)
        hidden_tm = step.as_it_is(step.arenas.upload(0), kind).hidden_tm
        step.model.logits(hidden_tm[: min(limits.max_num_seqs, self.chunk_rows)])
        if (most := step.graphs.decode.largest) is not None:
            self._decode(most, self.max_model_len)
        self.sampler.warm_up(limits=False)
        torch.cuda.synchronize()
        self.progress("graphs", 1.0)

    def _load_products(self) -> None:
        """Start cuBLAS, which takes a while, when there is nothing else to do: the kernels are being built."""
        some = self.forward.fixed_rows.hidden_sm.new_zeros(256, 256)
        torch.mm(some, some)
        torch.cuda.synchronize()

    def _compile_mixed_steps(self) -> None:
        """Compile the kernels of steps without a graph, so that no request waits for a compiler."""
        step = self.forward
        compile_only = step.kernels.compile_only()
        if compile_only is None:
            return
        self.progress("kernels", 0.0)
        kinds = mixed_kinds(min(self.limits.max_num_seqs, self.limits.max_num_batched_tokens), self.max_model_len)
        step.arenas.fill_null_rows(0, max(kind.num_rows for kind in kinds), 1)
        arena = step.arenas.upload(0)
        with compile_only:
            for kind in kinds:
                step.as_it_is(arena, kind)
        torch.cuda.synchronize()
        self.progress("kernels", 1.0)

    def chores(self) -> Iterator[str]:
        """Capture the graphs that the start left out, one at a time: requests may come in between."""
        graphs = self.forward.graphs
        self.sampler.warm_up(limits=True)
        yield "sampling kernels"
        for size, bound in graphs.decode.missing():
            self._capture_decode(size, bound)
            yield f"graph of {size} rows, context {bound}"
            for work in self.sampler.usual_plans():
                self._capture_sampling(size, bound, work)
                yield f"graph of sampling {size} rows"
        for kind in graphs.together.missing():
            self._capture_together(kind)
            yield f"graph of {kind.num_rows} rows that share blocks, context {kind.max_kv_len}"
        for kind in graphs.mixed.missing():
            self._capture_mixed(kind)
            yield f"graph of {kind.num_tokens} tokens, {kind.num_rows} rows"

    @torch.inference_mode()
    def _capture_mixed(self, kind: StepKind) -> None:
        step, count = self.forward, kind.num_decode_rows
        step.arenas.fill_null_rows(0, count, 1)
        step.arenas.pad_empty(0, count, kind.num_rows, count)
        step.mixed(step.arenas.upload(0), kind)
        torch.cuda.synchronize()

    @torch.inference_mode()
    def _capture_together(self, kind: StepKind) -> None:
        step = self.forward
        step.arenas.fill_null_rows(0, kind.num_rows, 1)
        step.together(step.arenas.upload(0), kind)
        torch.cuda.synchronize()

    @torch.inference_mode()
    def _capture_decode(self, size: int, bound: int) -> Launched:
        """Capture it, if it is not there; then it is there, and the tensors of a replay stay where they are."""
        self._decode(size, bound)
        return self._decode(size, bound)

    def _decode(self, size: int, bound: int) -> Launched:
        step = self.forward
        step.arenas.fill_null_rows(0, size, 1)
        return step.decode(step.arenas.upload(0), size, bound)

    @torch.inference_mode()
    def _capture_sampling(self, size: int, bound: int, work: SamplePlan) -> None:
        """After a decode step, and after a step with prompts."""
        step = self.forward
        launched = self._capture_decode(size, bound)
        null_slots = np.full(size, step.slots.null_slot, dtype=np.int32)
        after_mixed = step.fixed_rows.fill(launched.hidden_tm, launched.arrays, size, size)
        for hidden_sm, rows in ((launched.hidden_tm[:size], launched.arrays), after_mixed):
            for _ in range(PATIENCE):
                self.sampling.by_graph(size, hidden_sm, rows, 0, null_slots, work)
        torch.cuda.synchronize()
