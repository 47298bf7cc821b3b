"""The kernels of recurrent layers without a GPU: numerics in the interpreter, and compilation for an H200 at the sizes
of real models."""

from __future__ import annotations

import offline_compile
import pytest
import torch
from case_files import CaseFile, CaseRun, runs
from recurrent_steps import Layer, make_layer

from octavo.kernels.reference.gated_delta import DeltaShape
from octavo.kernels.reference.state_space import StateSpaceShape
from octavo.kernels.triton import causal_conv, gated_delta, gated_norm, state_space

PRODUCTS = ("prompt_space_kernel", "invert_kernel", "prompt_delta_kernel")
"""Kernels that multiply on tensor cores."""
SHAPES = {
    "qwen3-next-80b": DeltaShape(16, 32, 128, 128),
    "nemotron-h-8b": StateSpaceShape(128, 64, 128, 8),
    "granite-4-h-small": StateSpaceShape(128, 64, 128, 1),
    "mamba2-2.7b": StateSpaceShape(80, 64, 128, 1),
    "bamba-9b": StateSpaceShape(128, 64, 128, 1),
    "wide-states": StateSpaceShape(64, 64, 256, 1),
}
SPILLS = {"wide-states": 64}
"""Bytes of a thread, where a tile's B and C are twice as wide."""


@runs(CaseFile("recurrent_cases.py"))
def test_numerics_in_the_interpreter(case_run: CaseRun) -> None:
    assert case_run.passed, case_run.said


def run(layer: Layer) -> None:
    """Every kernel of the layer."""
    offset, is_space = layer.shape.state_size, isinstance(layer.shape, StateSpaceShape)
    bias = layer.conv_bias_c if is_space else None
    x_tc = causal_conv.causal_conv(layer.input_tc, layer.tap_ck, bias, layer.state_bz, layer.rows, offset=offset)
    if isinstance(layer.shape, StateSpaceShape):
        group, gain = layer.shape.inner // layer.shape.num_groups, torch.empty(layer.shape.inner, dtype=torch.bfloat16)
        args = (layer.space_weights, layer.shape, layer.state_bz, layer.rows)
        out_ti = state_space.state_space(x_tc, layer.step_th, *args)
    else:
        group, gain = layer.shape.value_dim, torch.empty(layer.shape.value_dim, dtype=torch.bfloat16)
        delta = (layer.delta_weights, layer.shape, layer.state_bz, layer.rows)
        out_ti = gated_delta.gated_delta(x_tc, layer.strength_th, layer.step_th, *delta)
    gated_norm.gated_norm(out_ti, layer.gate_ti, gain, 1e-5, group=group, gates_first=is_space)


@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_compile(shape: str) -> None:
    """A decode row and a prompt: no spills, products by tensor cores."""
    layer = make_layer(SHAPES[shape], [(1, 40), (70, 100)], block_size=64, dtype=torch.bfloat16)
    with offline_compile.record(causal_conv, state_space, gated_delta, gated_norm) as launches:
        run(layer)
    assert len(launches) == (6 if isinstance(layer.shape, StateSpaceShape) else 8)
    for kernel, arguments in launches:
        compiled = offline_compile.compile_launch(kernel, arguments)
        assert compiled.spill_bytes <= SPILLS.get(shape, 0), compiled
        assert compiled.shared_bytes <= offline_compile.SHARED_LIMIT, compiled
        assert (compiled.wgmma + compiled.mma > 0) == (kernel.__name__ in PRODUCTS), compiled
