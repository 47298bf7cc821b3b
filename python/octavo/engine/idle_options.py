"""Options that do nothing for what runs here: said in the log at start, so that nobody waits for their effect.

Not here: values that contradict each other or the device, which are errors (config/build.py, worker/resolve.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from octavo.config import EngineConfig, changed
from octavo.protocol import ModelFacts

logger = logging.getLogger(__name__)

POOLING = "pooling"
RUNS = {
    "cuda": "generation on CUDA",
    "cpu": "generation with PyTorch on the CPU",
    "embedded": "the embedded runner",
    "fake": "the fake runner",
    POOLING: "a model of embeddings or scores",
}
"""What an engine may be, for people."""
GENERATE = frozenset(RUNS) - {POOLING}
LOADED = GENERATE - {"fake"}
READ_BY: Mapping[str, frozenset[str]] = {
    "trust_remote_code": GENERATE,
    "quantization": LOADED,
    "fp8_wide_attention": frozenset({"cuda", "cpu"}),
    "fp8_wide_mlp": frozenset({"cuda", "cpu"}),
    "pooling": frozenset({POOLING}),
    "block_size": GENERATE,
    "num_gpu_blocks_override": GENERATE,
    "gpu_memory_utilization": frozenset({"cuda"}),
    "kv_cache_memory_bytes": LOADED,
    "kv_cache_dtype": LOADED,
    "enable_prefix_caching": GENERATE,
    "cache_groups": LOADED,
    "long_prefill_token_threshold": GENERATE,
    "max_itl_ms": GENERATE,
    "overlap_depth": GENERATE,
    "attention_backend": LOADED,
    "decode_kernels": frozenset({"cuda"}),
    "deterministic": frozenset({"cuda"}),
    "cuda_graph_sizes": frozenset({"cuda"}),
    "prompt_graph_tokens": frozenset({"cuda"}),
    "cpu_threads": frozenset({"cpu", "embedded", POOLING}),
    "cpu_pin": frozenset({"embedded"}),
    "fake_step_ms": frozenset({"fake"}),
}
"""Who reads an option; everybody reads those that are not here."""
GRAPHS = ("cuda_graph_sizes", "prompt_graph_tokens")
WIDE = ("fp8_wide_attention", "fp8_wide_mlp")


def run_of(task: str, resolved: EngineConfig) -> str:
    """The key of `RUNS` for a task and what its runner made of the config."""
    if task != "generate":
        return POOLING
    execution = resolved.execution
    return execution.device if execution.runner == "torch" else execution.runner


def idle_options(
    asked: EngineConfig, resolved: EngineConfig, task: str, facts: ModelFacts
) -> Iterator[tuple[str, str]]:
    """(name, why) of each option that was changed from its default and does nothing."""
    run = run_of(task, resolved)
    media = {name for name in changed(asked) if hasattr(asked.media, name)}
    for name in changed(asked):
        if run not in READ_BY.get(name, RUNS):
            yield name, f"{RUNS[run]} does not read it"
        elif name in GRAPHS and resolved.execution.enforce_eager:
            yield name, "steps run without CUDA graphs"
        elif name in WIDE and resolved.model.quantization != "fp8":
            yield name, "no weights are rounded to fp8"
        elif name == "pooling" and task != "embed":
            yield name, f"the task is {task}, not embed"
        elif name in media and facts.images is None:
            yield name, "no images are taken"


def log_idle_options(asked: EngineConfig, resolved: EngineConfig, task: str, facts: ModelFacts) -> None:
    """A warning each."""
    for name, why in idle_options(asked, resolved, task, facts):
        logger.warning("--%s does nothing here: %s", name.replace("_", "-"), why)
