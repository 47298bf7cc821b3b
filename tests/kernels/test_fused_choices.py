"""What the fused decode kernels choose, without running them: configurations, splits, and which decoders they take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.attention.base import AttentionSpec
from octavo.config import make_engine_config
from octavo.errors import ConfigError, ModelError
from octavo.kernels.triton.decode_attention_launches import MAX_SPLITS, choose_splits, choose_stages
from octavo.kernels.triton.skinny_table import (
    BUCKETS,
    FP8_TABLE,
    MAX_ROWS,
    PLAIN,
    TABLE,
    Gemv,
    Ring,
    bucket_for,
    choose,
)
from octavo.layers.fused.support import DecoderShape, DeviceTraits, obstacle
from octavo.models.config import normalize_config
from octavo.models.gpt_oss import FAMILY
from octavo.models.registry import build_model
from octavo.worker.device import DeviceFacts, cpu_facts
from octavo.worker.resolve import resolve_config

HOPPER = DeviceTraits("cuda", (9, 0))
SPEC = AttentionSpec(0, 32, 8, 128, 128**-0.5)
LLAMA = DecoderShape(4096, 14336, "silu", 128, (SPEC, replace(SPEC, layer=1, window=1024)), True, torch.bfloat16)


@pytest.mark.parametrize("fp8", [False, True])
def test_every_measured_winner_fits_its_own_shape(fp8: bool) -> None:
    for (op, n, k), winners in (FP8_TABLE if fp8 else TABLE).items():
        assert tuple(winners) == BUCKETS
        for bucket, config in winners.items():
            assert choose(op, n, k, bucket, fp8=fp8) is config
            assert isinstance(config, Gemv) if bucket == 1 else isinstance(config, Ring) and config.block_m == bucket
            assert op in ("o", "down") or bucket == 1 or config.split_k == 1, "only the residual epilogue joins splits"


@pytest.mark.parametrize("op", ["qkv", "o", "gate_up", "down"])
@pytest.mark.parametrize("bucket", BUCKETS)
def test_unmeasured_shapes_get_what_fits(op: str, bucket: int) -> None:
    for n in range(64, 4096, 64):
        for k in (128, 896, 1152, 3584, 12288):
            config = choose(op, n, k, bucket)
            assert config is not None
            assert n % config.block_n == 0
            assert config.fits(op, n, k)
            if isinstance(config, Ring):
                assert k % (config.split_k * config.block_k) == 0


def test_a_near_shape_gets_its_neighbours_winner() -> None:
    """Qwen3-8B's MLP is Llama's but for its width."""
    for bucket in BUCKETS:
        assert choose("gate_up", 12288, 4096, bucket) == TABLE["gate_up", 14336, 4096][bucket]
        assert choose("down", 4096, 12288, bucket) == TABLE["down", 4096, 14336][bucket]


def test_odd_shapes_get_nothing() -> None:
    assert choose("qkv", 4096, 1000, 16) is None
    assert choose("head", 50257, 4096, 64) is None
    assert choose("o", 4095, 4096, 1) is None


def test_plain_configurations_fit_on_chip() -> None:
    for configs in PLAIN.values():
        assert all(
            config.fits(op, 128, 128) for config in configs for op in ("qkv", "gate_up") if config.block_k <= 128
        )


def test_buckets() -> None:
    assert [bucket_for(rows) for rows in (1, 2, 16, 17, 33, 64, 65, 128)] == [1, 16, 16, 32, 64, 64, 128, 128]


def test_splits() -> None:
    assert choose_splits(1, 8, 190) == 4
    assert choose_splits(1, 8, 1024) == MAX_SPLITS
    assert choose_splits(8, 8, 190) == 1
    assert choose_splits(8, 8, 1024) == 2
    assert choose_splits(64, 8, 1024) == 1
    assert choose_splits(64, 8, 1 << 17) == 4, "one long row among many short ones must not take the whole step's time"
    for rows in range(1, MAX_ROWS + 1):
        for length in (1, 256, 257, 4096, 1 << 20):
            splits = choose_splits(rows, 8, length)
            assert 1 <= splits <= MAX_SPLITS
            assert splits & (splits - 1) == 0
            assert 2 <= choose_stages(rows, length) <= 4


def test_supported_decoders() -> None:
    assert obstacle(LLAMA, HOPPER) is None
    qwen3 = replace(LLAMA, hidden_size=1024, intermediate_size=3072, attention=(replace(SPEC, num_heads=16),))
    assert obstacle(qwen3, HOPPER) is None
    mixture = replace(LLAMA, hidden_size=2048, intermediate_size=0, experts=(128, 8, 768))
    assert obstacle(mixture, HOPPER) is None
    heads = replace(SPEC, num_heads=64, head_dim=64)
    gpt_oss = replace(mixture, hidden_size=2880, experts=(32, 4, 2880), attention=(heads,), rotary_dim=64)
    assert obstacle(gpt_oss, HOPPER) is None


def test_a_gpt_oss_has_nothing_that_the_kernels_do_not_know() -> None:
    raw = {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 128, "hidden_size": 64,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 7.0, "eos_token_id": 2,
    }  # fmt: skip
    model = build_model(normalize_config(raw), dtype=torch.bfloat16, device=torch.device("meta"))
    weights = model.weights()
    assert all(block.sink_h is not None and block.mlp.router_bias_e is not None for block in weights.blocks)
    assert FAMILY.block(normalize_config(raw), 1).extras() == ()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"dtype": torch.float16}, "bfloat16"),
        ({"is_dense": False}, "bfloat16"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rotary_dim": 64}, "64 rotated"),
        ({"hidden_size": 4000}, "4000"),
        ({"attention": (replace(SPEC, soft_cap=30.0),)}, "soft cap"),
        ({"attention": (replace(SPEC, num_kv_heads=1),)}, "16 query heads"),
        ({"attention": (SPEC, replace(SPEC, num_kv_heads=4))}, "equal heads"),
        ({"attention": (replace(SPEC, head_dim=256),), "rotary_dim": 256}, "256"),
        ({"experts": (128, 8, 750)}, "128 experts of 4096 x 750"),
        ({"experts": (512, 8, 768)}, "512 experts"),
        ({"extras": ("norms over all heads",)}, "norms over all heads"),
    ],
)
def test_obstacles(changes: dict[str, Any], word: str) -> None:
    reason = obstacle(replace(LLAMA, **changes), HOPPER)
    assert reason is not None
    assert word in reason


@pytest.mark.parametrize("device", [DeviceTraits("cpu"), DeviceTraits("cuda", (8, 0)), DeviceTraits("cuda", (10, 0))])
def test_other_devices(device: DeviceTraits) -> None:
    assert "Hopper" in str(obstacle(LLAMA, device))


def test_asking_for_fused_kernels_where_they_cannot_run() -> None:
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }
    config, cpu = normalize_config(raw), torch.device("cpu")
    with pytest.raises(ModelError, match=r"--decode-kernels fused.*Hopper"):
        build_model(config, dtype=torch.bfloat16, device=cpu, decode_kernels="fused")
    gpt2 = "GPT2LMHeadModel"
    other = replace(config, architecture=gpt2, raw=raw | {"architectures": [gpt2], "model_type": "gpt2"})
    with pytest.raises(ModelError, match=r"--decode-kernels fused.*GPT2LMHeadModel"):
        build_model(other, dtype=torch.bfloat16, device=cpu, decode_kernels="fused")


@pytest.mark.parametrize(
    ("backend", "asked", "resolved"),
    [
        ("auto", "auto", "auto"),
        ("reference", "auto", "plain"),
        ("reference", "fused", "fused"),
        ("auto", "plain", "plain"),
    ],
)
def test_naming_another_attention_backend_turns_them_off(backend: str, asked: str, resolved: str) -> None:
    device = DeviceFacts(
        kind="cuda", name="H200", total_bytes=1 << 37, free_bytes=1 << 37, num_cores=8, has_bfloat16=True
    )
    config = make_engine_config({"attention_backend": backend, "decode_kernels": asked})
    assert resolve_config(config, device, 8192).execution.decode_kernels == resolved


def test_a_cpu_has_none() -> None:
    with pytest.raises(ConfigError, match="--decode-kernels fused needs a CUDA device: use auto here"):
        resolve_config(make_engine_config({"decode_kernels": "fused"}), cpu_facts(), 8192)
