"""Random numbers for the weights of tiny models, so large that each layer counts."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Every parameter: matrices anew, norms and biases beside what they were."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.2 * torch.randn_like(parameter))
        else:
            parameter.normal_(0.0, 0.15)
