"""Builds the Transformers model of a config.json on the meta device: no memory, no weights."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

from octavo.errors import ModelError
from octavo.models.config import NormalConfig
from octavo.models.transformers_config import foreign_config, unknown
from octavo.models.transformers_linears import Kinds


class NotPackableError(ModelError):
    """Transformers has the model, but it can't run on packed rows with Octavo's cache."""


@dataclass(frozen=True, slots=True)
class ForeignOptions:
    """What a class is built for."""

    dtype: torch.dtype
    device: torch.device
    """On the meta device a model only tells its size."""
    max_length: int
    choose: Kinds
    """The methods of its linear layers."""
    has_kernels: bool
    """Fused kernels run what is ours in it; the device is CUDA then."""


MAPPINGS = (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
"""Config class -> class that generates text."""


def build_on_meta(config: NormalConfig, dtype: torch.dtype, attention: str | None = None) -> Any:
    """The model of a config, in evaluation mode. `attention` is the name of its attention function; None: its own.

    ModelError when Transformers has no model that generates text for it, or can't build it so.
    """
    hf_config = foreign_config(config.raw)
    model_class = _generating_class(hf_config, config.architecture)
    if model_class is None:
        raise unknown(config.raw)
    try:
        with torch.device("meta"):
            model = model_class._from_config(hf_config, dtype=dtype, attn_implementation=attention)
    except Exception as error:  # foreign code, any error means the same
        kind = ModelError if attention is None else NotPackableError
        reason = "its attention can't be replaced" if error.args == (attention,) else str(error)
        raise kind(f"Transformers can't build {config.architecture} for Octavo: {reason}") from error
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel):  # this warning would read token ids on the host
            module.warn_if_padding_and_no_attention_mask = lambda input_ids, attention_mask: None
    return model.eval().requires_grad_(False)


def _generating_class(hf_config: PreTrainedConfig, architecture: str) -> Any:
    """The class that `architectures` names, if it is one that generates text from this config."""
    own = [mapping.get(type(hf_config), None) for mapping in MAPPINGS]
    others = (found for mapping in MAPPINGS for found in mapping.values())  # imports every model: seconds
    for found in itertools.chain(own, others):
        if found is None or found.__name__ != architecture:
            continue
        if found in own or isinstance(hf_config, found.config_class):
            return found
    return None
