"""Text models of image-text classes as native families: positions in three dimensions turn each angle as Transformers'
classes do, and the twins are taken for what they are."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.glm4v.modeling_glm4v import Glm4vTextRotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from octavo.layers.rotary import Rotary
from octavo.models.description import rotary_spec
from octavo.models.native_text import angle_axes, native_text

sys.path.insert(0, str(Path(__file__).parent / "architectures"))
from tiny import tiny_config

LENGTH = 131_072
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
CASES: dict[str, tuple[str, type[Any], dict[str, Any]]] = {
    "runs": ("qwen2_vl", Qwen2VLRotaryEmbedding, {"mrope_section": [2, 3, 3]}),
    "runs, yarn": ("qwen2_5_vl", Qwen2VLRotaryEmbedding, {"mrope_section": [2, 3, 3], **YARN}),
    "turns": ("qwen3_vl", Qwen3VLTextRotaryEmbedding, {"mrope_section": [4, 2, 2]}),
    "turns, silent": ("qwen3_vl", Qwen3VLTextRotaryEmbedding, {}),
    "part of a head": ("glm4v", Glm4vTextRotaryEmbedding, {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}),
}


def config_of(model_type: str, rope: dict[str, Any]) -> Any:
    """A tiny config with a rotary embedding."""
    model_class = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[transformers.CONFIG_MAPPING[model_type]]
    config = tiny_config(transformers.CONFIG_MAPPING[model_type], model_class)
    config.text_config.max_position_embeddings = LENGTH
    config.text_config.rope_parameters = {"rope_type": "default", "rope_theta": 10_000.0, **rope}
    config.architectures = [model_class.__name__]
    return config


def raw(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return found


@pytest.mark.parametrize("case", CASES)
def test_angles_go_by_their_dimension(case: str) -> None:
    model_type, rotary_class, rope = CASES[case]
    config = config_of(model_type, rope)
    text = native_text(raw(config))
    assert text is not None
    rotary = Rotary(rotary_spec(text.rope, text.head_dim), LENGTH, device=torch.device("cpu"))
    position_3t = torch.randint(0, LENGTH, (3, 50), generator=torch.Generator().manual_seed(3))
    cos_1td, sin_1td = rotary_class(config.text_config)(torch.zeros(1), position_3t.unsqueeze(1))
    found_tr = rotary.gather(position_3t)
    cos_tf, sin_tf = found_tr.chunk(2, dim=-1)
    assert torch.allclose(cos_tf, halves(cos_1td[0], case), atol=2e-5)
    assert torch.allclose(sin_tf, halves(sin_1td[0], case), atol=2e-5)
    assert not torch.allclose(found_tr, rotary.gather(position_3t[0]), atol=0.1)
    equal_3t = position_3t[:1].expand(3, -1)
    assert torch.equal(rotary.gather(equal_3t), rotary.gather(equal_3t[0]))


def halves(values_td: Tensor, case: str) -> Tensor:
    """One of each angle: Transformers has two, side by side or behind each other."""
    return values_td[:, ::2] if case == "part of a head" else values_td[:, : values_td.shape[1] // 2]


def test_sections_that_do_not_fit_are_left_to_transformers() -> None:
    assert angle_axes("runs", (2, 3, 3), 8) == (0, 0, 1, 1, 1, 2, 2, 2)
    assert angle_axes("runs", (2, 3, 3), 10) is None
    assert angle_axes("turns", (2, 3), 8) is None
    assert angle_axes("turns", (4, 2, 2), 8) == (0, 1, 2, 0, 1, 2, 0, 0)
    assert native_text(raw(config_of("qwen2_vl", {"mrope_section": [16, 24, 24]}))) is None
    assert native_text({"model_type": "llama"}) is None
