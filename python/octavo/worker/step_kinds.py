"""The kinds of steps that differ in their kernels: run, or compiled, once each, they leave nothing to compile later.

Which kernels a step takes depends on its decode rows, its longest context and its longest prompt, in a few classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CONTEXT_BOUNDS = (256, 4096)
"""Contexts that attention splits its work for, beside the longest."""
MIXED_ROWS = 129
"""Rows of a mixed step past which kernels are the same: attention splits no more than 128 decode rows."""


GRAPH_TOKENS = (*range(64, 385, 64), 512, 576, 640, 768, 896, 1024, 1152, 1280, 1408, 1536, 1792, 2048)
"""Tokens that graphs of steps with prompts are captured for. Not 448: cuBLAS takes a kernel for Llama-3.1-8B's gate and
up there that needs 1.7 times as long as those for 464 to 512 rows (`python tests/kernels/gpu_matmul.py --sizes`)."""
MAX_MIXED_GRAPHS = 60
"""Steps of further kinds run kernel by kernel."""
PROMPT_ROWS = 8
"""Rows with more than one token in such a step, at most."""
LEAST_ROWS = (16, 48, 128, 256)
"""Such a step's rows, at least."""
TOGETHER_ROWS = 16
"""Rows that read blocks together are so many at least."""


@dataclass(frozen=True, slots=True)
class StepKind:
    """As the fields of a plan of that name."""

    num_rows: int
    num_decode_rows: int
    num_tokens: int
    max_query_len: int
    max_kv_len: int
    is_counted: bool = False
    """All numbers are bounds; the device knows those of a step."""
    reads_together: bool = False
    """Decode rows read the blocks that they begin with together (`ForwardContext.shared_2`)."""


def context_bounds(max_model_len: int) -> list[int]:
    """Every class's longest context, ascending."""
    return [bound for bound in CONTEXT_BOUNDS if bound < max_model_len] + [max_model_len]


def mixed_kinds(max_rows: int, max_model_len: int) -> list[StepKind]:
    """Steps with prompts. One prompt row follows the decode rows; they are as short as they can be. (Attention beside
    prompts knows two classes of contexts only.)"""
    most = min(MIXED_ROWS, max_rows)
    counts = sorted({min(1 << power, most - 1) for power in range(most.bit_length())})
    bounds = sorted({min(CONTEXT_BOUNDS[0], max_model_len), max_model_len})
    kinds = [StepKind(count + 1, count, count + 1, 1, bound) for bound in bounds for count in counts]
    prompts = [StepKind(count, 0, count, max_model_len, max_model_len) for count in (1, most)]
    return [*prompts, *kinds]


def graph_kinds(row_sizes: Sequence[int], max_tokens: int, max_model_len: int) -> list[StepKind]:
    """Steps with prompts that graphs are captured for: few rows first, then few tokens first. Some of their rows, from
    one to `PROMPT_ROWS`, are for prompts. (Sampling follows in the graphs of `row_sizes`, so that is what they have.)
    """
    sizes = sorted(row_sizes)
    classes = sorted({next((size for size in sizes if size >= least), sizes[-1]) for least in LEAST_ROWS if sizes})
    kinds = []
    for num_rows in (size for size in classes if size > 1):
        num_decode_rows = num_rows - min(PROMPT_ROWS, num_rows // 2)
        for num_tokens in (size for size in GRAPH_TOKENS if num_rows <= size <= max_tokens):
            kinds.append(StepKind(num_rows, num_decode_rows, num_tokens, num_tokens, max_model_len, is_counted=True))
    return kinds


def decode_kind(size: int, bound: int, *, reads_together: bool = False) -> StepKind:
    """A step of `size` decode rows with contexts up to `bound`."""
    return StepKind(size, size, size, 1, bound, reads_together=reads_together)


def decode_kinds(sizes: Sequence[int], max_model_len: int) -> list[StepKind]:
    """Steps of decode rows, by the sizes that graphs are captured for: short contexts first, then few rows first."""
    return [decode_kind(size, bound) for bound in context_bounds(max_model_len) for size in sorted(sizes)]


def together_kinds(sizes: Sequence[int], max_model_len: int) -> list[StepKind]:
    """Steps of decode rows that read blocks together: what that needs is in rust/core/src/shared.rs."""
    bounds = context_bounds(max_model_len)[1:] or [max_model_len]
    rows = [size for size in sorted(sizes) if size >= TOGETHER_ROWS]
    return [decode_kind(size, bound, reads_together=True) for bound in bounds for size in rows]
