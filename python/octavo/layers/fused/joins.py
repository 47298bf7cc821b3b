"""Fused kernels for what joins a model's products: they take the place of strings of torch ops in the layers' modules.

For steps that the fused decode kernels (decode.py) do not run: prompts, mixed steps, many decode rows. Products stay
what they are.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from octavo.kernels.triton.gated import gated_gelu, gated_silu
from octavo.kernels.triton.rms_norm import add_rms_norm, rms_norm
from octavo.kernels.triton.weighed_sum import weighed_sum
from octavo.layers.activation import GatedActivation
from octavo.layers.norm import RMSNorm
from octavo.layers.weighed_sum import WeighedSum

SILU = ("silu", "swish")
GELU = ("gelu_new", "gelu_pytorch_tanh")


def use_joins(model: nn.Module, *, pdl: bool) -> None:
    """Give every norm and gated activation below `model` its kernel. `pdl`: as dependent launches."""
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.norm = partial(rms_norm, pdl=pdl)
            module.add = partial(add_rms_norm, pdl=pdl)
        elif isinstance(module, WeighedSum):
            module.run = partial(weighed_sum, pdl=pdl)
        elif isinstance(module, GatedActivation) and module.name in SILU:
            module.run = partial(gated_silu, pdl=pdl)
        elif isinstance(module, GatedActivation) and module.name in GELU:
            module.run = partial(gated_gelu, pdl=pdl)
