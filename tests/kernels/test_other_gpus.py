"""What devices without Hopper's shared memory and tensor cores would run, compiled for them without one: an MI300
(gfx942; pointer loads, no dependent launches), Ada (sm_89: the same) and the small Blackwells (sm_120). As far as
machine code, with the compilers of Triton's own wheel. No such device has run them.

Every kernel fits the device's shared memory and multiplies on its tensor cores; registers go to memory only where
`Device.spills` says so.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import offline_compile
import pytest
import sm90_compile
import torch
import triton
from moe_compile_cases import KINDS, make_experts, prompt_launches
from paged_steps import Step, make_step
from recurrent_steps import make_layer
from sample_compile_cases import made
from test_recurrent_kernels import PRODUCTS, SHAPES, run
from test_square_kernels import make_launch
from triton.backends.compiler import GPUTarget

from octavo.attention.triton import TritonAttention
from octavo.kernels.reference.quantize_rows import FP8
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
    quantize_rows,
    quantized_joins,
    rms_norm,
    rotate_write,
    scale_product,
    state_space,
    target,
    weighed_sum,
)
from octavo.kernels.triton.invariant_gemm import invariant_launch, product_launch
from octavo.kernels.triton.invariant_heads import heads_launch
from octavo.kernels.triton.launch import Launch
from octavo.kernels.triton.sample import Choice

BF16 = torch.bfloat16
META = torch.device("meta")


@dataclass(frozen=True)
class Device:
    """A kind of device; `capability` (0, 0): it is AMD's."""

    target: GPUTarget
    capability: tuple[int, int]
    shared_bytes: int
    spills: dict[str, int] = field(default_factory=dict)
    """Kernel -> registers (AMD) or bytes a thread (NVIDIA) that go to memory, at most; of others nothing does."""

    @property
    def is_amd(self) -> bool:
        return self.capability == (0, 0)


SMALL_SPILLS = {"prompt_delta_kernel": 160, "prefill_kernel": 80}
"""Beside a whole state of 128 x 128; of 16 rows of 256 numbers of 4 bytes."""
DEVICES = {
    "gfx942": Device(GPUTarget("hip", "gfx942", 64), (0, 0), 64 << 10, {"prompt_delta_kernel": 16}),
    "sm_89": Device(GPUTarget("cuda", 89, 32), (8, 9), 99 << 10, SMALL_SPILLS),
    "sm_120": Device(
        GPUTarget("cuda", 120, 32), (12, 0), 99 << 10, {**SMALL_SPILLS, "expert_gemm": 24, "invariant_kernel": 80}
    ),
}


@dataclass(frozen=True)
class Compiled:
    """Resources of one kernel."""

    name: str
    spilled: int
    shared_bytes: int
    num_products: int
    """Instructions of the tensor cores."""


@pytest.fixture(autouse=True, params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    """Launches are made for this device."""
    found = DEVICES[request.param]
    if found.is_amd:
        monkeypatch.setattr(torch.version, "hip", "6.4")
        return found
    for name, module in list(sys.modules.items()):
        if name.startswith("octavo.kernels.triton.") and hasattr(module, "capability"):
            monkeypatch.setattr(module, "capability", lambda device: found.capability)
    return found


def compiled(device: Device, source: Any, options: dict[str, Any]) -> Compiled:
    kernel = triton.compile(source, target=device.target, options=options)
    if device.is_amd:
        code: str = kernel.asm["amdgcn"]
        assert kernel.asm["hsaco"]
        (spilled,) = map(int, re.findall(r"\.vgpr_spill_count: +(\d+)", code))
        return Compiled(kernel.metadata.name, spilled, kernel.metadata.shared, code.count("v_mfma"))
    code = kernel.asm["ptx"]
    spilled = sm90_compile.spill_bytes(code, device.target.arch)
    return Compiled(kernel.metadata.name, spilled, kernel.metadata.shared, code.count("mma.sync"))


def check(device: Device, found: Compiled, *, has_products: bool) -> None:
    assert found.spilled <= device.spills.get(found.name, 0), found
    assert found.shared_bytes <= device.shared_bytes, found
    assert (found.num_products > 0) == has_products, found


def check_all(device: Device, launches: Sequence[Any], with_products: Sequence[str] = ()) -> None:
    for launch in launches:
        found = compiled(device, *offline_compile.source_of(*launch))
        check(device, found, has_products=found.name in with_products)


def check_launch(device: Device, launch: Launch, *, has_products: bool) -> None:
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    source = sm90_compile.source_of(launch, pdl=device.capability >= (9, 0))
    check(device, compiled(device, source, options), has_products=has_products)


def attend(step: Step, *modules: Any) -> list[Any]:
    with offline_compile.record(*modules) as launches:
        TritonAttention().attend_cached(step.spec, step.q_thd, step.ctx)
    return launches


@pytest.mark.parametrize(
    ("dim", "dtype"), [(64, BF16), (128, BF16), (256, BF16), (64, torch.float32), (128, torch.float32)]
)
def test_attention(device: Device, dim: int, dtype: torch.dtype) -> None:
    """Decode rows, in splits, and a prompt. Full precision has no tensor cores for few rows on NVIDIA's."""
    step = make_step([(1, 900), (40, 90)], heads=8, kv_heads=2, dim=dim, block_size=64, dtype=dtype)
    launches = attend(step, paged_decode, paged_prefill)
    assert [kernel.__name__ for kernel, _ in launches] == ["decode_kernel", "reduce_kernel", "prefill_kernel"]
    few = ["decode_kernel"] if device.is_amd or dtype == BF16 else []
    check_all(device, launches, ["prefill_kernel", *few])


@pytest.mark.parametrize("dim", [128, 256])
def test_attention_to_a_cache_of_8_bits(device: Device, dim: int) -> None:
    if device.is_amd:
        pytest.skip("AMD's caches have 16 bits")
    step = make_step([(1, 900), (40, 90)], heads=8, kv_heads=2, dim=dim, block_size=64, dtype=BF16)
    step.ctx.kv_cache = [step.ctx.kv_cache[0].to(FP8)]
    check_all(device, attend(step, paged_decode, paged_prefill), ["decode_kernel", "prefill_kernel"])


def test_attention_of_many_rows(device: Device) -> None:
    """Without splits; large heads, and short rows."""
    for dim, length in ((256, 260), (128, 70)):
        step = make_step([(1, length)] * 65, heads=32, kv_heads=8, dim=dim, block_size=64, dtype=BF16)
        check_all(device, attend(step, paged_decode), ["decode_kernel"])


def test_large_heads_at_full_precision(device: Device) -> None:
    step = make_step([(1, 900), (40, 90)], heads=8, kv_heads=2, dim=256, block_size=64)
    few = ["decode_kernel"] if device.is_amd else []
    check_all(device, attend(step, paged_decode, paged_prefill), ["prefill_kernel", *few])


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("rows", [[(1, 900)], [(64, 900)]], ids=["decode", "prompt"])
def test_latent_attention(device: Device, rows: list[tuple[int, int]], heads: int) -> None:
    step = make_step(rows, block_size=64, heads=heads, kv_heads=1, dim=576, value_dim=512, dtype=BF16)
    check_all(device, attend(step, paged_latent), ["latent_kernel"])


def test_latent_attention_at_full_precision(device: Device) -> None:
    step = make_step([(64, 900)], block_size=64, heads=16, kv_heads=1, dim=576, value_dim=512)
    check_all(device, attend(step, paged_latent), ["latent_kernel"] if device.is_amd else [])


def test_small_kernels(device: Device) -> None:
    """What a step has around its products."""
    ints, longs = torch.empty(64, dtype=torch.int32), torch.empty(64, dtype=torch.int64)
    table, cache = torch.empty(4, 16, dtype=torch.int32), torch.empty(4, 2, 8, 64, 128, dtype=BF16)
    k, x, gain = (torch.empty(*shape, dtype=BF16) for shape in ((64, 8, 128), (64, 4096), (4096,)))
    qkv, cos_sin = torch.empty(64, 48 * 128, dtype=BF16), torch.empty(64, 128)
    update, copies = torch.empty(3, 3, dtype=torch.int32), torch.empty(1, 2, dtype=torch.int32)
    modules = kv_write, prepare, apply_updates, rms_norm, gated, rotate_write, latent_write, weighed_sum
    with offline_compile.record(*modules) as launches:
        kv_write.write_kv(k, k, cache, longs)
        prepare.prepare_step(ints, ints, ints[:8], ints[:9], table[None], longs, block_size=64)
        apply_updates.apply_updates(table, update, [cache], copies)
        rms_norm.add_rms_norm(x, x, gain, 1e-5)
        gated.gated_silu(x)
        rotate_write.rotate_write(qkv, cos_sin, cache, longs, None, None, num_heads=32, norm_eps=1e-5)
        weighed_sum.weighed_sum(x, gain[None], x, x)
    assert len(launches) == 8
    check_all(device, launches)


def test_joins_that_quantize(device: Device) -> None:
    if device.is_amd:
        pytest.skip("AMD's products have 16 bits")
    x, gain, scales = torch.empty(4, 4096, dtype=BF16), torch.empty(4096, dtype=BF16), torch.empty(4096)
    with offline_compile.record(quantized_joins, quantize_rows, scale_product) as launches:
        quantized_joins.add_rms_norm(x, x, gain, 1e-5)
        quantized_joins.gated_silu(x)
        scale_product.scale_product(x, scales[:4], scales, scales)
        quantize_rows.quantize_rows(x)
    check_all(device, launches)


@pytest.mark.parametrize("shape", ["qwen3-next-80b", "nemotron-h-8b"])
def test_recurrent_layers(device: Device, shape: str) -> None:
    """A decode row and a prompt."""
    layer = make_layer(SHAPES[shape], [(1, 40), (70, 100)], block_size=64, dtype=BF16)
    with offline_compile.record(causal_conv, state_space, gated_delta, gated_norm) as launches:
        run(layer)
    check_all(device, launches, PRODUCTS)


@pytest.mark.parametrize(
    ("kind", "rows"),
    [(kind, rows) for kind in KINDS for rows in (1, 256, 600, 8192) if kind != "channels" or rows in (1, 8192)],
)
def test_experts(device: Device, kind: str, rows: int) -> None:
    """Gated ones, and (of 256 rows) those without gates."""
    if device.is_amd and kind != "half":
        pytest.skip("AMD's products have 16 bits")
    assert moe_launches.has_tma(META) == (device.capability >= (9, 0))
    launches = prompt_launches(make_experts("qwen3-30b-a3b", kind), rows)
    if rows == 256 and kind == "half":
        launches += prompt_launches(make_experts("nemotron-3-nano", activation="relu2"), rows)
    for launch in launches:
        check_launch(device, launch, has_products=launch.kernel.__name__ == "expert_gemm")


@pytest.mark.parametrize("rows", [1, 8, 64, 100, 600])
def test_products_with_squares(device: Device, rows: int) -> None:
    if device.is_amd:
        pytest.skip("AMD's products have 16 bits")
    check_launch(device, make_launch(6144, 4096, rows, tma=False), has_products=rows > 1)


@pytest.mark.parametrize("choice", list(Choice))
def test_sampling(device: Device, choice: Choice) -> None:
    for launch in made(16, 128_256, choice):
        check_launch(device, launch, has_products=False)


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=BF16, device=META)


@pytest.mark.parametrize("rows", [1, 32, 64, 200])
def test_deterministic_products(device: Device, rows: int) -> None:
    """The one kernel of products that is not for Hopper alone, and that of heads' own matrices."""
    x, weight, y = empty(rows, 4096), empty(6144, 4096), empty(rows, 6144)
    launch = product_launch(x, weight, None, y)
    assert launch.kernel.__name__ == "invariant_kernel"
    check_launch(device, launch, has_products=True)
    if not device.is_amd:
        check_launch(device, invariant_launch(x, weight, None, y, tma=False), has_products=True)
    check_launch(
        device, heads_launch(empty(rows, 16, 128), empty(16, 128, 512), empty(rows, 16, 512)), has_products=True
    )


def test_what_is_asked_of_the_device(device: Device) -> None:
    """An MI300 says that its capability is 9.4: it is no Hopper."""
    assert target.capability(META) == device.capability
    assert target.has_dependent_launches(META) == (device.capability >= (9, 0))
    assert target.shared_bytes(META) == device.shared_bytes
    assert target.is_small(META) != device.is_amd
    found = [target.stages(4, tile_bytes, META) for tile_bytes in (1 << 10, 1 << 14, 1 << 15, 1 << 16)]
    assert found == ([4, 4, 2, 1] if device.is_amd else [4, 4, 3, 2])


@pytest.mark.parametrize(
    ("capability", "kibibytes"),
    [((7, 5), 64), ((8, 0), 163), ((8, 6), 99), ((8, 7), 163), ((9, 0), 227), ((10, 0), 227), ((12, 1), 99)],
)
def test_shared_memory_of_devices(capability: tuple[int, int], kibibytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(target, "capability", lambda device: capability)
    assert target.shared_bytes(META) == kibibytes << 10
    assert target.is_small(META) == (kibibytes < 227)
