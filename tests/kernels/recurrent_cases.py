"""The kernels of recurrent layers against their references in Triton's interpreter, and the references against the
recurrences token by token; run by test_recurrent_kernels.py in a process of its own."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from recurrent_steps import Layer, counted, make_layer
from torch import Tensor

from octavo.kernels.reference import causal_conv as reference_conv
from octavo.kernels.reference import gated_delta as reference_delta
from octavo.kernels.reference import gated_norm as reference_norm
from octavo.kernels.reference import state_space as reference_space
from octavo.kernels.reference.gated_delta import DeltaShape
from octavo.kernels.reference.state_space import StateSpaceShape
from octavo.kernels.triton import causal_conv, gated_delta, gated_norm, state_space
from octavo.kernels.triton.interpreter import mend
from octavo.kernels.triton.state_rows import tile_of

mend()
MODULES: dict[str, dict[str, ModuleType]] = {
    "reference": {"conv": reference_conv, "space": reference_space, "delta": reference_delta, "norm": reference_norm},
    "triton": {"conv": causal_conv, "space": state_space, "delta": gated_delta, "norm": gated_norm},
}
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2}
DECODE = [(1, 1), (1, 16), (1, 17), (1, 50)]
MIXED = [(1, 1), (1, 33), (7, 7), (40, 90), (2, 33), (3, 18)]
SPACES = {
    "small": StateSpaceShape(4, 16, 32, 2),
    "odd": StateSpaceShape(6, 20, 12, 3),
    "one-group": StateSpaceShape(3, 8, 16, 1),
}
DELTAS = {"small": DeltaShape(2, 4, 16, 32), "odd": DeltaShape(1, 3, 12, 20), "plain": DeltaShape(2, 2, 32, 40)}


def run(kind: str, layer: Layer) -> tuple[Tensor, Tensor]:
    """(what the layer gives before its last product, states), by one package's operations one after the other."""
    modules, layer = MODULES[kind], layer.with_states()
    offset = layer.shape.state_size
    bias = layer.conv_bias_c if isinstance(layer.shape, StateSpaceShape) else None
    x_tc = modules["conv"].causal_conv(layer.input_tc, layer.tap_ck, bias, layer.state_bz, layer.rows, offset=offset)
    if isinstance(layer.shape, StateSpaceShape):
        args = (layer.shape, layer.state_bz, layer.rows)
        out_ti = modules["space"].state_space(x_tc, layer.step_th, layer.space_weights, *args)
    else:
        args = (layer.shape, layer.state_bz, layer.rows)
        out_ti = modules["delta"].gated_delta(x_tc, layer.strength_th, layer.step_th, layer.delta_weights, *args)
    return out_ti, layer.state_bz


def compare(layer: Layer, dtype: torch.dtype = torch.float32) -> None:
    """Both packages: what comes out, what is left in states, and what is left alone."""
    (got, got_states), (want, want_states) = run("triton", layer), run("reference", layer)
    assert torch.equal(got_states.isnan(), want_states.isnan())
    assert (want_states.isnan()[1:].all(1) == want_states.isnan()[1:].any(1)).all()
    atol = TOLERANCE[dtype]
    torch.testing.assert_close(got, want, rtol=atol, atol=atol)
    torch.testing.assert_close(got_states.nan_to_num(7.0), want_states.nan_to_num(7.0), rtol=atol, atol=atol)


ALL_SHAPES: dict[str, StateSpaceShape | DeltaShape] = {**SPACES, **{f"delta-{name}": DELTAS[name] for name in DELTAS}}


@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("shape", ALL_SHAPES)
def test_layers(shape: str, rows: list[tuple[int, int]]) -> None:
    compare(make_layer(ALL_SHAPES[shape], rows, block_size=16))


@pytest.mark.parametrize("shape", ["small", "delta-odd"])
def test_rounded_inputs(shape: str) -> None:
    compare(make_layer(ALL_SHAPES[shape], MIXED[:4], block_size=16, dtype=torch.float16), torch.float16)


@pytest.mark.parametrize("block_size", [48, 32, 64, 192])
@pytest.mark.parametrize("shape", ["small", "delta-odd"])
def test_block_sizes(shape: str, block_size: int) -> None:
    compare(make_layer(ALL_SHAPES[shape], [(1, 65), (33, 97), (70, 130)], block_size=block_size, seed=block_size))


@pytest.mark.parametrize("rows", [MIXED, [(1, 20), (1, 130)], [(7, 7), (33, 90)]], ids=["mixed", "decode", "prompts"])
@pytest.mark.parametrize("shape", [SPACES["small"], DELTAS["odd"]], ids=["space", "delta"])
def test_counts_may_be_known_to_the_device_only(
    shape: StateSpaceShape | DeltaShape, rows: list[tuple[int, int]]
) -> None:
    """More rows and tokens than there are, as a captured graph has them: the others' places get zeros."""
    layer = make_layer(shape, rows, block_size=16, seed=3)
    want, want_states = run("triton", layer)
    got, got_states = run("triton", counted(layer, 3, 9))
    tokens = want.shape[0]
    assert torch.equal(got[:tokens], want)
    assert not got[tokens:].any()
    assert torch.equal(got_states.nan_to_num(7.0), want_states.nan_to_num(7.0))
    reference_out, reference_states = run("reference", counted(layer, 3, 9))
    torch.testing.assert_close(got, reference_out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got_states.nan_to_num(7.0), reference_states.nan_to_num(7.0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [SPACES["odd"], DELTAS["odd"]], ids=["space", "delta"])
def test_references_are_the_recurrences(shape: StateSpaceShape | DeltaShape) -> None:
    """A row at once, and token by token."""
    whole = make_layer(shape, [(70, 101)], block_size=16, seed=5)
    want, want_states = run("reference", whole)
    parts, layer = [], whole.with_states()
    for index in range(70):
        tokens = slice(index, index + 1)
        rows = replace_rows(whole, 31 + index + 1)
        step = replace(
            layer,
            rows=rows,
            input_tc=whole.input_tc[tokens],
            step_th=whole.step_th[tokens],
            strength_th=whole.strength_th[tokens],
        )
        out, states = run("reference", step)
        layer = replace(layer, state_bz=states)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.state_bz.nan_to_num(7.0), want_states.nan_to_num(7.0), rtol=1e-4, atol=1e-4)


def replace_rows(layer: Layer, length: int) -> reference_delta.StateRows:
    """One row of one token."""
    return reference_delta.StateRows(
        block_table_sb=layer.rows.block_table_sb,
        row_slot_r=layer.rows.row_slot_r,
        query_start_r=torch.tensor([0, 1], dtype=torch.int32),
        kv_len_r=torch.tensor([length], dtype=torch.int32),
        block_size=layer.rows.block_size,
        num_rows=1,
        num_decode_rows=1,
        max_query_len=1,
    )


def test_alike_keys() -> None:
    """The system is inverted exactly where powers of it are large: equal keys, no decay, full corrections."""
    layer = make_layer(DELTAS["small"], [(64, 64)], block_size=64)
    layer = replace(
        layer,
        input_tc=layer.input_tc[:1].expand_as(layer.input_tc).contiguous(),
        strength_th=torch.full_like(layer.strength_th, 20.0),
        step_th=torch.full_like(layer.step_th, -20.0),
    )
    compare(layer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("width", "group", "first"), [(64, 32, True), (120, 40, True), (96, 24, False), (512, 128, False)]
)
def test_gated_norm(width: int, group: int, first: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    product = torch.randn(5, 2 * width + 3).to(dtype)
    x_ti, gate_ti = product[:, :width], product[:, width : 2 * width]
    gain = 1 + 0.3 * torch.randn(width if first else group).to(dtype)
    got, want = (
        MODULES[kind]["norm"].gated_norm(x_ti, gate_ti, gain, 1e-5, group=group, gates_first=first)
        for kind in ("triton", "reference")
    )
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_blocks_have_whole_tiles() -> None:
    assert [tile_of(size) for size in (16, 48, 32, 64, 96, 1088)] == [16, 16, 32, 64, 32, 64]
    with pytest.raises(ValueError, match="multiple of 16"):
        tile_of(40)
