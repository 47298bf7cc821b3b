"""Prompts, chunks, mixed and decode steps of tiny models with fused kernels between the products, against their plain
modules; run by test_joins.py in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_model_cases import FAMILIES
from paged_steps import fill
from torch import Tensor

from octavo.attention.base import ForwardContext, make_backend
from octavo.layers.fused import part_sums
from octavo.layers.fused.part_sums import InParts
from octavo.layers.linear import Linear
from octavo.models.block import SelfAttention
from octavo.models.config import normalize_config
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model

SIZES = {
    "vocab_size": 101,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    **FAMILIES,
    "gelu": {**FAMILIES["llama"], "hidden_act": "gelu"},
    "half-rotated": {**FAMILIES["qwen3"], "partial_rotary_factor": 0.5},
    "head-dim-20": {**FAMILIES["llama"], "head_dim": 20},
    "gemma-3": {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window_pattern": 2},
    "olmo-2": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    "glm-4": {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4"},
    "cohere-2": {"architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "sliding_window_pattern": 2},
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "sliding_window": 30,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 1.5,
    },
    "deepseek-v3-halves": DEEPSEEK | {"rope_interleave": False, "q_lora_rank": None},
    "deepseek-v3": DEEPSEEK,
}
OTHER_ATTENTION = ("olmo-2", "glm-4", "cohere-2")
"""Models whose norms or rotations of heads the kernels don't know."""
STEPS = {
    "prompts": [(40, 40), (3, 3)],
    "chunks-and-decodes": [(1, 9), (1, 70), (18, 50), (5, 5)],
    "decodes": [(1, 1), (1, 65), (1, 150), (1, 64)],
    "one-row": [(1, 65)],
}
"""Rows (query length, kv length)."""


def make_model(name: str) -> Decoder:
    model = build_model(normalize_config(SIZES | MODELS[name]), dtype=torch.float32, device=torch.device("cpu"))
    assert isinstance(model, Decoder)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        low, spread = (0.5, 1.0) if parameter.ndim == 1 else (0.0, parameter.shape[-1] ** -0.5)
        parameter.copy_(low + spread * torch.randn(parameter.shape, generator=generator))
    return model


def make_context(model: Decoder, rows: list[tuple[int, int]], block_size: int) -> tuple[ForwardContext, Tensor]:
    """A step over random caches, and its token ids."""
    generator = torch.Generator().manual_seed(len(rows))
    spec = model.attention_specs[0]
    blocks = 1 + sum(-(-length // block_size) for _, length in rows)
    shape = spec.cache_shape(blocks, block_size)
    table = torch.zeros(len(rows) + 2, 512 // block_size, dtype=torch.int32)
    slots = torch.randperm(len(rows) + 2, generator=generator)[: len(rows)].tolist()
    position, mapping, starts = fill(torch.zeros(shape), table, slots, rows, generator)
    ctx = ForwardContext(
        kv_cache=[torch.randn(shape, generator=generator) for _ in model.attention_specs],
        block_table_sb=table,
        row_slot_r=torch.tensor(slots, dtype=torch.int32),
        query_start_r=torch.tensor(starts, dtype=torch.int32),
        kv_len_r=torch.tensor([length for _, length in rows], dtype=torch.int32),
        position_t=torch.tensor(position),
        slot_mapping_t=torch.tensor(mapping),
        block_size=block_size,
        num_rows=len(rows),
        num_decode_rows=sum(count == 1 for count, _ in rows),
        num_tokens=starts[-1],
        max_query_len=max(count for count, _ in rows),
        max_kv_len=max(length for _, length in rows),
    )
    return ctx, torch.randint(0, 101, (starts[-1],), generator=generator)


def check(model: Decoder, joined: Decoder, rows: list[tuple[int, int]], block_size: int) -> None:
    """Hidden states and caches of one step."""
    model.set_attention_backend(make_backend("reference"))
    backend = make_backend("triton")
    joined.set_attention_backend(backend)
    results = []
    for each in (model, joined):
        ctx, token_id_t = make_context(model, rows, block_size)
        backend.prepare(ctx)
        hidden_tm = each.forward(token_id_t, ctx.position_t, ctx)
        results.append((torch.cat((hidden_tm, each.logits(hidden_tm)), dim=-1), ctx.kv_cache))
    (want, want_caches), (got, caches) = results
    torch.testing.assert_close(got, want, rtol=0, atol=3e-5)
    for cache, want_cache in zip(caches, want_caches, strict=True):
        torch.testing.assert_close(cache, want_cache, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "step"),
    [(name, "chunks-and-decodes") for name in MODELS]
    + [("qwen3", "prompts"), ("llama", "decodes")]
    + [(name, "one-row") for name in ("gpt-oss", "deepseek-v3", "gemma-3")],
)
@torch.inference_mode()
def test_steps(name: str, step: str) -> None:
    model, joined = make_model(name), make_model(name)
    joined.use_joins()
    fused = [block.attention.fused for block in joined.layers()]
    assert all(kernel is None for kernel in fused) == (name in OTHER_ATTENTION)
    check(model, joined, STEPS[step], block_size=16)


@pytest.mark.parametrize("name", ["qwen3", "mistral-window", "gpt-oss"])
@torch.inference_mode()
def test_decode_steps_by_the_one_kernel(name: str) -> None:
    """As on Hopper."""
    model, joined = make_model(name), make_model(name)
    joined.use_joins()
    for block in joined.layers():
        assert isinstance(block.attention, SelfAttention)
        assert block.attention.fused is not None
        block.attention.fused.decodes = True
    check(model, joined, STEPS["decodes"], block_size=64)
    check(model, joined, STEPS["chunks-and-decodes"], block_size=64)


@pytest.mark.parametrize("name", ["llama", "gemma-3", "gpt-oss"])
@torch.inference_mode()
def test_products_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms add up the halves of the products before them, if nothing else reads those."""
    monkeypatch.setattr(part_sums, "FIRST_ROWS", 4)
    monkeypatch.setattr(part_sums, "LEAST_FEATURES", 1)
    model, joined = make_model(name), make_model(name)
    joined.use_joins()
    found = [module for module in joined.modules() if isinstance(module, Linear) and isinstance(module.method, InParts)]
    assert len(found) == {"llama": 4, "gemma-3": 0, "gpt-oss": 0}[name]
    check(model, joined, STEPS["decodes"], block_size=16)
    check(model, joined, STEPS["one-row"], block_size=16)


def test_models_are_plain_on_cpu() -> None:
    assert all(block.attention.fused is None for block in make_model("llama").layers())
