"""InternLM 2 and 3, which Transformers lacks: a tiny Llama whose weights lie as theirs do gives the Llama's logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_driver import PagedDriver
from tiny_models import make_reference, read_config, read_tensors, save
from torch import Tensor

from octavo.models.registry import build_model, is_native

PLACES = {
    "model.embed_tokens": "model.tok_embeddings",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}


def joined(q: Tensor, k: Tensor, v: Tensor, dim: int) -> Tensor:
    """Rows of a group of heads after another: its queries, its key, its value."""
    groups = k.shape[0] // dim
    parts = [part.reshape(groups, -1, *part.shape[1:]) for part in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def as_internlm2(tensors: dict[str, Tensor], dim: int) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            q, k, v = (tensors[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv")
            yield name.replace("self_attn.q_proj", "attention.wqkv"), joined(q, k, v, dim)
        elif ".k_proj." not in name and ".v_proj." not in name:
            for old, new in PLACES.items():
                name = name.replace(old, new)
            yield name, tensor


@pytest.mark.parametrize(
    ("case", "version", "fields"),
    [
        ("llama", 2, {"bias": False}),
        ("llama-dynamic", 2, {"bias": False}),
        ("llama-mqa", 2, {"bias": False}),
        ("llama-biases", 3, {"bias": True, "qkv_bias": True}),
        ("llama", 3, {}),
    ],
)
def test_internlm_is_a_llama_laid_out_otherwise(
    case: str, version: int, fields: dict[str, Any], tmp_path: Path
) -> None:
    reference = make_reference(case)
    folder = save(reference, tmp_path)
    own = {"model_type": f"internlm{version}", "architectures": [f"InternLM{version}ForCausalLM"], **fields}
    config = read_config(folder, auto_map={"AutoModelForCausalLM": "foreign.Code"}, **own)
    assert is_native(config.raw)
    model = build_model(config, dtype=torch.float32, device=torch.device("cpu"))
    tensors = dict(read_tensors(folder))
    model.load_weights(as_internlm2(tensors, config.head_dim) if version == 2 else tensors.items())
    ids = torch.randint(3, config.vocab_size, (24,), generator=torch.Generator().manual_seed(version)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    driver = PagedDriver(model)
    got = torch.cat([driver.step([(0, ids[:13])]), driver.step([(0, ids[13:])])])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
