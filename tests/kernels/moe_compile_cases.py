"""The kernels of a mixture of experts of real models, compiled for sm_90 without a GPU; run by test_moe_kernels.py.

The launches are those of decode steps and of prompts, over tensors without memory.
"""

from __future__ import annotations

import pytest
import torch
from sm90_compile import Compiled, compile_launch

from octavo.kernels.reference.activations import ACTIVATIONS
from octavo.kernels.reference.moe import Rule
from octavo.kernels.triton import moe, moe_launches
from octavo.kernels.triton.launch import Launch
from octavo.kernels.triton.moe_choose import choose_launch
from octavo.kernels.triton.moe_experts import DecodeBuffers, Experts, ExpertScales
from octavo.kernels.triton.moe_table import SHARED_BYTES
from octavo.kernels.triton.skinny_linear import ResidualStream
from octavo.kernels.triton.skinny_table import BUCKETS

META = torch.device("meta")
SHAPES = {"qwen3-30b-a3b": (128, 8, 2048, 768), "mixtral-8x7b": (8, 2, 4096, 14336)}
LAYERED_SHAPES = {**SHAPES, "qwen3-next-80b": (512, 10, 2048, 512)}
WITHOUT_GATES = {"nemotron-3-nano": (128, 6, 2688, 1856), "wide": (64, 4, 2048, 1024)}
"""Name -> (experts, top k, width, inner)."""
KINDS = ("half", "channels", "squares")
"""Of weights: bf16, or e4m3 with scales of channels or squares."""
PROMPT_ROWS = (1, 129, 256, 600, 2048, 8192)
REGISTER_FILE = 65536
seen: dict[object, Compiled] = {}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def make_experts(shape: str, kind: str = "half", activation: str = "silu") -> Experts:
    num_experts, top_k, width, inner = (LAYERED_SHAPES | WITHOUT_GATES)[shape]
    is_gated = shape not in WITHOUT_GATES
    rows = 2 * inner if is_gated else inner
    dtype, scales = torch.bfloat16, None
    if kind != "half":
        dtype, block = torch.float8_e4m3fn, 128 if kind == "squares" else 0
        sizes = (rows, width) if not block else (rows // block, width // block)
        scales = ExpertScales(
            empty(num_experts, *(sizes if block else sizes[:1]), dtype=torch.float32),
            empty(num_experts, *((width // block, inner // block) if block else (width,)), dtype=torch.float32),
            block,
        )
    gate_up, down = empty(num_experts, rows, width, dtype=dtype), empty(num_experts, width, inner, dtype=dtype)
    router = empty(num_experts, width)
    return Experts(router, gate_up, down, top_k, True, scales=scales, activation=activation, is_gated=is_gated)


def decode_launches(experts: Experts, rows: int) -> list[Launch]:
    stream = ResidualStream.allocate(experts.width, torch.bfloat16, META)
    buffers = DecodeBuffers.allocate(experts)
    return moe.decode(experts, stream, buffers, rows, partials=4, gain_n=empty(experts.width), eps=1e-6)


def prompt_launches(experts: Experts, rows: int) -> list[Launch]:
    x_mh = empty(rows, experts.width)
    return moe.forward(experts, x_mh, empty(rows, experts.num_experts), empty(rows, experts.width))


@pytest.mark.parametrize("rows", BUCKETS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_decode(shape: str, kind: str, rows: int) -> None:
    check(decode_launches(make_experts(shape, kind), rows))


@pytest.mark.parametrize("rows", PROMPT_ROWS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", LAYERED_SHAPES)
def test_prompts(shape: str, kind: str, rows: int) -> None:
    check(prompt_launches(make_experts(shape, kind), rows))


@pytest.mark.parametrize("rows", [1, 600, 8192])
@pytest.mark.parametrize(
    ("shape", "kind"), [("nemotron-3-nano", "half"), ("nemotron-3-nano", "channels"), ("wide", "squares")]
)
def test_prompts_without_gates(shape: str, kind: str, rows: int) -> None:
    check(prompt_launches(make_experts(shape, kind, "relu2"), rows))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str) -> None:
    check(prompt_launches(make_experts("mixtral-8x7b", "half", activation), 256))


def test_without_tensor_memory_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_launches, "has_tma", lambda _: False)
    for launch in prompt_launches(make_experts("qwen3-30b-a3b"), 256):
        compiled = compile_launch(launch)
        assert compiled.num_tma_loads == 0
        assert compiled.spill_bytes == 0
        assert compiled.shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize("rows", [1, 32, 600])
def test_biases_and_clamped_activations(rows: int) -> None:
    """gpt-oss-20b's experts."""
    count, width = 32, 2880
    experts = Experts(
        empty(count, width),
        empty(count, 2 * width, width),
        empty(count, width, width),
        4,
        True,
        empty(count, 2 * width),
        empty(count, width),
        7.0,
        1.702,
    )
    check(prompt_launches(experts, rows))


@pytest.mark.parametrize("rows", [1, 1000])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "rule"),
    [(256, 8, Rule(True, True, 2.5, 8, 4, best_two=True)), (160, 6, Rule(groups=8, top_groups=3)), (64, 4, Rule(True))],
)
def test_choices(num_experts: int, top_k: int, rule: Rule, rows: int) -> None:
    logits, bias = empty(rows, num_experts, dtype=torch.float32), empty(num_experts, dtype=torch.float32)
    expert, weight = empty(rows, top_k, dtype=torch.int32), empty(rows, top_k, dtype=torch.float32)
    check([choose_launch(logits, rows, top_k, rule, bias, expert, weight)])


def check(launches: list[Launch]) -> None:
    for launch in launches:
        if launch.variant not in seen:
            seen[launch.variant] = compile_launch(launch)
        compiled = seen[launch.variant]
        assert compiled.spill_bytes == 0, launch
        assert compiled.shared_bytes <= SHARED_BYTES, launch
        assert compiled.registers * 32 * launch.num_warps <= REGISTER_FILE
        if launch.kernel.__name__ == "expert_gemm":
            check_gemm(launch, compiled)
        else:
            assert compiled.num_wgmma == compiled.num_tma_loads == 0


def check_gemm(launch: Launch, compiled: Compiled) -> None:
    """All products in wgmma, weights by the tensor memory accelerator, as deep a pipeline as asked for."""
    constants = launch.constants
    matrices = 2 if constants["GATED"] else 1
    item = launch.args["y_rn"].element_size() if constants["FIRST"] else launch.args["x_rk"].base.element_size()
    stage = item * constants["BLOCK_K"] * (matrices * constants["BLOCK_N"] + constants["BLOCK_M"])
    assert item == 1 if constants["FP8"] else item == 2
    assert compiled.num_wgmma >= matrices * (constants["BLOCK_K"] * item // 32), launch
    assert compiled.num_mma == 0, launch
    assert compiled.num_tma_loads >= matrices * launch.num_stages
    assert compiled.shared_bytes >= launch.num_stages * stage, launch
    assert compiled.depths == (launch.num_stages,), launch
