"""The runner over the embedded decoder (rust/cpu): no torch, weights as they are stored, steps and sampling in Rust.

What runs is the plan's business, what a step computes is the decoder's; here weights find their places, and results
their arenas. Not here: sizes and formats (embedded_plan.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from octavo._core import EmbeddedDecoder
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.protocol import Progress
from octavo.speculation import read_speculation
from octavo.worker.device import core_cpus
from octavo.worker.embedded_plan import find_model, make_plan
from octavo.worker.embedded_weights import load_weights
from octavo.worker.facts import model_facts
from octavo.worker.resolve import kv_dtype

if TYPE_CHECKING:
    from octavo._core import Core, NewRow, StepPlan

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RowSampling:
    """A sequence's wire parameters, as the decoder takes them; see `SamplingParams`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    first_choice: int
    """Added to the sequence's index where it keys what is drawn."""
    num_logprobs: int | None
    bias: list[tuple[int, float]]
    allowed: list[int] | None
    bad_words: list[list[int]]
    stops: list[int]
    """Masked before position `stops_from`."""
    stops_from: int

    @classmethod
    def of(cls, row: NewRow) -> RowSampling:
        params: dict[str, Any] = json.loads(row.params)
        min_tokens = params.get("min_tokens", 0)
        bias = params.get("logit_bias") or {}
        return cls(
            temperature=params.get("temperature", 1.0),
            top_k=max(0, params.get("top_k", 0)),
            top_p=params.get("top_p", 1.0),
            min_p=params.get("min_p", 0.0),
            presence_penalty=params.get("presence_penalty", 0.0),
            frequency_penalty=params.get("frequency_penalty", 0.0),
            repetition_penalty=params.get("repetition_penalty", 1.0),
            seed=params.get("seed", 0),
            first_choice=params.get("first_choice", 0),
            num_logprobs=params.get("logprobs"),
            bias=[(int(token_id), value) for token_id, value in bias.items()],
            allowed=params.get("allowed_token_ids"),
            bad_words=params.get("bad_words_ids", []),
            stops=sorted({*params.get("eos_token_ids", ()), *params.get("stop_token_ids", ())}),
            stops_from=row.num_prompt_tokens + min_tokens if min_tokens else 0,
        )


def own_cpus(num_threads: int) -> list[int]:
    """A core for each thread. Errors: ConfigError where there are not as many."""
    cpus = core_cpus()
    if len(cpus) < num_threads:
        raise ConfigError(f"--cpu-pin: {num_threads} threads have {len(cpus)} cores; set --cpu-threads", "cpu_pin")
    return cpus[:num_threads]


class EmbeddedRunner:
    """See `octavo.worker.base.Runner`."""

    def __init__(self, config: EngineConfig, progress: Progress) -> None:
        progress("config", 0.0)
        embedded = make_plan(config, find_model(config, progress))
        self.plan = plan = embedded.memory
        self.config = plan.config
        self.num_blocks = plan.num_blocks
        speculation = read_speculation(self.config.scheduler.speculative_config)
        progress(f"{plan.report()}\n{'speculation':<17}{speculation or 'off'}", 1.0)
        self.decoder = EmbeddedDecoder(plan.limits.cpu_threads)
        load_weights(self.decoder, embedded.description, embedded.weights, self.config.model, progress)
        limits = plan.limits
        self.decoder.build(
            embedded.description,
            num_slots=limits.max_num_seqs,
            num_blocks=plan.num_blocks,
            block_size=limits.block_size,
            max_length=plan.max_model_len,
            max_tokens=limits.max_num_batched_tokens,
            cache_dtype=kv_dtype(self.config),
            num_threads=limits.cpu_threads,
            cpus=own_cpus(limits.cpu_threads) if self.config.execution.cpu_pin else None,
            layer_groups=plan.layout.layer_groups,
        )
        self.chores: Iterator[str] = iter(())
        self.facts = model_facts(
            self.config,
            num_blocks=plan.num_blocks,
            vocab_size=embedded.description.vocab_size,
            eos_token_ids=plan.model.eos_token_ids,
            generation_config=plan.source.generation_config,
            tokenizer_path=plan.source.tokenizer_path,
            layout=plan.layout,
        )

    def attach(self, core: Core) -> None:
        """See `Runner.attach`."""
        self._core = core
        count = self.plan.limits.overlap_depth + 1
        self._arenas = [np.zeros(core.arena_layout.num_ints, dtype=np.int32) for _ in range(count)]
        self._outputs = [np.zeros(core.output_layout.num_ints, dtype=np.int32) for _ in range(count)]
        self._scores: list[list[tuple[int, Ints, npt.NDArray[np.float32], Ints]]] = [[] for _ in range(count)]
        arenas, outputs = [array.data for array in self._arenas], [array.data for array in self._outputs]
        core.register(arenas, outputs)
        shape = (self.plan.limits.max_num_seqs, core.output_layout.max_sampled, core.mask_words)
        self._masks = np.full(shape, -1, dtype=np.int32)
        core.register_masks(self._masks.data)
        self.decoder.register(arenas, outputs, core.arena_layout, core.output_layout, self._masks.data, core.mask_words)

    def launch(self, plan: StepPlan) -> None:
        """See `Runner.launch`; the step is done when this returns."""
        self.decoder.forward(plan)

    def sample(self, plan: StepPlan) -> None:
        """See `Runner.sample`."""
        for row in plan.new_rows:
            self.decoder.admit(row, RowSampling.of(row))
        for scored in plan.prompt_logprob_rows:
            if scored.target_ids:
                ids, values, ranks = self.decoder.score(scored.token_start, scored.target_ids, scored.num_top)
                shape = (len(scored.target_ids) // 4, -1)
                self._scores[plan.arena].append(
                    (
                        scored.slot,
                        np.frombuffer(ids, dtype=np.int32).reshape(shape),
                        np.frombuffer(values, dtype=np.float32).reshape(shape),
                        np.frombuffer(ranks, dtype=np.int32),
                    )
                )
        if plan.num_sampled:
            self.decoder.sample(plan)

    def result(self, plan: StepPlan) -> int:
        """See `Runner.result`."""
        for slot, ids, values, ranks in self._scores[plan.arena]:
            self._core.put_prompt_logprobs(slot, ids.data, values.data, ranks.data)
        self._scores[plan.arena].clear()
        return plan.arena

    def close(self) -> None:
        """Release the weights and the cache."""
        del self.decoder
