"""Decode steps of tiny models through the fused kernels' launches against the models' own modules; run by
test_fused_kernels.py in Triton's interpreter, on fp32 (fused_stand_in.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_models import Sizes, make_context, raw_config
from fused_numerics_cases import _loop_bounds_are_numbers  # noqa: F401 (a fixture)
from fused_stand_in import run
from fused_steps import relative_error
from torch import Tensor

from octavo.attention.base import make_backend
from octavo.kernels.triton.shared_attention import shared_kernel
from octavo.kernels.triton.skinny_linear import store
from octavo.layers.fused.decode import FusedDecode
from octavo.models.config import normalize_config
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model

SIZES = Sizes(hidden=128, inner=256, heads=4, kv_heads=2, head_dim=64, vocab=192, layers=3, qk_norm=False)
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "llama-biases": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "mistral-window": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 70},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen3-moe": QWEN3_MOE,
    "qwen3-moe-some-layers": {**QWEN3_MOE, "decoder_sparse_step": 2, "norm_topk_prob": False},
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "sliding_window": 70,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 1.5,
    },
    "mixtral": {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4},
}


def make_model(family: str) -> Decoder:
    config = normalize_config(raw_config(SIZES) | FAMILIES[family])
    model = build_model(config, dtype=torch.float32, device=torch.device("cpu"))
    assert isinstance(model, Decoder)
    assert model.decode_kernels is None
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    model.set_attention_backend(make_backend("reference"))
    return model


@pytest.mark.parametrize("lengths", [[130], [5, 1, 64, 200]], ids=["one-row", "rows"])
@pytest.mark.parametrize("family", FAMILIES)
def test_decode_step(family: str, lengths: list[int]) -> None:
    torch.manual_seed(len(lengths))
    model = make_model(family)
    ctx = make_context(SIZES, lengths, layers=SIZES.layers, device="cpu")
    ctx.kv_cache = [cache.float() for cache in ctx.kv_cache]
    token_id_t = torch.randint(0, SIZES.vocab, (len(lengths),))
    caches = [cache.clone() for cache in ctx.kv_cache]
    decode = FusedDecode(model.weights())
    assert decode.accepts(ctx)
    for launch in decode.launches(token_id_t, ctx):
        run(launch)
    hidden = decode._buffers.hidden_tm[: len(lengths)].clone()
    fused, ctx.kv_cache = ctx.kv_cache, caches
    expected = model.forward(token_id_t, ctx.position_t, ctx)
    assert relative_error(hidden, expected) < 2e-5
    for ours, theirs in zip(fused, ctx.kv_cache, strict=True):
        assert relative_error(ours, theirs) < 1e-5
    logits = torch.empty(len(lengths), SIZES.vocab)
    assert decode._head is not None
    run(store(decode._head, hidden, logits, decode._buffers.stream))
    assert relative_error(logits, model.logits(expected)) < 2e-5


def test_decode_step_of_rows_that_share_blocks() -> None:
    torch.manual_seed(0)
    model = make_model("qwen3")
    ctx = make_context(SIZES, [129, 200, 5, 150], layers=SIZES.layers, device="cpu")
    ctx.kv_cache = [cache.float() for cache in ctx.kv_cache]
    first, second, _, last = ctx.row_slot_r.tolist()
    ctx.block_table_sb[[first, last], :2] = ctx.block_table_sb[second, :2].clone()
    ctx.shared_2 = torch.tensor([second, 2], dtype=torch.int32)
    caches = [cache.clone() for cache in ctx.kv_cache]
    token_id_t = torch.randint(0, SIZES.vocab, (4,))
    decode = FusedDecode(model.weights())
    launches = decode.launches(token_id_t, ctx)
    assert sum(launch.kernel is shared_kernel for launch in launches) == SIZES.layers
    for launch in launches:
        run(launch)
    hidden = decode._buffers.hidden_tm[:4].clone()
    ctx.kv_cache = caches
    assert relative_error(hidden, model.forward(token_id_t, ctx.position_t, ctx)) < 2e-5


def test_which_steps_are_accepted() -> None:
    decode = FusedDecode(make_model("llama").weights())

    def context(**changes: Any) -> Any:
        ctx = make_context(SIZES, [3, 4], layers=SIZES.layers, device="cpu")
        for name, value in changes.items():
            setattr(ctx, name, value)
        return ctx

    assert decode.accepts(context())
    assert not decode.accepts(context(num_decode_rows=1))
    assert not decode.accepts(context(num_tokens=5))
    assert not decode.accepts(context(block_size=16))
    assert not decode.accepts(context(num_rows=129, num_decode_rows=129, num_tokens=129))
    rows: Tensor = torch.empty(129, SIZES.hidden)
    assert decode.accepts_logits(rows[:128])
    assert not decode.accepts_logits(rows)
