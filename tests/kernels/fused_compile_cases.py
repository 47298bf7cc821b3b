"""Every kernel of a decode step of real models, compiled for sm_90 without a GPU; run by test_fused_kernels.py.

The launches are those that `FusedDecode` makes for each bucket of rows, over tensors without memory.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from fused_models import GPT_OSS_20B, LLAMA_8B, QWEN3_06B, QWEN3_8B, QWEN3_30B_A3B, Sizes, make_context, make_weights
from sm90_compile import Compiled, compile_launch

from octavo.kernels.triton.decode_attention_launches import (
    TILE,
    AttentionLayer,
    AttentionScratch,
    DecodeRows,
    HeadShape,
    attend,
)
from octavo.kernels.triton.launch import Launch
from octavo.kernels.triton.skinny_linear import ResidualStream, SkinnyLinear, store
from octavo.kernels.triton.skinny_table import BUCKETS, SHARED_BYTES
from octavo.layers.fused.decode import FusedDecode
from octavo.layers.linear import Form
from octavo.worker.step_kinds import CONTEXT_BOUNDS, TOGETHER_ROWS

MODELS = {
    "llama-8b": LLAMA_8B,
    "qwen3-8b": QWEN3_8B,
    "qwen3-0.6b": QWEN3_06B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "gpt-oss-20b": GPT_OSS_20B,
}
LENGTHS = (200, 1000, 100_000)
MAX_REGISTERS = 255
REGISTER_FILE = 65536
"""Of a multiprocessor."""
MULTIPROCESSORS = 132
"""Of an H200."""
seen: dict[Any, Compiled] = {}


def compile_once(launch: Launch) -> Compiled:
    if launch.variant not in seen:
        seen[launch.variant] = compile_launch(launch)
    return seen[launch.variant]


def step_launches(sizes: Sizes, rows: int, *, form: Form = "wide") -> list[Launch]:
    """Two layers (their inputs differ: embedding, then a block) and the head."""
    weights = make_weights(sizes, layers=2, device="meta", max_len=1024, form=form)
    decode = FusedDecode(weights)
    launches = []
    token_id_t = torch.empty(rows, dtype=torch.int64, device="meta")
    for max_kv_len in LENGTHS:
        ctx = make_context(sizes, [64] * rows, layers=2, device="meta", max_kv_len=max_kv_len)
        assert decode.accepts(ctx)
        launches += decode.launches(token_id_t, ctx)
        if rows >= TOGETHER_ROWS and max_kv_len > CONTEXT_BOUNDS[0]:
            ctx.shared_2 = torch.empty(2, dtype=torch.int32, device="meta")
            launches += decode.launches(token_id_t, ctx)
    head = SkinnyLinear.make("head", weights.head_vm, None)
    hidden = torch.empty(rows, sizes.hidden, dtype=torch.bfloat16, device="meta")
    stream = ResidualStream.allocate(sizes.hidden, torch.bfloat16, torch.device("meta"))
    logits = torch.empty(rows, sizes.vocab, dtype=torch.float32, device="meta")
    return [*launches, store(head, hidden, logits, stream)]


@pytest.mark.parametrize("rows", BUCKETS)
@pytest.mark.parametrize(
    ("model", "form"),
    [
        *((model, "wide") for model in MODELS),
        *product(("llama-8b", "qwen3-0.6b", "qwen3-30b-a3b"), ("channels", "squares")),
    ],
)
def test_step_compiles_without_spills(model: str, form: Form, rows: int) -> None:
    launches = step_launches(MODELS[model], rows, form=form)
    assert any(launch.constants.get("FP8") for launch in launches) == (form != "wide")
    assert any(launch.constants.get("SHARE") for launch in launches) == (form == "squares")
    for launch in launches:
        compiled = compile_once(launch)
        assert compiled.spill_bytes == 0, launch
        assert compiled.registers <= MAX_REGISTERS
        assert compiled.shared_bytes <= SHARED_BYTES
        CHECKS.get(launch.kernel.__name__, check_small)(launch, compiled)


@pytest.mark.parametrize(
    "heads", [HeadShape(28, 4, 128), HeadShape(32, 2, 64), HeadShape(8, 8, 64), HeadShape(9, 3, 64)], ids=str
)
@pytest.mark.parametrize("window", [0, 4096])
@pytest.mark.parametrize(("count", "longest"), [(8, 6400), (256, 250)])
def test_attention_of_other_heads_compiles(heads: HeadShape, window: int, count: int, longest: int) -> None:
    device = torch.device("meta")

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    table = empty(1000, heads.head_dim, dtype=torch.float32)
    layer = AttentionLayer(heads, 0.1, window, None, None, 1e-6, table)
    scratch = AttentionScratch.allocate(heads, 256, device)
    slots, lengths = empty(count, dtype=torch.int32), empty(count, dtype=torch.int32)
    rows = DecodeRows(empty(300, 100, dtype=torch.int32), slots, lengths, longest)
    qkv = empty(count, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim)
    cache = empty(500, 2, heads.num_kv_heads, TILE, heads.head_dim)
    for launch in attend(layer, qkv, cache, rows, scratch, empty(count, heads.num_heads * heads.head_dim)):
        compiled = compile_once(launch)
        assert compiled.spill_bytes == 0
        CHECKS.get(launch.kernel.__name__, check_small)(launch, compiled)


def check_ring(launch: Launch, compiled: Compiled) -> None:
    """All products in wgmma; the whole ring's weights requested before the wait."""
    constants = launch.constants
    matrices = 2 if constants["EPILOGUE"] == "silu" else 1
    rows = constants["BLOCK_N"] if constants["SWAP_AB"] else constants["BLOCK_M"]
    depth = 32 if constants["FP8"] else 16
    instructions = matrices * (constants["BLOCK_K"] // depth) * max(1, rows // (16 * constants["WARPS"]))
    assert compiled.num_wgmma == instructions, launch
    assert compiled.num_mma == 0
    programs = min(2, SHARED_BYTES // compiled.shared_bytes, -(-math.prod(launch.grid) // MULTIPROCESSORS))
    assert programs * compiled.registers * 32 * launch.num_warps <= REGISTER_FILE, "as many as their rings let in"
    steps = constants["K"] // constants["SPLIT_K"] // constants["BLOCK_K"]
    blocks = matrices * (constants["BLOCK_K"] // constants["SIDE"] if constants["SHARE"] else 1)
    assert compiled.loads_before_wait == blocks * min(constants["STAGES"], steps), launch


def check_attention(launch: Launch, compiled: Compiled) -> None:
    """Tiles by the tensor memory accelerator, as deep a pipeline as asked for, both products on tensor cores."""
    constants = launch.constants
    tile_bytes = 2 * constants["TILE"] * constants["HEAD_DIM"] * 2
    assert compiled.num_mma + compiled.num_wgmma > 0
    assert compiled.loads_before_wait == 0
    assert compiled.num_tma_loads >= 4
    assert compiled.shared_bytes >= (launch.num_stages - 1) * tile_bytes, launch
    assert compiled.registers * launch.num_warps <= 128 * 4


def check_shared(launch: Launch, compiled: Compiled) -> None:
    """As `check_attention`; both products in wgmma, and so little of everything that two programs run beside each
    other."""
    tile_bytes = 2 * launch.constants["TILE"] * launch.constants["HEAD_DIM"] * 2
    assert compiled.num_wgmma > 0
    assert compiled.num_mma == 0
    assert compiled.num_tma_loads >= 4
    assert compiled.shared_bytes >= (launch.num_stages - 1) * tile_bytes
    assert compiled.shared_bytes <= SHARED_BYTES // 2
    assert compiled.registers <= REGISTER_FILE // (2 * 32 * launch.num_warps)


def check_small(launch: Launch, compiled: Compiled) -> None:
    """No matrices."""
    assert compiled.num_wgmma == compiled.num_mma == compiled.num_tma_loads == 0


def check_experts(launch: Launch, compiled: Compiled) -> None:
    """All products in wgmma (moe_compile_cases.py says more)."""
    assert compiled.num_wgmma > 0
    assert compiled.num_mma == 0


def check_router(launch: Launch, compiled: Compiled) -> None:
    """Few rows: products of 16 on tensor cores."""
    assert compiled.num_mma > 0


CHECKS = {
    "ring_gemm": check_ring,
    "attention_kernel": check_attention,
    "shared_kernel": check_shared,
    "expert_gemm": check_experts,
    "router_kernel": check_router,
}
