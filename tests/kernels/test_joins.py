"""The kernels between a layer's products without a GPU: numerics, alone and in models, in the interpreter, and
compilation for an H200."""

from __future__ import annotations

import offline_compile
import pytest
import torch
from case_files import CaseFile, CaseRun, runs

from octavo.kernels.triton import gated, rms_norm, rotate_write, weighed_sum

BF16 = torch.bfloat16
SIZES = {
    "gemma3-27b": (5376, 21504, 32, 16, 128, True),
    "llama-8b": (4096, 14336, 32, 8, 128, False),
    "qwen3-0.6b": (1024, 3072, 16, 8, 128, True),
    "qwen2-7b": (3584, 18944, 28, 4, 128, False),
    "smollm2": (576, 1536, 9, 3, 64, False),
}
"""(model dim, MLP dim, query heads, KV heads, head dim, head norms)"""


@runs(CaseFile("joins_interpreted.py"), CaseFile("joined_model_cases.py"))
def test_numerics_in_the_interpreter(case_run: CaseRun) -> None:
    assert case_run.passed, case_run.said


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("model", SIZES)
def test_joins_compile(model: str, pdl: bool) -> None:
    """Without spills; the rows travel 16 bytes a thread."""
    hidden, inner, heads, kv_heads, dim, has_norm = SIZES[model]
    gain_dtype = torch.float32 if model.startswith("gemma") else BF16
    x, gain = torch.empty(4, hidden, dtype=BF16), torch.empty(hidden, dtype=gain_dtype)
    qkv = torch.empty(4, (heads + 2 * kv_heads) * dim, dtype=BF16)
    cache = torch.empty(3, 2, kv_heads, 64, dim, dtype=BF16)
    gains = [torch.empty(dim, dtype=gain_dtype) if has_norm else None for _ in range(2)]
    angles, places = torch.empty(4, dim), torch.empty(4, dtype=torch.int64)
    with offline_compile.record(rms_norm, gated, rotate_write, weighed_sum) as launches:
        weighed_sum.weighed_sum(x, torch.empty(1, hidden, dtype=BF16), x, x, pdl=pdl)
        rms_norm.rms_norm(x, gain, 1e-5, pdl=pdl)
        rms_norm.add_rms_norm(x, x, gain, 1e-5, pdl=pdl)
        gated.gated_silu(torch.empty(4, 2 * inner, dtype=BF16), pdl=pdl)
        gated.gated_gelu(torch.empty(4, 2 * inner, dtype=BF16), pdl=pdl)
        rotate_write.rotate_write(qkv, angles, cache, places, *gains, num_heads=heads, norm_eps=1e-5, pdl=pdl)
    assert len(launches) == 6
    for launch in launches:
        compiled = offline_compile.compile_launch(*launch)
        assert compiled.spill_bytes == 0, compiled
        assert compiled.registers <= 128, compiled
        assert compiled.wide_loads > 0, compiled
