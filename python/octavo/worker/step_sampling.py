"""From a step's hidden states to its tokens: which rows are sampled, where their inputs lie, and through which graph.

Nothing here waits for the device (`deliver_prompt_logprobs` is called when the step has ended). Not here: how
tokens are chosen (octavo.sampling), what a step runs before (step_forward.py).

Shape suffixes: t tokens, s sampled rows, m model dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from octavo.models.base import CausalLM
from octavo.sampling.base import IntArray, SampledRows, TokenTarget
from octavo.sampling.logprobs import TokenLogprobs
from octavo.sampling.prompt_logprobs import prompt_logprobs
from octavo.sampling.sampler import SamplePlan, Sampler
from octavo.sampling.tables import start_download, upload
from octavo.worker.batch import OutputArenas, StepArenas, StepArrays
from octavo.worker.fixed_rows import FixedRows
from octavo.worker.graphs import DecodeGraphs
from octavo.worker.step_forward import Launched

if TYPE_CHECKING:
    from octavo._core import Core, StepPlan


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of a prompt row on their way to the host."""

    slot: int
    on_host: TokenLogprobs


class StepSampling:
    """Of one runner. At most `chunk_rows` rows are sampled at a time, so that their logits stay small."""

    def __init__(
        self,
        model: CausalLM,
        sampler: Sampler,
        graphs: DecodeGraphs,
        fixed_rows: FixedRows,
        arenas: StepArenas,
        outputs: OutputArenas,
        *,
        last_token_s: Tensor,
        chunk_rows: int,
    ) -> None:
        self._model, self._sampler, self._graphs, self._fixed_rows = model, sampler, graphs, fixed_rows
        self._arenas, self._outputs = arenas, outputs
        self._last_token_s, self._chunk_rows = last_token_s, chunk_rows
        self._prompt_logprobs: list[list[PromptLogprobs]] = [[] for _ in arenas.host_arrays]

    def start(self, plan: StepPlan, launched: Launched) -> None:
        """Start all that a step yields on its way to the host."""
        if plan.prompt_logprob_rows:
            self._score_prompts(plan, launched.hidden_tm)
        if plan.num_sampled:
            self._choose(plan, launched)

    def deliver_prompt_logprobs(self, plan: StepPlan, core: Core) -> None:
        """Give the core those of a step that has ended."""
        arrived = self._prompt_logprobs[plan.arena]
        for part in arrived:
            ids, values, ranks = (tensor.numpy().data for tensor in part.on_host)
            core.put_prompt_logprobs(part.slot, ids, values, ranks)
        arrived.clear()

    def _choose(self, plan: StepPlan, launched: Launched) -> None:
        """Tokens of rows [0, num_sampled), by a graph where one can: it reads a decode step's own tensors if those come
        from a graph, else what `FixedRows` makes of the step."""
        count, arrays, hidden_tm = plan.num_sampled, launched.arrays, launched.hidden_tm
        host_slots = self._arenas.host_slots(plan)
        if plan.needs_masks:
            self._sampler.masks.upload(host_slots)
        work = self._sampler.plan(host_slots)
        size, size_after = launched.graph_rows, self._graphs.size_for(count)
        if size and count == plan.num_rows and work.capture_key is not None:
            self.by_graph(size, hidden_tm[:size], arrays, plan.arena, host_slots, work)
        elif size_after is not None and plan.num_rows != plan.num_decode_rows and work.capture_key is not None:
            if not launched.is_fixed:
                self._fixed_rows.fill(hidden_tm, arrays, count, size_after)
            hidden_sm, fixed = self._fixed_rows.rows(arrays, size_after)
            self.by_graph(size_after, hidden_sm, fixed, plan.arena, host_slots, work)
        elif launched.is_fixed:
            hidden_sm, fixed = self._fixed_rows.rows(arrays, count)
            self._choose_tokens(plan.arena, hidden_sm, fixed, host_slots, work)
        elif plan.num_rows == plan.num_decode_rows:
            self._choose_tokens(plan.arena, hidden_tm[:count], arrays, host_slots, work)
        else:
            last_s = arrays.query_start_r[1 : count + 1].long() - 1
            self._choose_tokens(plan.arena, hidden_tm[last_s], arrays, host_slots, work)
        self._outputs.download(plan.arena, needs_logprobs=plan.needs_logprobs)

    def by_graph(
        self, size: int, hidden_sm: Tensor, arrays: StepArrays, arena: int, host_slots: IntArray, work: SamplePlan
    ) -> None:
        """`_choose_tokens` of `size` rows, padding included, whose tensors stay where they are."""
        self._graphs.run_sampling(
            (size, hidden_sm.data_ptr(), work),
            lambda: self._choose_tokens(arena, hidden_sm, arrays, host_slots, work),
        )

    def _choose_tokens(
        self, arena: int, hidden_sm: Tensor, arrays: StepArrays, host_slots: IntArray, work: SamplePlan
    ) -> None:
        """Tokens of the first rows from their hidden states, so many at a time that their logits stay small. On CUDA
        the output arena is one for all steps until it is downloaded, so that `arena` does not matter."""
        count = hidden_sm.shape[0]
        for start in range(0, count, self._chunk_rows):
            part = slice(start, min(start + self._chunk_rows, count))
            rows = SampledRows(arrays.row_slot_r[part], arrays.kv_len_r[part], host_slots)
            target = TokenTarget(self._last_token_s, self._outputs.tokens(arena, part))
            sampled = self._sampler.sample(self._model.logits(hidden_sm[part]), rows, work, target)
            if sampled.logprobs is not None:
                self._outputs.put_logprobs(arena, part, sampled.logprobs)

    def _score_prompts(self, plan: StepPlan, hidden_tm: Tensor) -> None:
        """Start the logprobs of prompt tokens on their way to the host."""
        for row in plan.prompt_logprob_rows:
            targets = np.frombuffer(row.target_ids, dtype="<i4").astype(np.int64)
            if len(targets):
                target_t = upload(targets, hidden_tm.device)
                hidden = hidden_tm[row.token_start : row.token_start + len(targets)]
                scores = prompt_logprobs(hidden, target_t, row.num_top, self._model.logits, self._chunk_rows)
                on_host = TokenLogprobs(*map(start_download, scores))
                self._prompt_logprobs[plan.arena].append(PromptLogprobs(row.slot, on_host))
