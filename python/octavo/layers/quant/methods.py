"""Linear methods by the name that `--quantization` and a checkpoint's description use."""

from __future__ import annotations

from importlib import import_module

from octavo.layers.linear import LinearMethod, Product

METHODS = {"fp8": "octavo.layers.quant.fp8:FP8_LINEAR"}
"""Name -> "module:object"."""


def find_method(name: str) -> LinearMethod:
    """The method of a name in METHODS."""
    module, attribute = METHODS[name].split(":")
    method: LinearMethod = getattr(import_module(module), attribute)
    return method


def fits(layer: Product) -> bool:
    """Whether a layer's sizes suit 8-bit products (multiples of 16, which tensor cores and their loads need)."""
    return layer.in_features % 16 == 0 and layer.out_features % 16 == 0
