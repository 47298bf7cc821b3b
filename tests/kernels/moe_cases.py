"""The kernels of a mixture of experts against their reference in Triton's interpreter; run by test_moe_kernels.py.

All in fp32, so that bounds are tight; bf16 is for gpu_moe.py. Scratch is filled with NaN and wrong numbers first: what
a kernel does not write must not be read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fused_steps import relative_error
from torch import Tensor

from octavo.kernels.reference.activations import ACTIVATIONS
from octavo.kernels.reference.moe import Rule, choose, route, sort_pairs
from octavo.kernels.reference.moe import experts as reference_experts
from octavo.kernels.reference.quantize_rows import FP8, dequantize_rows, quantize_rows
from octavo.kernels.reference.skinny_linear import rms_norm
from octavo.kernels.reference.squares import dequantize_squares
from octavo.kernels.triton import moe, moe_choose, moe_experts, moe_launches, moe_table
from octavo.kernels.triton.embed_norm import embed
from octavo.kernels.triton.interpreter import mend
from octavo.kernels.triton.launch import Launch
from octavo.kernels.triton.moe_experts import DecodeBuffers, Experts, ExpertScales, Routing
from octavo.kernels.triton.skinny_linear import ResidualStream
from octavo.kernels.triton.skinny_table import bucket_for

mend()
CPU = torch.device("cpu")
EPS = 1e-5
SHAPES: dict[str, tuple[int, int, int, int, bool]] = {
    "small": (8, 2, 64, 32, True),
    "odd": (5, 3, 96, 48, False),
    "all-chosen": (4, 4, 128, 64, True),
    "many": (40, 8, 160, 16, False),
}
"""Name -> (experts, top k, width, inner, renormalize)."""
LAYERED_SHAPES = {**SHAPES, "more-than-compared": (300, 3, 32, 16, True)}


def make_experts(shape: str, seed: int = 0, activation: str = "silu", *, is_gated: bool = True) -> Experts:
    num_experts, top_k, width, inner, renormalize = LAYERED_SHAPES[shape]
    torch.manual_seed(seed)

    def matrix(*sizes: int) -> Tensor:
        return torch.randn(*sizes) * sizes[-1] ** -0.5

    rows = 2 * inner if is_gated else inner
    gate_up, down = matrix(num_experts, rows, width), matrix(num_experts, width, inner)
    router = 2 * matrix(num_experts, width)
    return Experts(router, gate_up, down, top_k, renormalize, activation=activation, is_gated=is_gated)


def quantized(matrix: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """(e4m3 numbers, their scales, what they mean) of matrices [e, o, i]: scales of rows, or of squares."""
    matrix = matrix * (0.1 + torch.rand(matrix.shape[0], matrix.shape[1], 1))
    if not block:
        number, scale = quantize_rows(matrix.flatten(0, 1))
        wide = dequantize_rows(number, scale)
        return number.view(matrix.shape), scale.view(matrix.shape[:2]), wide.view(matrix.shape)
    squares = matrix.unflatten(1, (-1, block)).unflatten(-1, (-1, block))
    scale = squares.abs().amax((2, 4)) / 448
    number = (squares / scale[:, :, None, :, None]).to(FP8).view(matrix.shape)
    return number, scale, dequantize_squares(number, scale)


def make_eight(experts: Experts, block: int) -> tuple[Experts, Experts]:
    """Experts in e4m3, and the same in fp32."""
    gate_up, gate_up_scale, wide_gate_up = quantized(experts.gate_up_e2ih, block)
    down, down_scale, wide_down = quantized(experts.down_ehi, block)
    scales = ExpertScales(gate_up_scale.contiguous(), down_scale.contiguous(), block)
    return (
        replace(experts, gate_up_e2ih=gate_up, down_ehi=down, scales=scales),
        replace(experts, gate_up_e2ih=wide_gate_up, down_ehi=wide_down),
    )


def spoil(buffers: Any) -> None:
    """Fill scratch with what must not be read: NaN, and indices far outside."""
    for name in buffers.__dataclass_fields__:
        value = getattr(buffers, name)
        if isinstance(value, Tensor):
            value.fill_(torch.nan if value.is_floating_point() else 1 << 28)
        else:
            spoil(value)


def run(launches: list[Launch]) -> None:
    for launch in launches:
        launch.run(pdl=False)


def expected_of(experts: Experts, x_mh: Tensor) -> Tensor:
    expert_mj, weight_mj = route(x_mh @ experts.router_eh.T, experts.top_k, experts.renormalize)
    return reference_experts(
        x_mh, expert_mj, weight_mj, experts.gate_up_e2ih, experts.down_ehi,
        gate_up_bias_e2i=experts.gate_up_bias_e2i, down_bias_eh=experts.down_bias_eh,
        activation=experts.activation, is_gated=experts.is_gated,
    )  # fmt: skip


def decoded(experts: Experts, table: Tensor, gain: Tensor, next_gain: Tensor) -> tuple[ResidualStream, DecodeBuffers]:
    """The stream after a step whose rows are a table's, and what lay between its kernels."""
    stream, buffers = ResidualStream.allocate(experts.width, torch.float32, CPU), DecodeBuffers.allocate(experts)
    spoil(buffers)
    run([embed(torch.arange(len(table)), table, gain, stream)])
    run(moe.decode(experts, stream, buffers, len(table), partials=1, gain_n=next_gain, eps=EPS))
    return stream, buffers


@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("shape", LAYERED_SHAPES)
def test_decode_adds_to_the_residual_and_prepares_the_next_norm(shape: str, rows: int) -> None:
    experts = make_experts(shape, rows)
    width = experts.width
    gain, next_gain = (1 + 0.3 * torch.randn(width) for _ in range(2))
    table = 3 * torch.randn(rows, width)
    stream, _ = decoded(experts, table, gain, next_gain)
    expected = table + expected_of(experts, rms_norm(table, gain, EPS))
    residual = stream.residual_mn[:rows]
    assert relative_error(residual, expected) < 1e-5
    assert relative_error(stream.gained_mn[:rows], residual * next_gain) < 1e-6
    bucket, partials = bucket_for(rows), moe.num_partials(experts, rows)
    squares = stream.squares_f[: partials * bucket].view(partials, bucket)[:, :rows].sum(0)
    assert relative_error(squares, residual.square().sum(-1)) < 1e-5


@pytest.mark.parametrize(
    ("shape", "rows", "tma"), [*((shape, rows, True) for shape in SHAPES for rows in (1, 70)), ("small", 150, False)]
)
def test_any_rows(shape: str, rows: int, tma: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_launches, "has_tma", lambda _: tma)
    monkeypatch.setattr(moe_launches, "CHUNK", 64)
    monkeypatch.setattr(moe_launches, "GROUP", 2)
    experts = make_experts(shape, rows)
    x_mh = torch.randn(rows, experts.width)
    out_mh = torch.full_like(x_mh, torch.nan)
    run(moe.forward(experts, x_mh, x_mh @ experts.router_eh.T, out_mh))
    assert relative_error(out_mh, expected_of(experts, x_mh)) < 1e-5


@pytest.mark.parametrize("rows", [1, 3])
def test_decode_as_gpt_oss(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases everywhere, clamped activations, and widths whose blocks of columns pass the end."""
    monkeypatch.setitem(LAYERED_SHAPES, "gpt-oss", (3, 2, 720, 240, True))
    plain = make_experts("gpt-oss", rows)
    assert 720 % moe_table.fit_rows(moe_table.GATE_UP_ROWS, 240, 720).block_k
    assert 240 % moe_table.fit_rows(moe_table.DOWN_ROWS, 720, 240).block_k
    biases = {"gate_up_bias_e2i": 0.5 * torch.randn(3, 480), "down_bias_eh": 0.5 * torch.randn(3, 720)}
    how = {**biases, "limit": 1.5, "slope": 1.7}
    experts = replace(plain, router_bias_e=torch.tensor([0.0, 2.0, -1.0]), **how)
    gain, table = 1 + 0.3 * torch.randn(720), 3 * torch.randn(rows, 720)
    stream, _ = decoded(experts, table, gain, gain)
    x_mh = rms_norm(table, gain, EPS)
    expert_mj, weight_mj = route(x_mh @ experts.router_eh.T + experts.router_bias_e, 2, True)
    added = reference_experts(x_mh, expert_mj, weight_mj, experts.gate_up_e2ih, experts.down_ehi, **how)
    assert relative_error(stream.residual_mn[:rows], table + added) < 1e-5


EIGHT_SHAPES = {"small": (64, 32, 0), "several-groups": (160, 96, 0), "squares": (128, 256, 128)}
"""Name -> (width, inner, side of the squares that have scales)."""


@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("shape", EIGHT_SHAPES)
def test_decode_in_e4m3(shape: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the rounding of rows, which the interpreter gets wrong: gpu_moe.py has that."""
    monkeypatch.setattr(moe_experts, "ROW_NUMBERS", torch.float32)
    width, inner, block = EIGHT_SHAPES[shape]
    monkeypatch.setitem(LAYERED_SHAPES, shape, (6, 2, width, inner, True))
    experts, exact = make_eight(make_experts(shape, rows), block)
    gain, next_gain = (1 + 0.3 * torch.randn(width) for _ in range(2))
    table = 3 * torch.randn(rows, width)
    stream, buffers = decoded(experts, table, gain, next_gain)
    expected = table + expected_of(exact, rms_norm(table, gain, EPS))
    assert relative_error(stream.residual_mn[:rows], expected) < 1e-5
    if rows > 1:
        largest = buffers.number_mh[:rows].abs().amax(1)
        torch.testing.assert_close(largest, torch.full_like(largest, 448.0))


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("shape", EIGHT_SHAPES)
def test_any_rows_in_e4m3(shape: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_experts, "ROW_NUMBERS", torch.float32)
    width, inner, block = EIGHT_SHAPES[shape]
    monkeypatch.setitem(LAYERED_SHAPES, shape, (6, 2, width, inner, True))
    experts, exact = make_eight(make_experts(shape, rows), block)
    x_mh = torch.randn(rows, width)
    out_mh = torch.full_like(x_mh, torch.nan)
    run(moe.forward(experts, x_mh, x_mh @ experts.router_eh.T, out_mh))
    assert relative_error(out_mh, expected_of(exact, x_mh)) < 1e-5


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("rows", [1, 70])
def test_biases_and_clamped_activations(rows: int, chosen: bool) -> None:
    """gpt-oss's experts; and rows that were routed elsewhere."""
    plain = make_experts("odd", rows)
    biases = (0.5 * torch.randn(5, 96), 0.5 * torch.randn(5, 96))
    experts = replace(plain, gate_up_bias_e2i=biases[0], down_bias_eh=biases[1], limit=1.5, slope=1.7)
    x_mh = torch.randn(rows, experts.width)
    out_mh = torch.full_like(x_mh, torch.nan)
    expert_mj, weight_mj = route(x_mh @ experts.router_eh.T, experts.top_k, experts.renormalize)
    weight_mj = 2 * weight_mj if chosen else weight_mj
    scores = (expert_mj.int().contiguous(), weight_mj.contiguous()) if chosen else x_mh @ experts.router_eh.T
    run(moe.forward(experts, x_mh, scores, out_mh))
    matrices = experts.gate_up_e2ih, experts.down_ehi
    options = {"gate_up_bias_e2i": biases[0], "down_bias_eh": biases[1], "limit": 1.5, "slope": 1.7}
    expected = reference_experts(x_mh, expert_mj, weight_mj, *matrices, **options)
    assert relative_error(out_mh, expected) < 1e-5
    assert relative_error(expected, reference_experts(x_mh, expert_mj, weight_mj, *matrices)) > 0.1


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_experts_without_gates(activation: str, is_gated: bool) -> None:
    """With biases; a row of NaN stays one, and beside no other."""
    plain = make_experts("odd", 3, activation, is_gated=is_gated)
    rows, width = plain.gate_up_e2ih.shape[1], plain.width
    experts = replace(plain, gate_up_bias_e2i=0.5 * torch.randn(5, rows), down_bias_eh=0.5 * torch.randn(5, width))
    x_mh = 3 * torch.randn(20, width)
    logit_me = x_mh @ experts.router_eh.T
    want_mh, out_mh = expected_of(experts, x_mh), torch.full_like(x_mh, torch.nan)
    run(moe.forward(experts, x_mh, logit_me, out_mh))
    assert relative_error(out_mh, want_mh) < 1e-5
    others = [replace(experts, activation=other) for other in ACTIVATIONS if other != activation]
    assert min(relative_error(expected_of(other, x_mh), want_mh) for other in others) > 5e-5
    x_mh[7] = torch.nan
    run(moe.forward(experts, x_mh, logit_me, out_mh))
    assert out_mh.isnan().any(1).nonzero().flatten().tolist() == [7]
    assert out_mh[7].isnan().all()


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("shape", EIGHT_SHAPES)
def test_experts_without_gates_in_e4m3(shape: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_experts, "ROW_NUMBERS", torch.float32)
    width, inner, block = EIGHT_SHAPES[shape]
    monkeypatch.setitem(LAYERED_SHAPES, shape, (6, 2, width, inner, True))
    experts, exact = make_eight(make_experts(shape, rows, "relu2", is_gated=False), block)
    x_mh = torch.randn(rows, width)
    out_mh = torch.full_like(x_mh, torch.nan)
    run(moe.forward(experts, x_mh, x_mh @ experts.router_eh.T, out_mh))
    assert relative_error(out_mh, expected_of(exact, x_mh)) < 1e-5


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("swap", [True, False])
def test_tiles(block: int, swap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tile = moe_table.Tile(block, 32, 32, 2, 4, swap)
    monkeypatch.setattr(moe_table, "tiles_for", lambda *_, **__: {"gate_up": tile, "down": tile})
    experts = make_experts("small")
    x_mh = torch.randn(70, experts.width)
    out_mh = torch.full_like(x_mh, torch.nan)
    run(moe.forward(experts, x_mh, x_mh @ experts.router_eh.T, out_mh))
    assert relative_error(out_mh, expected_of(experts, x_mh)) < 1e-5


@pytest.mark.parametrize("is_eight", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (8, 2), (60, 4)])
def test_every_kind_of_step_is_compiled_ahead(num_experts: int, top_k: int, is_eight: bool) -> None:
    """What is compiled before the first request covers the launches of every number of rows."""
    experts = Experts(
        *(torch.empty(num_experts, *sizes, dtype=torch.half) for sizes in ((64,), (64, 64), (64, 32))), top_k, True
    )
    if is_eight:
        eight = (torch.empty_like(part, dtype=FP8) for part in (experts.gate_up_e2ih, experts.down_ehi))
        scales = ExpertScales(torch.empty(num_experts, 64), torch.empty(num_experts, 64))
        experts = replace(experts, **dict(zip(("gate_up_e2ih", "down_ehi"), eight, strict=True)), scales=scales)

    def variants(rows: int) -> set[Any]:
        x_mh, logit_me = (torch.empty(rows, size, dtype=torch.half) for size in (64, num_experts))
        return {launch.variant for launch in moe.forward(experts, x_mh, logit_me, x_mh)}

    known = set().union(*(variants(rows) for rows in moe.kinds_of_steps(num_experts, top_k)))
    for rows in (*range(1, 70), *range(70, 3000, 61)):
        assert variants(rows) <= known, rows


@pytest.mark.parametrize("many", [True, False])
@pytest.mark.parametrize("renormalize", [True, False])
def test_top_k_of_equal_and_senseless_logits(renormalize: bool, many: bool) -> None:
    """Equal logits go by number; one that is not a number is the least; every choice is a different expert."""
    experts = Experts(torch.zeros(6, 32), torch.zeros(6, 32, 32), torch.zeros(6, 32, 16), 3, renormalize)
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, 2.0], [0.0] * 6, [torch.nan, 1.0, torch.nan, -1.0, 0.5, 0.0]])
    logits = torch.cat((logits, torch.full((1, 6), torch.nan)))
    routing = Routing.allocate(experts, 4, 4, 16)
    spoil(routing)
    if many:
        run([moe_launches.top_k_rows(experts, logits, routing, 4)])
    else:
        stream = ResidualStream.allocate(32, torch.float32, CPU)
        run([moe_launches.top_k(experts, logits, routing, stream, 4, 0, 0.0, None)])
    assert routing.expert_f.view(4, 3).tolist() == [[1, 2, 4], [0, 1, 2], [1, 4, 5], [0, 1, 2]]
    expert_mj, weight_mj = route(logits[:2], 3, renormalize)
    assert torch.equal(routing.expert_f.view(4, 3)[:2].long(), expert_mj)
    torch.testing.assert_close(routing.weight_f.view(4, 3)[:2], weight_mj)


RULES: dict[str, tuple[int, int, bool, Rule]] = {
    "deepseek-v3": (256, 8, True, Rule(True, True, 2.5, 8, 4, best_two=True)),
    "deepseek-v2": (160, 6, False, Rule(False, False, 16.0, 8, 3)),
    "glm-4.5": (128, 8, True, Rule(True, True, 1.5)),
    "ernie": (64, 6, True, Rule(False, True)),
    "llama-4": (16, 1, False, Rule(True)),
    "odd": (15, 4, True, Rule(True, True, 1.0, 3, 2, best_two=True)),
}
"""Name -> (experts, top k, whether the choice has a bias, rule)."""


@pytest.mark.parametrize("rows", [0, 1, 9, moe_choose.FEW_ROWS + 3])
@pytest.mark.parametrize("name", RULES)
def test_choices(name: str, rows: int) -> None:
    num_experts, top_k, biased, rule = RULES[name]
    torch.manual_seed(rows)
    logit_me = 3 * torch.randn(rows, num_experts)
    bias_e = 0.3 * torch.randn(num_experts) if biased else None
    want_expert_mj, want_weight_mj = choose(logit_me, top_k, rule, bias_e)
    expert_mj, weight_mj = moe_choose.choose(logit_me, top_k, rule, bias_e)
    assert expert_mj.tolist() == want_expert_mj.tolist()
    torch.testing.assert_close(weight_mj, want_weight_mj)


def test_choices_of_equal_and_senseless_scores() -> None:
    """Equal scores go by number, those that are not numbers come last; every choice is a different expert, of the best
    groups."""
    nan = torch.nan
    logit_me = torch.tensor([[0.0] * 6, [1.0, 2.0, 2.0, 0.0, 2.0, 2.0], [nan, 1.0, nan, -1.0, 0.5, 0.0], [nan] * 6])
    expert_mj, _ = moe_choose.choose(logit_me, 3, Rule(sigmoid=True), None)
    assert expert_mj.tolist() == [[0, 1, 2], [1, 2, 4], [1, 4, 5], [0, 1, 2]]
    grouped_mj, _ = moe_choose.choose(logit_me[:2], 3, Rule(sigmoid=True, groups=3, top_groups=2), None)
    assert grouped_mj.tolist() == [[0, 1, 2], [1, 2, 0]]


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("skew", ["even", "one-expert", "random"])
def test_sort(skew: str, counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_launches, "CHUNK", 64)
    rows, block = 51, 16
    experts = make_experts("odd")
    pairs = rows * experts.top_k
    expert_f = {
        "even": torch.arange(pairs) % experts.num_experts,
        "one-expert": torch.full((pairs,), 3),
        "random": torch.randint(0, experts.num_experts, (pairs,)),
    }[skew].int()
    num_tiles = experts.num_tiles(rows, block)
    routing = Routing.allocate(experts, rows, num_tiles, block)
    spoil(routing)
    routing.expert_f.copy_(expert_f)
    counts = torch.full((-(-pairs // 64), experts.num_experts), 1 << 20, dtype=torch.int32) if counted else None
    launches = [] if counts is None else [moe_launches.count(experts, routing, rows, counts)]
    run([*launches, moe_launches.sort(experts, routing, rows, num_tiles, block, counts)])
    pair_s, expert_t = sort_pairs(expert_f, experts.num_experts, block)
    assert len(expert_t) <= num_tiles
    assert routing.expert_t.tolist() == expert_t + [-1] * (num_tiles - len(expert_t))
    assert routing.pair_s[: len(pair_s)].tolist() == pair_s
    places = routing.pair_s[: len(pair_s)]
    assert sorted(places[places >= 0].tolist()) == list(range(pairs))
