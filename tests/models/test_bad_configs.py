"""Senseless config.json files of every native family: one clear error before loading, never another exception."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from tiny_models import CASES, CONFIG_CLASSES, NATIVE_PREFIXES, SMALL

from octavo.errors import ModelError
from octavo.models import registry
from octavo.models.registry import build_model

META = torch.device("meta")
SENSELESS = (None, "x", -1, 0, [], {}, [1, 2], True, 1.5, {"a": 1})
FIELDS = 10
"""That are made senseless of each config, one at a time; others every time that `CASES` grows."""
NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def raw_config(case: str) -> dict[str, Any]:
    prefix, changes = CASES[case]
    raw: dict[str, Any] = getattr(transformers, CONFIG_CLASSES.get(prefix, f"{prefix}Config"))(
        **{**SMALL, **changes}
    ).to_dict()
    return raw | {"architectures": [f"{prefix}ForCausalLM"]}


def build(raw: dict[str, Any]) -> None:
    """ModelError, or nothing; models that Transformers would have to run are left alone."""
    if registry.is_native(raw):
        build_model(registry.read_config(raw), dtype=torch.float32, device=META)


def refusal(raw: dict[str, Any]) -> str:
    """What is said of it; empty: it can be built."""
    try:
        build(raw)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", [case for case, (prefix, _) in CASES.items() if prefix in NATIVE_PREFIXES])
def test_a_senseless_field(case: str) -> None:
    raw, chance = raw_config(case), random.Random(f"{case} {len(CASES)}")
    build(raw)
    for name in chance.sample(sorted(raw.keys() - {"architectures"}), FIELDS):
        value = chance.choice(SENSELESS)
        assert "\n" not in refusal({**raw, name: value}), (name, value)


@pytest.mark.parametrize("case", ["llama", "gpt-oss", "deepseek-v3", "gemma3", "granite-moe"])
@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_field_is_named(case: str, name: str) -> None:
    raw = raw_config(case)
    del raw[name]
    with pytest.raises(ModelError, match=f"has no {name}"):
        build(raw)


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        ("deepseek-v3", {"n_group": 3}, "8 experts in n_group 3"),
        ("deepseek-v3", {"n_group": 8, "topk_group": 4}, "they don't divide so"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ("qwen3-moe", {"num_experts_per_tok": 9}, "more than there are experts"),
        ("llama4", {"no_rope_layers": [1]}, "not a list of 3 numbers"),
        ("llama", {"layer_types": ["linear_attention"] * 3}, "layers of type linear_attention"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, r"quantized \(awq\)"),
        ("llama", {"quantization_config": {"quant_method": "mxfp4"}}, r"quantized \(mxfp4\)"),
        ("granite", {"logits_scaling": 0}, "logits_scaling is 0"),
    ],
)
def test_refused(case: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        build(raw_config(case) | changes)


@pytest.mark.parametrize("case", ["qwen3-next", "falcon-h1"])
def test_what_has_no_batch_invariant_form(case: str) -> None:
    config = registry.read_config(raw_config(case))
    with pytest.raises(ModelError, match="--deterministic can't run"):
        build_model(config, dtype=torch.bfloat16, device=META, deterministic=True)
