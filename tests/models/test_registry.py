"""What is built for a config, how big it is, that it never waits for the device, and what is refused before loading."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from paged_driver import PagedDriver
from tiny_models import GPT2_SMALL, LONG_ROPE, SMALL, load, make_reference, read_config, save
from torch import Tensor, nn

from octavo.attention.base import AttentionSpec, ForwardContext
from octavo.errors import ModelError
from octavo.models import registry
from octavo.models.base import CausalLM
from octavo.models.config import NormalConfig
from octavo.models.registry import as_attended, build_model, footprint

META, CPU = torch.device("meta"), torch.device("cpu")


def config_of(prefix: str, **changes: Any) -> NormalConfig:
    """The config of a tiny model, without weights."""
    base = GPT2_SMALL if prefix == "GPT2" else SMALL
    raw = getattr(transformers, f"{prefix}Config")(**{**base, **changes}).to_dict()
    architecture = {"GPT2": "GPT2LMHeadModel", "T5": "T5ForConditionalGeneration"}.get(prefix, f"{prefix}ForCausalLM")
    return registry.read_config({**raw, "architectures": [architecture]})


@pytest.mark.parametrize(
    "prefix", ["Llama", "Qwen3", "GPT2", "Gemma2", "Phi3", "Olmo2", "Cohere2", "StableLm", "Qwen2Moe"]
)
@pytest.mark.parametrize("tied", [True, False])
def test_weight_bytes_are_exact(prefix: str, tied: bool) -> None:
    config = replace(config_of(prefix, tie_word_embeddings=tied), tie_word_embeddings=tied)
    model = build_model(config, dtype=torch.bfloat16, device=CPU)
    assert isinstance(model, nn.Module)
    storages = {x.data_ptr(): x.nbytes for x in (*model.parameters(), *model.buffers())}
    assert footprint(config, torch.bfloat16).weight_bytes == sum(storages.values())
    assert footprint(config, torch.float32).weight_bytes > footprint(config, torch.bfloat16).weight_bytes


def test_weight_bytes_of_llama_8b() -> None:
    """The published parameter count, at two bytes, and the rotary table."""
    config = config_of(
        "Llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    assert footprint(config, torch.bfloat16, max_model_len=1000).weight_bytes == 2 * 8_030_261_248 + 1000 * 128 * 4


def test_the_memory_plan_goes_by_what_attention_is_given() -> None:
    """Heads and windows of a Transformers class, which its config names in other ways."""
    sizes = {"qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20, "kv_lora_rank": 32, "q_lora_rank": None}
    config = config_of("MiniCPM3", **sizes, num_key_value_heads=4)
    attended = as_attended(config, footprint(config, torch.bfloat16).attention_specs)
    assert (attended.num_heads, attended.num_kv_heads, attended.head_dim) == (4, 4, 40)
    config = config_of("Gemma2", head_dim=24, sliding_window=6)
    assert as_attended(config, footprint(config, torch.bfloat16).attention_specs) == config
    rows = config_of("Bloom")
    assert as_attended(rows, footprint(rows, torch.bfloat16).attention_specs) is rows


def test_experts_without_kernels_can_not_be_captured() -> None:
    def is_capturable(inner: int, act: str) -> bool:
        config = config_of("Mixtral", hidden_size=128, intermediate_size=inner, num_local_experts=4, hidden_act=act)
        return footprint(config, torch.bfloat16).is_capturable

    assert is_capturable(128, "silu")
    assert is_capturable(128, "gelu")
    assert not is_capturable(120, "silu"), "no multiple of 16"


class NoAttention:
    """Returns memory of the right shape, wherever the tensors are."""

    def prepare(self, ctx: ForwardContext) -> None:
        """Nothing."""

    def attend(self, spec: AttentionSpec, q_thd: Tensor, *tensors: Tensor | ForwardContext | None) -> Tensor:
        """See `AttentionBackend.attend`."""
        return torch.empty_like(q_thd)


@pytest.mark.parametrize("prefix", ["Llama", "Mistral", "Qwen2", "Qwen3", "GPT2", "GPTNeoX", "Phi3", "Gemma2", "Olmo2"])
def test_a_step_never_reads_the_device(prefix: str) -> None:
    """Meta tensors have no values: any read of one on the host raises."""
    model: CausalLM = build_model(config_of(prefix), dtype=torch.bfloat16, device=META)
    model.set_attention_backend(NoAttention())
    ctx = PagedDriver(model, backend=NoAttention()).context([(0, [5]), (1, [3, 4])])[0]
    token_id_t = torch.empty(3, dtype=torch.int32, device=META)
    hidden_tm = model.forward(token_id_t, torch.empty(3, dtype=torch.int64, device=META), ctx)
    assert hidden_tm.shape == (3, 64)
    logits_sv = model.logits(hidden_tm[:2])
    assert logits_sv.shape == (2, model.vocab_size)
    assert logits_sv.dtype == torch.float32


def test_specs_of_routed_attention() -> None:
    """What GPT-2 and Gemma 2 ask of attention, read from their calls."""
    gpt2 = build_model(config_of("GPT2", scale_attn_by_inverse_layer_idx=True), dtype=torch.float32, device=META)
    assert gpt2.attention_specs == [AttentionSpec(i, 4, 4, 16, scale=0.25 / (i + 1)) for i in range(3)]
    config = config_of("Gemma2", head_dim=24, sliding_window=6, query_pre_attn_scalar=16, attn_logit_softcapping=9.0)
    gemma = build_model(config, dtype=torch.float32, device=META)
    assert gemma.attention_specs == [
        AttentionSpec(i, 4, 2, 24, scale=0.25, window=window, soft_cap=9.0) for i, window in enumerate((6, 0, 6))
    ]


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("llama-dynamic", {}),
        ("phi3-longrope", {"max_position_embeddings": 512, "rope_parameters": {**LONG_ROPE, "factor": 4.0}}),
    ],
)
def test_longer_than_trained(case: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Length-dependent rotary types: a sequence of exactly the served length, in chunks."""
    reference = make_reference(case)
    folder = save(reference, tmp_path)
    length = 150
    config = read_config(folder, **changes)
    reference = type(reference).from_pretrained(folder, attn_implementation="eager", **changes).eval()
    model = build_model(config, dtype=torch.float32, device=CPU, max_model_len=length)
    donor = load(folder)
    assert isinstance(model, nn.Module)
    assert isinstance(donor, nn.Module)
    model.load_state_dict(donor.state_dict())
    ids = torch.randint(3, 101, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    driver = PagedDriver(model, max_len=160)
    found = torch.cat([driver.step([(0, ids[:70])]), driver.step([(0, ids[70:])])])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert not torch.allclose(PagedDriver(donor, max_len=128).step([(0, ids[:128])]), expected[:128], atol=1e-2)


REFUSED: dict[str, tuple[dict[str, Any] | tuple[str, dict[str, Any]], str]] = {
    "encoder-decoder": (("T5", {}), "encoder-decoder"),
    "unknown architecture": ({"architectures": ["NovelForCausalLM"], "model_type": "novel"}, "NovelForCausalLM"),
    "custom code": (
        {"architectures": ["NovelForCausalLM"], "model_type": "novel", "auto_map": {"AutoModelForCausalLM": "x.Y"}},
        "its own code",
    ),
    "not a causal LM": ({"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"}, "not a decoder"),
    "bidirectional": (("Bert", {}), "attends to later tokens"),
    "unknown rope type": (
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_parameters": {"rope_type": "spiral"}},
        "rope type 'spiral'",
    ),
    "wavelengths of another size": (("Llama", {"head_dim": 32, "rope_parameters": LONG_ROPE}), "short_factor has 8"),
    "unknown activation": (("Llama", {"hidden_act": "tanh"}), "hidden_act 'tanh'"),
}
"""What -> (config.json fields, or a Transformers class and its fields; part of the message)."""


def test_native_models_do_without_transformers() -> None:
    """Importing it takes seconds."""
    program = (
        "import sys, torch; from octavo.models.config import normalize_config; from octavo.models import registry\n"
        "raw = dict(architectures=['LlamaForCausalLM'], model_type='llama', hidden_size=8, num_attention_heads=2,\n"
        "    num_hidden_layers=1, vocab_size=9, intermediate_size=8)\n"
        "registry.build_model(normalize_config(raw), dtype=torch.float32, device=torch.device('cpu'))\n"
        "print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"


ROW_BY_ROW: dict[str, tuple[str, dict[str, Any], str]] = {
    "attention not routed": ("Bloom", {}, "0 of 3 layers"),
    "attention by a table of classes": ("Falcon", {"alibi": True}, "its attention can't be replaced"),
    "bias on scores": ("Mpt", {"n_layers": 3, "n_heads": 4, "d_model": 64}, "MptForCausalLM"),
    "state space": ("Mamba", {}, "convolutions over tokens"),
}
"""What keeps a model from running on packed rows -> (a Transformers class and its fields; part of the message)."""


@pytest.mark.parametrize("what", ROW_BY_ROW)
def test_the_rest_runs_row_by_row_and_says_why(what: str, caplog: pytest.LogCaptureFixture) -> None:
    name, changes, message = ROW_BY_ROW[what]
    raw = getattr(transformers, f"{name}Config")(**{**SMALL, **changes}).to_dict()
    raw["architectures"] = [f"{name}ForCausalLM"]
    model = build_model(registry.read_config(raw), dtype=torch.float32, device=CPU)
    assert type(model).__name__ == "TransformersRows"
    assert re.search(message, caplog.text)


@pytest.mark.parametrize("what", REFUSED)
def test_refused_before_loading(what: str) -> None:
    case, message = REFUSED[what]
    if isinstance(case, tuple):
        raw = getattr(transformers, f"{case[0]}Config")(**{**SMALL, **case[1]}).to_dict()
        names = {"T5": "T5ForConditionalGeneration", "Bert": "BertLMHeadModel"}
        raw["architectures"] = [names.get(case[0], f"{case[0]}ForCausalLM")]
    else:
        raw = {**SMALL, **case}
    with pytest.raises(ModelError, match=message):
        build_model(registry.read_config(raw), dtype=torch.float32, device=META)
