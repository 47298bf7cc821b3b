"""Linear methods by the name that `--quantization` and a checkpoint's description use."""

from __future__ import annotations

from importlib import import_module

from octavo.kernels.reference.squares import SIDE
from octavo.layers.linear import LinearMethod, Product

METHODS = {"fp8": "octavo.layers.quant.fp8:FP8_LINEAR", "fp8 squares": "octavo.layers.quant.fp8_squares:FP8_SQUARES"}
"""Name -> "module:object"; "fp8 squares" is what a checkpoint's blocks make of "fp8"."""


def find_method(name: str, block: tuple[int, int] | None = None) -> LinearMethod:
    """The method of a name in METHODS; `block` is what shares a scale in the checkpoint."""
    if name == "fp8" and block == (SIDE, SIDE):
        name = "fp8 squares"
    module, attribute = METHODS[name].split(":")
    method: LinearMethod = getattr(import_module(module), attribute)
    return method


def fits(layer: Product) -> bool:
    """Whether a layer's sizes suit 8-bit products (multiples of 16, which tensor cores and their loads need)."""
    return layer.in_features % 16 == 0 and layer.out_features % 16 == 0
