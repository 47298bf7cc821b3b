"""From a config to a runner, a control plane and the loop between them; the same for the engine process and `LLM`.

Not here: what a loop pass does (loop.py) and who calls it (process.py, llm.py).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from octavo._core import Core, CoreConfig
from octavo.config import EngineConfig, ExecutionConfig
from octavo.engine.idle_options import log_idle_options
from octavo.engine.loop import EngineLoop
from octavo.pooling.recipe import choose_task
from octavo.protocol import ModelFacts, Progress
from octavo.speculation import read_speculation
from octavo.worker.base import make_runner
from octavo.worker.step_kinds import GRAPH_TOKENS

# The most that the control plane takes.
MAX_REQUESTS = 2**30
MAX_TOKENS = 2**50


class Loop(Protocol):
    """What runs an engine: `EngineLoop`, or `PoolingLoop` for a model that does not generate."""

    core: Core

    @property
    def runner(self) -> Loaded: ...
    def step(self) -> bool: ...
    def close(self) -> None: ...


class Loaded(Protocol):
    """A model that was loaded, whoever runs it."""

    config: EngineConfig
    facts: ModelFacts
    chores: Iterator[str]


def core_config(runner: Loaded, *, bounded: bool = True) -> CoreConfig:
    """The control plane's limits, from the runner's resolved config and what it says of the model.

    `bounded=False` lifts the queue's limits, and that of inter-token latency where none is asked for: an offline caller
    hands over all it has, nobody else waits, and only the end counts.
    """
    config, facts = runner.config, runner.facts
    scheduler = config.scheduler
    assert scheduler.max_num_batched_tokens is not None, "the runner resolves its config"
    assert scheduler.overlap_depth is not None, "the runner resolves its config"
    images = facts.images
    return CoreConfig(
        block_size=facts.block_size,
        num_blocks=facts.num_blocks,
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        max_queued_requests=scheduler.max_queued_requests if bounded else MAX_REQUESTS,
        max_queued_tokens=scheduler.max_queued_tokens if bounded else MAX_TOKENS,
        policy=scheduler.scheduling_policy,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        long_prefill_token_threshold=scheduler.long_prefill_token_threshold,
        max_itl_ms=scheduler.max_itl_ms if bounded or scheduler.max_itl_ms is not None else 0.0,
        depth=scheduler.overlap_depth,
        max_logprobs=facts.max_logprobs,
        hash_seed=secrets.randbits(63),
        speculation=read_speculation(scheduler.speculative_config),
        groups=facts.cache_groups,
        output_bytes=None if images is None else (images.token_bytes, images.block_bytes),
        step_sizes=prompt_sizes(config.execution),
        plans_late=bounded and config.execution.device == "cuda" and scheduler.max_itl_ms != 0,
    )


def prompt_sizes(execution: ExecutionConfig) -> list[int]:
    """What steps with prompts are padded to where they run as CUDA graphs."""
    return [
        size for size in GRAPH_TOKENS if execution.cuda_graph_sizes and size <= (execution.prompt_graph_tokens or 0)
    ]


def build_engine(config: EngineConfig, progress: Progress, *, bounded: bool = True) -> Loop:
    """Load the model and wire the loop that its task needs. Errors: ConfigError, ModelError."""
    task = "generate" if config.execution.runner == "fake" else choose_task(config.model, progress)
    if task != "generate":
        return _build_pooling(config, task, progress)
    runner = make_runner(config, progress)
    log_idle_options(config, runner.config, task, runner.facts)
    core = Core(core_config(runner, bounded=bounded))
    if runner.facts.tokenizer_path is not None:
        tokenizer = Path(runner.facts.tokenizer_path) / "tokenizer.json"
        core.use_tokenizer(str(tokenizer), runner.facts.eos_token_ids)
    runner.attach(core)
    return EngineLoop(runner, core)


def _build_pooling(config: EngineConfig, task: str, progress: Progress) -> Loop:
    from octavo.engine.pooling_loop import PoolingLoop
    from octavo.pooling.runner import PoolingRunner

    runner = PoolingRunner(config, task, progress)
    log_idle_options(config, runner.config, task, runner.facts)
    return PoolingLoop(runner, Core(core_config(runner)))
