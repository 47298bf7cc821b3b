"""Deterministic mode without a GPU: its kernels in the interpreter and compiled for an H200, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from case_files import CaseFile, CaseRun, runs
from sm90_compile import compile_launch

from octavo.config import make_engine_config
from octavo.errors import ConfigError, ModelError
from octavo.kernels.triton.invariant_gemm import invariant_launch, kinds_of_rows, ring_config
from octavo.kernels.triton.invariant_heads import heads_launch
from octavo.kernels.triton.skinny_table import SHARED_BYTES
from octavo.layers.invariant import INVARIANT, invariant_heads, invariant_logits, invariant_scores
from octavo.layers.moe import SparseMLP
from octavo.models.config import NormalConfig, normalize_config
from octavo.models.decoder import Decoder
from octavo.models.latent import LatentAttention
from octavo.models.registry import build_model
from octavo.models.weights import linears_of
from octavo.worker.device import DeviceFacts
from octavo.worker.resolve import resolve_config

BF16 = torch.bfloat16


@runs(CaseFile("invariant_cases.py"))
def test_numerics_in_the_interpreter(case_run: CaseRun) -> None:
    assert case_run.passed, case_run.said


@pytest.mark.parametrize("out", [BF16, torch.float32])
@pytest.mark.parametrize("rows", kinds_of_rows(2))
def test_products_compile_for_sm90(rows: int, out: torch.dtype) -> None:
    n, k = 6144, 4096
    x, weight = (torch.empty(count, k, dtype=BF16, device="meta") for count in (rows, n))
    launch = invariant_launch(x, weight, None, torch.empty(rows, n, dtype=out, device="meta"), tma=True)
    compiled = compile_launch(launch)
    assert compiled.spill_bytes == 0
    assert compiled.shared_bytes <= SHARED_BYTES
    assert compiled.num_wgmma > 0
    assert compiled.depths == (launch.num_stages,)
    assert compiled.num_tma_loads == 2 * launch.num_stages, "x and W, once for each stage"
    assert compiled.num_mma == 0, "sums of wgmma and mma.sync differ"


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_products_of_heads_compile_for_sm90(dtype: torch.dtype, is_transposed: bool) -> None:
    """DeepSeek V3's sizes: 128 plain dims into 512 of latents, and back into 128 values."""
    up = torch.empty(128, 256, 512, dtype=dtype, device="meta")
    weight = up[:, 128:].transpose(1, 2) if is_transposed else up[:, :128]
    k, n = weight.shape[1:]
    x, y = (torch.empty(7, 128, size + 64, dtype=dtype, device="meta")[..., :size] for size in (k, n))
    launch = heads_launch(x, weight, y)
    compiled = compile_launch(launch)
    assert compiled.spill_bytes == 0
    is_half = dtype == BF16
    assert (compiled.num_wgmma > 0) == is_half
    assert compiled.num_mma == 0
    assert compiled.depths == (launch.num_stages - (0 if is_half else 1),)


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (28672, 4096), (4096, 14336), (151936, 1024), (1536, 576)])
def test_the_ring_does_not_split_sums(n: int, k: int) -> None:
    for rows in (1, 2, 17, 64, 128):
        config = ring_config(rows, n, k)
        assert config is not None
        assert config.split_k == 1
        assert config.block_m >= rows
        assert config.fits("qkv", n, k)
    assert ring_config(129, n, k) is None
    assert ring_config(8, n, 1000) is None


def small_config(**changes: Any) -> NormalConfig:
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    }
    return normalize_config(raw | changes)


def test_every_product_of_a_model_is_invariant() -> None:
    model = build_model(small_config(), dtype=BF16, device=torch.device("meta"), deterministic=True)
    assert isinstance(model, Decoder)
    assert {layer.method for layer in linears_of(model)} == {INVARIANT}
    assert model.head.project is invariant_logits
    assert model.decode_kernels is None


def test_models_without_such_layers_are_refused() -> None:
    meta = torch.device("meta")
    with pytest.raises(ModelError, match=r"--deterministic can't run --quantization fp8"):
        build_model(small_config(), dtype=BF16, device=meta, deterministic=True, quantization="fp8")
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "model_type": "mixtral"}
    mixture = small_config(architectures=["MixtralForCausalLM"], intermediate_size=40, **experts)
    with pytest.raises(ModelError, match=r"--deterministic can't run these experts"):
        build_model(mixture, dtype=BF16, device=meta, deterministic=True)


def test_routers_are_invariant_too() -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "model_type": "mixtral"}
    config = small_config(architectures=["MixtralForCausalLM"], **experts)
    model = build_model(config, dtype=BF16, device=torch.device("meta"), deterministic=True)
    assert isinstance(model, Decoder)
    assert {getattr(block.mlp, "score", None) for block in model.layers()} == {invariant_scores}


def test_latent_attention_is_invariant_too() -> None:
    """DeepSeek V3's: products of heads, and a router in fp32."""
    latents = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
    groups = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    changes = {"model_type": "deepseek_v3", **latents, **experts, **groups}
    config = small_config(architectures=["DeepseekV3ForCausalLM"], **changes)
    model = build_model(config, dtype=BF16, device=torch.device("meta"), deterministic=True)
    assert isinstance(model, Decoder)
    assert {layer.method for layer in linears_of(model)} == {INVARIANT}
    latent = [block.attention for block in model.layers() if isinstance(block.attention, LatentAttention)]
    assert [layer.multiply for layer in latent] == [invariant_heads] * 2
    assert [mlp.score for mlp in model.modules() if isinstance(mlp, SparseMLP)] == [invariant_scores]


@pytest.mark.parametrize(
    ("kind", "options", "field"),
    [
        ("cpu", {}, "deterministic"),
        ("cuda", {"attention_backend": "reference"}, "deterministic"),
        ("cuda", {"decode_kernels": "fused"}, "decode_kernels"),
    ],
)
def test_configurations_without_such_kernels_are_refused(kind: str, options: dict[str, str], field: str) -> None:
    device = DeviceFacts(kind=kind, name="", total_bytes=1 << 37, free_bytes=1 << 37, num_cores=8, has_bfloat16=True)
    config = make_engine_config({"deterministic": True, **options})
    with pytest.raises(ConfigError, match="--deterministic") as caught:
        resolve_config(config, device, 8192)
    assert caught.value.param == field


def test_a_configuration_with_such_kernels() -> None:
    device = DeviceFacts(kind="cuda", name="", total_bytes=1 << 37, free_bytes=1 << 37, num_cores=8, has_bfloat16=True)
    assert resolve_config(make_engine_config({"deterministic": True}), device, 8192).execution.deterministic
