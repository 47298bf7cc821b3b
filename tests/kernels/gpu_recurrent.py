"""The kernels of recurrent layers on a device: against their references on the CPU, and their times at the sizes of
real models, beside the time that their bytes take.

    PYTHONPATH=python python tests/kernels/gpu_recurrent.py [--parts numerics,times] [--out recurrent.json]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

from gpu_report import Report, capture, run_parts, time_ms  # noqa: E402
from recurrent_steps import Layer, make_layer  # noqa: E402

from octavo.kernels.reference import causal_conv as reference_conv  # noqa: E402
from octavo.kernels.reference import gated_delta as reference_delta  # noqa: E402
from octavo.kernels.reference import state_space as reference_space  # noqa: E402
from octavo.kernels.reference.gated_delta import DeltaShape  # noqa: E402
from octavo.kernels.reference.state_space import StateSpaceShape  # noqa: E402
from octavo.kernels.triton import causal_conv, gated_delta, gated_norm, state_space  # noqa: E402

BYTES_PER_US = 4.5e6
"""Of the H200's memory, as measured."""
SHAPES: dict[str, StateSpaceShape | DeltaShape] = {
    "qwen3-next-80b": DeltaShape(16, 32, 128, 128),
    "nemotron-h-8b": StateSpaceShape(128, 64, 128, 8),
}
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 2e-2}
"""Of the norm of the difference beside that of the whole."""
ROWS = [(1, 1), (1, 64), (1, 65), (1, 1000), (70, 70), (200, 900), (3, 66), (2, 65)]
PACKAGES = {
    "triton": (causal_conv, state_space, gated_delta),
    "reference": (reference_conv, reference_space, reference_delta),
}


def run(layer: Layer, package: str = "triton") -> Tensor:
    """Convolution and states."""
    convolve, space, delta = PACKAGES[package]
    is_space = isinstance(layer.shape, StateSpaceShape)
    bias, offset = layer.conv_bias_c if is_space else None, layer.shape.state_size
    x_tc = convolve.causal_conv(layer.input_tc, layer.tap_ck, bias, layer.state_bz, layer.rows, offset=offset)
    return mix(layer, x_tc, space, delta)


def mix(layer: Layer, x_tc: Tensor, space: Any = state_space, delta: Any = gated_delta) -> Tensor:
    """The states' part alone."""
    args: Any = layer.shape, layer.state_bz, layer.rows
    if isinstance(layer.shape, StateSpaceShape):
        out: Tensor = space.state_space(x_tc, layer.step_th, layer.space_weights, *args)
    else:
        out = delta.gated_delta(x_tc, layer.strength_th, layer.step_th, layer.delta_weights, *args)
    return out


def on(layer: Layer, device: str) -> Layer:
    """A copy there."""

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device)
        return tuple(map(moved, value)) if isinstance(value, tuple) else value

    rows = replace(
        layer.rows,
        **{
            name: moved(getattr(layer.rows, name))
            for name in ("block_table_sb", "row_slot_r", "query_start_r", "kv_len_r")
        },
    )
    return replace(
        layer, rows=rows, **{f.name: moved(getattr(layer, f.name)) for f in fields(layer) if f.name != "rows"}
    )


def error(got: Tensor, want: Tensor) -> float:
    got, want = got.float().cpu().nan_to_num(0.0), want.float().cpu().nan_to_num(0.0)
    return float((got - want).norm() / want.norm())


def numerics(report: Report) -> None:
    """Outputs and states, for both types, all kinds of rows and two lengths of blocks."""
    for name, shape in SHAPES.items():
        for dtype, block_size in ((torch.float32, 48), (torch.bfloat16, 64)):
            layer = make_layer(shape, ROWS, block_size=block_size, dtype=dtype, seed=block_size)
            there = on(layer, "cuda")
            got, want = run(there), run(layer, "reference")
            case = f"{name} {str(dtype)[6:]} blocks of {block_size}"
            report.check(f"{case}: output", error(got, want), TOLERANCE[dtype])
            report.check(f"{case}: states", error(there.state_bz, layer.state_bz), TOLERANCE[dtype])
            same = torch.equal(there.state_bz.isnan().cpu(), layer.state_bz.isnan())
            report.check(f"{case}: states that nobody owns", 0.0 if same else 1.0, 0.5)
        report.say(f"{name} compared")


def parts_of(layer: Layer) -> dict[str, Callable[[], Tensor]]:
    """What takes time."""
    shape, x_tc = layer.shape, torch.randn_like(layer.input_tc)
    gain = torch.ones(shape.inner, device="cuda", dtype=torch.bfloat16)
    group = shape.inner // (shape.num_groups if isinstance(shape, StateSpaceShape) else shape.num_value_heads)
    conv = partial(causal_conv.causal_conv, layer.input_tc, layer.tap_ck, None, layer.state_bz, layer.rows)
    norm = partial(gated_norm.gated_norm, layer.gate_ti, layer.gate_ti, gain, 1e-5)
    return {
        "conv": partial(conv, offset=shape.state_size),
        "states": partial(mix, layer, x_tc),
        "norm": partial(norm, group=group, gates_first=True),
    }


def times(report: Report) -> None:
    """Decode rows at contexts of 1,000 tokens; prompts of 2,048 and 8,192 tokens; microseconds a layer."""
    cases = [[(1, 1000)] * count for count in (1, 8, 32, 64, 128)]
    cases += [[(2048, 2048)], [(8192, 8192)], [(2048, 2048)] * 4]
    for name, shape in SHAPES.items():
        for rows in cases:
            layer = make_layer(shape, rows, block_size=1088, dtype=torch.bfloat16, device="cuda")
            found = {part: 1000 * time_ms(capture(work)) for part, work in parts_of(layer).items()}
            is_decode = rows[0][0] == 1
            least = 8 * len(rows) * shape.state_size / BYTES_PER_US if is_decode else 0.0
            what = f"{len(rows)} decode rows" if is_decode else f"{len(rows)} x {rows[0][0]} tokens"
            report.results.append({"shape": name, "rows": what, **found, "bytes_us": least})
            text = ", ".join(f"{part} {time:.1f}" for part, time in found.items())
            report.say(f"{name}, {what}: {text} us" + (f" (bytes of states {least:.1f})" if is_decode else ""))


def tune(report: Report) -> None:
    """Decode rows of the delta rule, by how many values a program takes."""
    for count in (1, 8, 32, 128):
        layer = make_layer(
            SHAPES["qwen3-next-80b"], [(1, 1000)] * count, block_size=1088, dtype=torch.bfloat16, device="cuda"
        )
        found = {}
        for values in (32, 64, 128):
            gated_delta.DECODE_VALUES = values
            found[values] = 1000 * time_ms(capture(parts_of(layer)["states"]))
        report.results.append({"tuned": count, **found})
        report.say(f"{count} decode rows, us by values of a program: {found}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default="numerics,times")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    report = Report()
    with torch.inference_mode():
        run_parts(report, {"numerics": [numerics], "times": [times], "tune": [tune]}, arguments.parts, arguments.out)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
