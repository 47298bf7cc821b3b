"""Runs fp8_cases.py in Triton's interpreter (a process of its own), and checks the choices of fp8 products."""

from __future__ import annotations

import offline_compile
import pytest
import sm90_compile
import torch
from case_files import CaseFile, CaseRun, runs

from octavo.kernels.reference import quantize_rows as reference
from octavo.kernels.triton import quantize_rows, quantized_joins, scale_product
from octavo.kernels.triton.skinny_table import BUCKETS, FP8_PLAIN, FP8_TABLE, TABLE, choose


@runs(CaseFile("fp8_cases.py"))
def test_cases(case_run: CaseRun) -> None:
    assert case_run.passed, case_run.said


def test_what_is_tuned_for_fp8_is_tuned_for_half() -> None:
    assert FP8_TABLE.keys() <= TABLE.keys()


@pytest.mark.parametrize("op", ["qkv", "o", "gate_up", "down"])
@pytest.mark.parametrize("bucket", BUCKETS)
def test_unmeasured_shapes_get_what_fits(op: str, bucket: int) -> None:
    for n in range(64, 4096, 64):
        for k in (128, 896, 1152, 3584, 12288):
            config = choose(op, n, k, bucket, fp8=True)
            assert config is not None
            assert config.fits(op, n, k, 1)
    assert choose(op, 4096, 4096 + 64, bucket, fp8=True) is None or bucket == 1


def test_plain_configurations_fit_on_chip() -> None:
    for configs in FP8_PLAIN.values():
        assert all(
            config.fits(op, 256, 256, 1) for config in configs for op in ("qkv", "gate_up") if config.block_k <= 256
        )


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize(("hidden", "inner"), [(4096, 14336), (1024, 3072), (3584, 18944)])
def test_joins_compile(hidden: int, inner: int, pdl: bool) -> None:
    """Without spills; the rows travel 16 bytes a thread."""
    x, gain = torch.empty(4, hidden, dtype=torch.bfloat16), torch.empty(hidden, dtype=torch.bfloat16)
    scales = torch.empty(2 * inner)
    with offline_compile.record(quantized_joins, quantize_rows, scale_product) as launches:
        quantized_joins.rms_norm(x, gain, 1e-5, pdl=pdl)
        quantized_joins.add_rms_norm(x, x, gain, 1e-5, pdl=pdl)
        quantized_joins.gated_silu(torch.empty(4, 2 * inner, dtype=torch.bfloat16), pdl=pdl)
        scale_product.scale_product(torch.empty(4, 2 * inner, dtype=torch.bfloat16), scales[:4], scales, scales)
        quantize_rows.quantize_rows(x)
    assert len(launches) == 5
    for launch in launches:
        compiled = offline_compile.compile_launch(*launch)
        assert compiled.spill_bytes == 0, compiled
        assert compiled.registers <= 128, compiled
        assert compiled.wide_loads > 0, compiled


@pytest.mark.parametrize("width", [576, 4096, 14336])
def test_the_kernel_for_weights_compiles(width: int) -> None:
    """A whole row in registers."""
    weight, number, scale = (
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in (((8, width), torch.bfloat16), ((8, width), reference.FP8), ((8,), torch.float32))
    )
    compiled = sm90_compile.compile_launch(quantize_rows.weights_launch(weight, number, scale))
    assert compiled.spill_bytes == 0
    assert compiled.registers <= 128


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_of_weights_are_the_best_of_several(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never worse than the usual scale, often better; and the same however many rows are rounded at once."""
    torch.manual_seed(0)
    weight = (torch.randn(50, 576) * torch.rand(50, 1)).to(dtype)
    weight[7] = 0
    usual, best = (
        (reference.dequantize_rows(*found) - weight.float()).norm(dim=1)
        for found in (reference.quantize_rows(weight), reference.quantize_weights(weight))
    )
    assert (best <= usual * (1 + 1e-6)).all()
    assert (best < 0.99 * usual).sum() > 25
    whole = reference.quantize_weights(weight)
    monkeypatch.setattr(reference, "MOST_AT_ONCE", 576 * 7)
    for a, b in zip(whole, reference.quantize_weights(weight), strict=True):
        assert torch.equal(a.float(), b.float())
    assert [tuple(part.shape) for part in reference.quantize_weights(weight[:0])] == [(0, 576), (0,)]
