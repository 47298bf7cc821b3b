"""The kernels that AMD's devices would run (pointer loads, no dependent launches), compiled for an MI300 (gfx942)
without one: as far as its machine code, with Triton's own LLVM. No such device has run them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import offline_compile
import pytest
import sm90_compile
import torch
import triton
from moe_compile_cases import make_experts, prompt_launches
from paged_steps import make_step
from recurrent_steps import make_layer
from sample_compile_cases import made
from test_recurrent_kernels import PRODUCTS, SHAPES, run
from triton.backends.compiler import GPUTarget

from octavo.attention.triton import TritonAttention
from octavo.kernels.triton import (
    apply_updates,
    causal_conv,
    gated,
    gated_delta,
    gated_norm,
    kv_write,
    latent_write,
    moe_launches,
    paged_decode,
    paged_latent,
    paged_prefill,
    prepare,
    rms_norm,
    rotate_write,
    state_space,
    target,
)
from octavo.kernels.triton.invariant_gemm import product_launch
from octavo.kernels.triton.sample import Choice

TARGET = GPUTarget("hip", "gfx942", 64)
SHARED_LIMIT = 64 * 1024
BF16 = torch.bfloat16
SPILLS = {"latent_kernel": 512, "prompt_delta_kernel": 16}
"""Registers that go to memory, at most: 64 rows of 512 sums do not fit, nor a whole state of 128 x 128."""


@dataclass(frozen=True)
class Compiled:
    """Resources of one kernel."""

    name: str
    spilled: int
    """Registers."""
    shared_bytes: int
    num_mfma: int
    """Instructions of the tensor cores."""


@pytest.fixture(autouse=True)
def amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch says that it was built for AMD's devices."""
    monkeypatch.setattr(torch.version, "hip", "6.4")


def compiled(source: Any, options: dict[str, Any]) -> Compiled:
    kernel = triton.compile(source, target=TARGET, options=options)
    code: str = kernel.asm["amdgcn"]
    assert kernel.asm["hsaco"]
    (spilled,) = re.findall(r"\.vgpr_spill_count: +(\d+)", code)
    return Compiled(kernel.metadata.name, int(spilled), kernel.metadata.shared, code.count("v_mfma"))


def check(found: Compiled, *, has_products: bool) -> None:
    assert found.spilled <= SPILLS.get(found.name, 0), found
    assert found.shared_bytes <= SHARED_LIMIT, found
    assert (found.num_mfma > 0) == has_products, found


@pytest.mark.parametrize(("dim", "dtype"), [(128, BF16), (256, BF16), (64, torch.float32)])
def test_attention(dim: int, dtype: torch.dtype) -> None:
    """Decode rows, in splits, and a prompt."""
    step = make_step([(1, 900), (40, 90)], heads=8, kv_heads=2, dim=dim, block_size=64, dtype=dtype)
    with offline_compile.record(paged_decode, paged_prefill) as launches:
        TritonAttention().attend_cached(step.spec, step.q_thd, step.ctx)
    assert [kernel.__name__ for kernel, _ in launches] == ["decode_kernel", "reduce_kernel", "prefill_kernel"]
    for launch in launches:
        found = compiled(*offline_compile.source_of(*launch))
        check(found, has_products=found.name != "reduce_kernel")


@pytest.mark.parametrize("rows", [[(1, 900)], [(64, 900)]], ids=["decode", "prompt"])
def test_latent_attention(rows: list[tuple[int, int]]) -> None:
    step = make_step(rows, block_size=64, heads=16, kv_heads=1, dim=576, value_dim=512, dtype=BF16)
    with offline_compile.record(paged_latent) as launches:
        TritonAttention().attend_cached(step.spec, step.q_thd, step.ctx)
    for launch in launches:
        found = compiled(*offline_compile.source_of(*launch))
        check(found, has_products=found.name == "latent_kernel")


def test_small_kernels() -> None:
    """What a step has around its products."""
    ints, longs = torch.empty(64, dtype=torch.int32), torch.empty(64, dtype=torch.int64)
    table, cache = torch.empty(4, 16, dtype=torch.int32), torch.empty(4, 2, 8, 64, 128, dtype=BF16)
    k, x, gain = (torch.empty(*shape, dtype=BF16) for shape in ((64, 8, 128), (64, 4096), (4096,)))
    qkv, cos_sin = torch.empty(64, 48 * 128, dtype=BF16), torch.empty(64, 128)
    update, copies = torch.empty(3, 3, dtype=torch.int32), torch.empty(1, 2, dtype=torch.int32)
    modules = kv_write, prepare, apply_updates, rms_norm, gated, rotate_write, latent_write
    with offline_compile.record(*modules) as launches:
        kv_write.write_kv(k, k, cache, longs)
        prepare.prepare_step(ints, ints, ints[:8], ints[:9], table[None], longs, block_size=64)
        apply_updates.apply_updates(table, update, [cache], copies)
        rms_norm.add_rms_norm(x, x, gain, 1e-5)
        gated.gated_silu(x)
        rotate_write.rotate_write(qkv, cos_sin, cache, longs, None, None, num_heads=32, norm_eps=1e-5)
    assert len(launches) == 7
    for launch in launches:
        check(compiled(*offline_compile.source_of(*launch)), has_products=False)


@pytest.mark.parametrize("shape", ["qwen3-next-80b", "nemotron-h-8b"])
def test_recurrent_layers(shape: str) -> None:
    """A decode row and a prompt."""
    layer = make_layer(SHAPES[shape], [(1, 40), (70, 100)], block_size=64, dtype=BF16)
    with offline_compile.record(causal_conv, state_space, gated_delta, gated_norm) as launches:
        run(layer)
    for launch in launches:
        check(compiled(*offline_compile.source_of(*launch)), has_products=launch[0].__name__ in PRODUCTS)


def check_launch(launch: Any, *, has_products: bool) -> None:
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    check(compiled(sm90_compile.source_of(launch, pdl=False), options), has_products=has_products)


@pytest.mark.parametrize("rows", [256, 8192])
def test_experts(rows: int) -> None:
    """Gated ones, and (of 256 rows) those without gates."""
    assert not moe_launches.has_tma(torch.device("cuda"))
    launches = prompt_launches(make_experts("qwen3-30b-a3b"), rows)
    if rows == 256:
        launches += prompt_launches(make_experts("nemotron-3-nano", activation="relu2"), rows)
    for launch in launches:
        check_launch(launch, has_products=launch.kernel.__name__ == "expert_gemm")


@pytest.mark.parametrize("choice", list(Choice))
def test_sampling(choice: Choice) -> None:
    for launch in made(16, 128_256, choice):
        check_launch(launch, has_products=False)


@pytest.mark.parametrize("rows", [1, 200])
def test_products_of_few_rows(rows: int) -> None:
    """Of the deterministic mode: the one kernel of products that is not for Hopper alone."""
    x, weight, y = (
        torch.empty(*shape, dtype=BF16, device="meta") for shape in ((rows, 4096), (6144, 4096), (rows, 6144))
    )
    launch = product_launch(x, weight, None, y)
    assert launch.kernel.__name__ == "invariant_kernel"
    check_launch(launch, has_products=True)


def test_what_is_asked_of_the_device() -> None:
    """An MI300 says that its capability is 9.4: it is no Hopper."""
    device = torch.device("cuda")
    assert target.capability(device) == (0, 0)
    assert not target.has_dependent_launches(device)
    assert [target.stages(4, tile_bytes) for tile_bytes in (1 << 10, 1 << 14, 1 << 15, 1 << 16)] == [4, 4, 2, 1]
