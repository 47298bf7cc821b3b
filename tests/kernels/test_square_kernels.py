"""Runs square_cases.py in Triton's interpreter (a process of its own), and compiles what it runs for an H200."""

from __future__ import annotations

from dataclasses import replace

import offline_compile
import pytest
import torch
import triton
from case_files import CaseFile, CaseRun, runs
from sm90_compile import Compiled, compile_launch, source_of
from triton.backends.compiler import GPUTarget

from octavo.attention.base import AttentionSpec
from octavo.kernels.reference.squares import SIDE, num_groups
from octavo.kernels.triton import quantize_rows, quantized_joins
from octavo.kernels.triton.launch import Launch
from octavo.kernels.triton.skinny_table import BUCKETS, FP8_TABLE, SHARED_BYTES, SQUARES_TABLE, Gemv, choose
from octavo.kernels.triton.square_gemm import Squares, square_launch, vector_launch
from octavo.layers.fused.support import DecoderShape, DeviceTraits, obstacle

META = torch.device("meta")
SHAPES = {"qkv": (6144, 4096), "down": (4096, 14336), "gate_up": (28672, 4096), "latents": (2112, 7168)}
"""Of Llama-3.1-8B, and DeepSeek-V3's first product."""
ROWS = (1, 8, 17, 64, 65, 600)


@runs(CaseFile("square_cases.py"))
def test_numerics_in_the_interpreter(case_run: CaseRun) -> None:
    assert case_run.passed, case_run.said


def make_launch(n: int, k: int, rows: int, *, share: int = SIDE, tma: bool = True, bias: bool = False) -> Launch:
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    fp8, groups = torch.float8_e4m3fn, num_groups(k)
    scale = empty(num_groups(n, share), groups, dtype=torch.float32)
    matrix = Squares(empty(n, k, dtype=fp8), scale, share)
    x = (empty(rows, k, dtype=fp8), empty(groups, rows, dtype=torch.float32))
    y, bias_n = empty(rows, n), empty(n) if bias else None
    return vector_launch(empty(1, k), matrix, bias_n, y) if rows == 1 else square_launch(x, matrix, bias_n, y, tma=tma)


def check(launch: Launch, *, tma: bool) -> None:
    """No spills, as deep a pipeline as asked for, in wgmma."""
    compiled: Compiled = compile_launch(launch)
    assert compiled.spill_bytes == 0, launch
    assert compiled.shared_bytes <= SHARED_BYTES
    if launch.kernel.__name__ == "gemv":
        assert compiled.num_wgmma == compiled.num_mma == 0
        return
    constants = launch.constants
    left = constants["BLOCK_N"] if constants["SWAP_AB"] else constants["BLOCK_M"]
    assert compiled.num_wgmma == SIDE // 32 * max(1, left // (16 * launch.num_warps)), launch
    assert compiled.num_mma == 0
    assert (compiled.num_tma_loads > 0) == tma
    assert compiled.depths == (launch.num_stages,), launch


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_compile(shape: str, rows: int) -> None:
    launch = make_launch(*SHAPES[shape], rows, share=64 if shape == "latents" else SIDE, bias=shape == "qkv")
    assert launch.kernel.__name__ == ("gemv" if rows == 1 else "square_kernel")
    check(launch, tma=True)


@pytest.mark.parametrize("rows", ROWS[1:])
def test_products_compile_without_tensor_memory_accelerator(rows: int) -> None:
    check(make_launch(6144, 4096, rows, tma=False), tma=False)


@pytest.mark.parametrize("rows", [1, 8, 64, 100, 600])
def test_products_compile_for_ada(rows: int) -> None:
    """The least device that multiplies e4m3 has less than half of Hopper's shared memory."""
    launch = make_launch(6144, 4096, rows, tma=False)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    compiled = triton.compile(source_of(launch, pdl=False), target=GPUTarget("cuda", 89, 32), options=options)
    assert compiled.metadata.shared <= 99 << 10
    assert ("mma.sync" in compiled.asm["ptx"]) == (rows > 1)


@pytest.mark.parametrize("rows", [1, 8, 100, 600])
def test_products_of_odd_sizes_compile(rows: int) -> None:
    """SmolLM2's qkv: parts of 576, 192 and 192 rows."""
    check(make_launch(960, 576, rows, share=64), tma=True)


def test_configurations_of_decode_steps() -> None:
    """Each fits its shape; rings walk k by squares, and only a residual's products are split."""
    for (op, n, k), configs in SQUARES_TABLE.items():
        assert (tuple(configs), (op, n, k) in FP8_TABLE) == (BUCKETS, True)
        for bucket, config in configs.items():
            assert choose(op, n, k, bucket, fp8=True, share=SIDE) is config
            assert isinstance(config, Gemv) or (config.block_m, config.block_k % SIDE) == (bucket, 0)
            assert isinstance(config, Gemv) or op in ("o", "down") or config.split_k == 1
    for bucket in BUCKETS:
        for share in (64, 128):
            config = choose("down", 576, 1536, bucket, fp8=True, share=share)
            assert config is not None
            assert share % config.block_n == 0
    assert choose("qkv", 960, 640, 16, fp8=True, share=32) is None


def test_fused_decode_steps_take_squares_that_rows_of_their_blocks_share() -> None:
    hopper, spec = DeviceTraits("cuda", (9, 0)), AttentionSpec(0, 32, 8, 128, 128**-0.5)
    shape = DecoderShape(4096, 14336, "silu", 128, (spec,), True, torch.bfloat16)
    assert obstacle(replace(shape, fp8_shares=frozenset((64, 128))), hopper) is None
    refused = obstacle(replace(shape, fp8_shares=frozenset((32, 128))), hopper)
    assert refused is not None
    assert "no configuration multiplies" in refused


@pytest.mark.parametrize(("hidden", "inner"), [(4096, 14336), (576, 1536), (7168, 18432)])
def test_joins_compile(hidden: int, inner: int) -> None:
    """Without spills; the rows travel 16 bytes a thread."""
    x, gain = torch.empty(4, hidden, dtype=torch.bfloat16), torch.empty(hidden, dtype=torch.bfloat16)
    with offline_compile.record(quantized_joins, quantize_rows) as launches:
        quantized_joins.rms_norm(x, gain, 1e-5, group=SIDE, pdl=True)
        quantized_joins.add_rms_norm(x, x, gain, 1e-5, group=SIDE, pdl=True)
        quantized_joins.gated_silu(torch.empty(4, 2 * inner, dtype=torch.bfloat16), group=SIDE, pdl=True)
        quantize_rows.quantize_rows(x, group=SIDE)
    assert len(launches) == 4
    for launch in launches:
        compiled = offline_compile.compile_launch(*launch)
        assert compiled.spill_bytes == 0, compiled
        assert compiled.registers <= 128, compiled
        assert compiled.wide_loads > 0, compiled
