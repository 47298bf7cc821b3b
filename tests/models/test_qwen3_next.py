"""Qwen 3-Next's checkpoints: products with all of a head together, taken apart with their scales."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.models.config import normalize_config
from octavo.models.qwen3_next import FAMILY

CONFIG = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 100,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
PREFIX = "model.layers.0"


def converted(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    assert FAMILY.convert is not None
    return dict(FAMILY.convert(normalize_config(CONFIG), tensors.items()))


def wide(number: Tensor, scale: Tensor, block: int) -> Tensor:
    """Values of blocks of rows with a scale each."""
    return number * scale.repeat_interleave(block, 0)[: len(number)]


def test_scales_are_taken_apart_as_rows_are() -> None:
    """A scale a row, a block of 128 rows, or one for all."""
    torch.manual_seed(0)
    rows = {"linear_attn.in_proj_qkvz": 2 * (2 * 128 + 2 * 256), "self_attn.q_proj": 2 * 2 * 128}
    for name, count in rows.items():
        for block in (1, 128, count):
            weight, scale = torch.randn(count, 6), torch.rand(-(-count // block), 1)
            parts = converted({f"{PREFIX}.{name}.weight": weight, f"{PREFIX}.{name}.weight_scale_inv": scale})
            want = converted({f"{PREFIX}.{name}.weight": wide(weight, scale, block)})
            assert len(want) == 2
            for part, values in want.items():
                assert torch.equal(wide(parts[part], parts[f"{part}_scale_inv"], block), values)


def test_small_products_share_their_scale() -> None:
    name = f"{PREFIX}.linear_attn.in_proj_ba"
    weight, scale = torch.arange(8.0)[:, None], torch.tensor([[2.0]])
    parts = converted({f"{name}.weight": weight, f"{name}.weight_scale_inv": scale})
    assert parts[f"{PREFIX}.linear_attn.in_proj_b.weight"].flatten().tolist() == [0, 1, 4, 5]
    assert parts[f"{PREFIX}.linear_attn.in_proj_a.weight"].flatten().tolist() == [2, 3, 6, 7]
    assert parts[f"{PREFIX}.linear_attn.in_proj_a.weight_scale_inv"] is scale


def test_drafters_are_left_out() -> None:
    assert converted({"mtp.layers.0.norm.weight": torch.ones(1), "model.norm.weight": torch.ones(1)}).keys() == {
        "model.norm.weight"
    }
