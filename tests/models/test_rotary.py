"""Rotary frequencies and rotation against Transformers' own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPTNeoXConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from octavo.errors import ModelError
from octavo.layers.frequencies import RotarySpec, frequencies
from octavo.layers.rotary import Rotary, powers, rotate
from octavo.models.config import normalize_config
from octavo.models.description import rotary_spec

LLAMA_31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PHI_4_MINI = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.01 * i for i in range(64)],
    "long_factor": [1.0 + 0.7 * i for i in range(64)],
    "original_max_position_embeddings": 4096,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "llama-2": ({}, {"rope_type": "default"}, 4096),
    "llama-3": ({"rope_theta": 500000.0}, {"rope_type": "default"}, 4096),
    "linear": ({}, {"rope_type": "linear", "factor": 4.0}, 4096),
    "dynamic, short": ({}, {"rope_type": "dynamic", "factor": 2.0}, 300),
    "dynamic, long": ({}, {"rope_type": "dynamic", "factor": 2.0}, 9000),
    "llama-3.1": ({"rope_theta": 500000.0, "max_position_embeddings": 131072}, LLAMA_31, 131072),
    "llama-3.2": ({"rope_theta": 500000.0, "head_dim": 64}, {**LLAMA_31, "factor": 32.0}, 4096),
    "longrope, short": ({"max_position_embeddings": 131072}, PHI_4_MINI, 4096),
    "longrope, long": ({"max_position_embeddings": 131072}, PHI_4_MINI, 131072),
    "longrope, no longer": ({"max_position_embeddings": 4096}, PHI_4_MINI, 4096),
    "longrope, own scale": ({}, {**PHI_4_MINI, "factor": 32.0, "attention_factor": 1.2}, 8192),
    "qwen2.5-yarn": (
        {"rope_theta": 1e6, "max_position_embeddings": 32768},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        131072,
    ),
    "deepseek-yarn": (
        {"head_dim": 64},
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
        },
        4096,
    ),
    "gpt-oss-yarn": (
        {"rope_theta": 150000.0, "head_dim": 64},
        {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "attention_factor": 1.5,
            "original_max_position_embeddings": 4096,
        },
        4096,
    ),
    "proportional": (
        {"head_dim": 64, "rope_theta": 1e6, "max_position_embeddings": 131072},
        {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 8.0},
        131072,
    ),
    "proportional, all": ({}, {"rope_type": "proportional"}, 4096),
}
"""Name -> (config fields, rope parameters, longest served length)."""


def configs(case: str) -> tuple[LlamaConfig, RotarySpec, int]:
    fields, rope, length = CASES[case]
    values = {"hidden_size": 512, "num_attention_heads": 4, "max_position_embeddings": 4096, **fields}
    theta = values.pop("rope_theta", 10000.0)
    config = LlamaConfig(**values, rope_parameters={**rope, "rope_theta": theta})
    normal = normalize_config({**config.to_dict(), "architectures": ["LlamaForCausalLM"]})
    return config, rotary_spec(normal.rope, normal.head_dim), length


@pytest.mark.parametrize("case", CASES)
def test_frequencies(case: str) -> None:
    config, spec, length = configs(case)
    if spec.type == "default":
        expected_f, expected_scale = LlamaRotaryEmbedding(config).inv_freq, 1.0
    else:
        expected_f, expected_scale = ROPE_INIT_FUNCTIONS[spec.type](config, torch.device("cpu"), seq_len=length)
    found_f, found_scale = frequencies(spec, length, powers)
    assert torch.equal(torch.from_numpy(found_f), expected_f)
    assert found_scale == expected_scale


LONG = 131072


@pytest.mark.parametrize("case", CASES)
def test_table(case: str) -> None:
    """The cosines and sines of Transformers' module, of a sequence as long as the longest served one."""
    config, spec, _ = configs(case)
    position_t = torch.tensor([0, 1, 17, 4095, 4096, 4999, 32768, 65535, 100_003, LONG - 1])
    cos_1td, sin_1td = LlamaRotaryEmbedding(config)(torch.zeros(1), position_t[None])
    found_tr = Rotary(spec, LONG, device=torch.device("cpu")).gather(position_t)
    half = spec.rotary_dim // 2
    expected_tr = torch.cat((cos_1td[0, :, :half], sin_1td[0, :, :half]), -1)
    # The module of type dynamic stretches its base in fp32: one last bit of a frequency, times the position.
    rounding_t1 = position_t[:, None] * 2.0**-23 if spec.type == "dynamic" else 0.0
    assert ((found_tr - expected_tr).abs() <= 1e-6 + rounding_t1).all()


def test_partial_rotation() -> None:
    config = GPTNeoXConfig(hidden_size=96, num_attention_heads=4, rotary_pct=0.25)
    raw = {**config.to_dict(), "architectures": ["GPTNeoXForCausalLM"]}
    normal = normalize_config(raw)
    spec = rotary_spec(normal.rope, normal.head_dim)
    assert spec.rotary_dim == 6
    rotary = Rotary(spec, 50, device=torch.device("cpu"))
    q_thd, k_tgd, position_t = torch.randn(7, 4, 24), torch.randn(7, 4, 24), torch.randint(0, 50, (7,))
    cos_sin_tr = rotary.gather(position_t)
    found = rotary(q_thd, k_tgd, cos_sin_tr)
    cos_td, sin_td = (x.repeat(1, 2) for x in cos_sin_tr.chunk(2, -1))
    expected = apply_rotary_pos_emb(q_thd, k_tgd, cos_td, sin_td)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_rotation_keeps_dtype_and_rounds_once() -> None:
    x_tnd, angle_tf = torch.randn(5, 3, 16, dtype=torch.bfloat16), torch.rand(5, 8)
    cos_sin_tr = torch.cat((angle_tf.cos(), angle_tf.sin()), -1)
    exact = rotate(x_tnd.double(), cos_sin_tr.double()).to(torch.bfloat16)
    found = rotate(x_tnd, cos_sin_tr)
    assert found.dtype == torch.bfloat16
    assert (found != exact).float().mean() < 0.01


@pytest.mark.parametrize(("kind", "dim", "message"), [("su", 16, "rope type 'su'"), ("default", 7, "must be even")])
def test_refused(kind: str, dim: int, message: str) -> None:
    spec = RotarySpec(type=kind, rotary_dim=dim, original_max_position=64)
    with pytest.raises(ModelError, match=message):
        Rotary(spec, 64, device=torch.device("cpu"))
