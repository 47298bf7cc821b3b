"""The rows of the H200 table: what is measured, what vLLM 0.26 did on the same card, and what Octavo wants to do.

vLLM's figures: one H200, torch 2.11, defaults as a user gets them, random weights, measured 2026-11-29. Not here: how
a row is measured (h200.py).
"""

from __future__ import annotations

from dataclasses import dataclass

NAMES = {
    "llama": "Llama-3.1-8B bf16",
    "llama-fp8": "Llama-3.1-8B fp8",
    "qwen-8b": "Qwen3-8B bf16",
    "qwen-0.6b": "Qwen3-0.6B bf16",
    "moe": "Qwen3-30B-A3B bf16",
    "moe-fp8": "Qwen3-30B-A3B fp8",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `workload` begins with a key of `NAMES`; None where vLLM was not measured, or no goal is set."""

    workload: str
    metric: str
    unit: str
    better: str
    vllm: float | None
    goal: float | None

    @property
    def key(self) -> tuple[str, str]:
        return self.workload, self.metric


Pair = tuple[float | None, float | None]
"""(vLLM, goal)"""

DECODE: dict[str, dict[int, Pair]] = {
    "llama": {1: (4.84, 3.75), 8: (4.84, 3.95), 32: (5.36, 4.25), 64: (5.93, 4.7), 128: (6.88, 5.6), 256: (10.54, 8.2)},
    "llama-fp8": {1: (3.46, 2.20), 8: (None, 2.45), 64: (4.34, 3.2), 256: (8.55, 6.5)},
    "qwen-8b": {1: (5.11, 3.95), 64: (6.00, 4.9), 256: (11.01, 8.2)},
    "qwen-0.6b": {
        1: (1.61, 0.60),
        8: (None, 0.75),
        32: (None, 0.95),
        64: (2.30, 1.15),
        128: (None, 1.8),
        256: (4.40, 2.8),
    },
    "moe": {1: (4.11, 2.4), 32: (15.69, 13.3), 128: (18.34, 15.8), 256: (21.01, 18.0)},
    "moe-fp8": {1: (None, None), 32: (None, None), 128: (None, None), 256: (None, None)},
}
"""Model -> batch -> (vLLM, goal), ms a step after 128 prompt tokens, from differences of 128 and 1 output tokens."""

RATES: list[tuple[str, str, float | None, float | None]] = [
    ("llama 512 x (1024 -> 256)", "out", 6307, 7600),
    ("llama-fp8 512 x (1024 -> 256)", "out", 8574, 10700),
    ("qwen-8b 512 x (1024 -> 256)", "out", 6039, 7300),
    ("moe 256 x (1024 -> 128)", "out", 4579, 5700),
    ("qwen-0.6b 256 x (100..1024 -> 100..1024), T 0.6", "out", 23467, 40000),
    ("llama 64 x (2048 -> 1)", "in", 42400, 46000),
    ("llama-fp8 64 x (2048 -> 1)", "in", 66000, 80000),
    ("moe 64 x (2048 -> 1)", "in", 69400, 80000),
    ("moe-fp8 256 x (1024 -> 128)", "out", None, None),
    ("moe-fp8 64 x (2048 -> 1)", "in", None, None),
    ("llama 128 x (128 -> 128), T 1", "out", 12800, 15000),
    ("llama 128 x (128 -> 128), T 1, JSON schema", "out", 12300, 14250),
]
"""(workload, which tokens, vLLM, goal) in tokens/s."""

SERVED: dict[str, dict[str, Pair]] = {
    "at once": {
        "out tokens/s": (3724, 4500),
        "ITL p99": (360, 120),
        "TTFT p50": (3706, None),
        "TTFT p99": (6691, None),
    },
    "10/s": {
        "out tokens/s": (1239, None),
        "TTFT p50": (49, None),
        "TTFT p99": (100, 60),
        "ITL p50": (5.4, None),
        "ITL p99": (30, 12),
    },
    "20/s": {
        "out tokens/s": (2439, None),
        "TTFT p50": (72, None),
        "TTFT p99": (158, 110),
        "ITL p50": (6.3, None),
        "ITL p99": (44, 20),
    },
}
"""Rate -> metric -> (vLLM, goal), ms but for the first; 1024 in, 128 out."""

STARTS: list[tuple[str, str, float | None, float]] = [
    ("llama", "process to first token, cold", 66, 10),
    ("llama", "process to first token, warm", None, 7),
    ("llama", "serve to ready, cold", 91, 11),
    ("llama", "serve to ready, warm", None, 8),
    ("moe", "process to first token, cold", 127, 14),
]
"""Seconds. vLLM's lower figures. Cold: no compiled kernel is cached."""


def _rows() -> list[Row]:
    rows = [
        Row(f"{model} decode, batch {batch}", "step", "ms", "lower", vllm, goal)
        for model, batches in DECODE.items()
        for batch, (vllm, goal) in batches.items()
    ]
    rows.append(Row("llama decode, batch 64, context 4096", "step", "ms", "lower", 12.9, 11.7))
    rows += [
        Row(workload, f"{what} tokens/s", "tokens/s", "higher", vllm, goal) for workload, what, vllm, goal in RATES
    ]
    rows.append(Row("llama 1 x (2048 -> 1)", "time", "s", "lower", 0.052, 0.045))
    shared = "llama 256 x (2048 shared + 64 -> 64)"
    rows += [Row(shared, "cold", "s", "lower", 1.81, 1.4), Row(shared, "warm", "s", "lower", 1.82, 1.3)]
    for rate, metrics in SERVED.items():
        for metric, (vllm, goal) in metrics.items():
            unit, better = ("tokens/s", "higher") if "tokens" in metric else ("ms", "lower")
            rows.append(Row(f"llama served 1024 -> 128, {rate}", metric, unit, better, vllm, goal))
    rows += [Row(f"{model} start", metric, "s", "lower", vllm, goal) for model, metric, vllm, goal in STARTS]
    return rows


ROWS = _rows()
