"""NU-03, NU-04, NU-06: position scaling, windows and odd shapes, through the whole engine against Transformers.

Every model is tiny and random; what is compared are the log probabilities of a prompt's own tokens and greedy tokens.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, ModelError

BASE = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.3,
}
OPTIONS: dict[str, Any] = {"dtype": "float32", "cpu_threads": 1, "block_size": 16, "overlap_depth": 1}


def save(folder: Path, config: Any) -> Path:
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def change_config(folder: Path, **fields: Any) -> None:
    """Other words in config.json; None takes a field out."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def ids_of(count: int, seed: int = 3, vocab_size: int = 160) -> list[int]:
    return random.Random(seed).choices(range(vocab_size), k=count)


@torch.inference_mode()
def expected(folder: Path, prompt: list[int], num_tokens: int) -> tuple[torch.Tensor, list[int]]:
    """Log probabilities of the prompt's tokens but the first, and greedy tokens, by Transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    logprobs_tv = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    targets_t = torch.tensor(prompt[1:])
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return logprobs_tv[:-1].gather(1, targets_t[:, None])[:, 0], ids[len(prompt) :]


def found(llm: LLM, prompt: list[int], num_tokens: int) -> tuple[torch.Tensor, list[int]]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, prompt_logprobs=0, ignore_eos=True)
    [output] = llm.generate([prompt], params)
    assert output.prompt_logprobs is not None
    rows = [row[token].logprob for row, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True) if row]
    return torch.tensor(rows), output.outputs[0].token_ids


def check(llm: LLM, folder: Path, prompt: list[int], *, num_tokens: int = 8, atol: float = 1e-3) -> None:
    wanted, got = expected(folder, prompt, num_tokens), found(llm, prompt, num_tokens)
    torch.testing.assert_close(got[0], wanted[0], atol=atol, rtol=0)
    assert got[1] == wanted[1]


LLAMA_3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 2048}
YARN = {"factor": 4.0, "original_max_position_embeddings": 2048}
SCALINGS: dict[str, tuple[dict[str, Any], int]] = {
    "llama3": ({"rope_type": "llama3", **LLAMA_3}, 16384),
    "yarn": ({"rope_type": "yarn", **YARN}, 8192),
    "linear": ({"rope_type": "linear", "factor": 2.0}, 4096),
}
SPELLINGS = ("rope_parameters", "rope_scaling", "type", "theta outside")


@pytest.mark.parametrize("kind", SCALINGS)
def test_nu03_scaled_positions(tmp_path: Path, kind: str) -> None:
    """2,200 tokens, beyond the original length; every spelling of the same thing gives the same."""
    rope, max_length = SCALINGS[kind]
    config = LlamaConfig(
        **{**BASE, "max_position_embeddings": max_length}, rope_parameters={**rope, "rope_theta": 5000.0}
    )
    folder = save(tmp_path, config)
    prompt = ids_of(2200)
    wanted = expected(folder, prompt, 1)
    for spelling in SPELLINGS:
        if spelling == "rope_scaling":
            change_config(folder, rope_parameters=None, rope_scaling=rope, rope_theta=5000.0)
        elif spelling == "type":
            old = {("type" if name == "rope_type" else name): value for name, value in rope.items()}
            change_config(folder, rope_scaling=old)
        elif spelling == "theta outside":
            change_config(folder, rope_scaling=None, rope_parameters=rope, rope_theta=5000.0)
        with LLM(str(folder), **OPTIONS, max_model_len=2208) as llm:
            got = found(llm, prompt, 1)
        torch.testing.assert_close(got[0], wanted[0], atol=1e-3, rtol=0)
        assert got[1] == wanted[1], spelling
    change_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, rope_theta=None)
    assert (expected(folder, prompt, 0)[0] - wanted[0]).abs().max() > 0.1, "scaling matters to this model"


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "spiral", "factor": 2.0, "rope_theta": 1e4}, "spiral"),
        ({"rope_type": "linear", "rope_theta": 1e4}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4}, "low_freq_factor"),
        (
            {"rope_type": "llama3", **LLAMA_3, "original_max_position_embeddings": None},
            "original_max_position_embeddings",
        ),
        ({"rope_type": "longrope", "factor": 8.0, "rope_theta": 1e4}, "short_factor"),
    ],
)
def test_nu03_what_is_unknown_is_named(tmp_path: Path, rope: dict[str, Any], named: str) -> None:
    folder = save(tmp_path, LlamaConfig(**BASE))
    change_config(folder, rope_parameters=rope)
    with pytest.raises(ModelError, match=named):
        LLM(str(folder), **OPTIONS)


WINDOWED: dict[str, Any] = {
    "all layers": MistralConfig(**BASE, sliding_window=32),
    "every other layer": Qwen2Config(**BASE, use_sliding_window=True, sliding_window=32, max_window_layers=1),
    "switched off": Qwen2Config(**BASE, use_sliding_window=False, sliding_window=4, max_window_layers=0),
}


@pytest.mark.parametrize("runner", ["torch", "auto"])
@pytest.mark.parametrize("kind", WINDOWED)
def test_nu04_windows(tmp_path: Path, kind: str, runner: str) -> None:
    """Around the window's length, cut into chunks, and again with blocks of the cache."""
    folder = save(tmp_path, WINDOWED[kind])
    for chunk in (16, 40):
        options = {**OPTIONS, "runner": runner, "max_num_seqs": 4, "num_gpu_blocks_override": 24}
        with LLM(str(folder), **options, max_model_len=160, max_num_batched_tokens=chunk) as llm:
            for length in (31, 32, 33, 47, 64, 100):
                prompt = ids_of(length, seed=length)
                check(llm, folder, prompt, num_tokens=4, atol=1e-4)
                params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
                [first], [again] = (llm.generate([prompt], params) for _ in range(2))
                assert first.outputs[0].token_ids == again.outputs[0].token_ids == expected(folder, prompt, 4)[1]
                assert again.num_cached_tokens >= (length - 1) // 16 * 16


def shape(heads: int, kv_heads: int, head_dim: int, **fields: Any) -> dict[str, Any]:
    own = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "num_hidden_layers": 1}
    return {**BASE, "hidden_size": heads * head_dim, **own, **fields}


SHAPES = [
    shape(9, 3, 40),
    shape(5, 1, 64),
    shape(7, 7, 80, rms_norm_eps=1e-6),
    shape(6, 2, 96, attention_bias=True, mlp_bias=True),
    shape(32, 4, 100, hidden_size=64),
    shape(3, 1, 112, vocab_size=101),
    shape(2, 1, 120, hidden_size=90),
    shape(2, 2, 192, vocab_size=50257),
    shape(2, 1, 256),
    shape(3, 3, 48, hidden_size=96),
]


@pytest.mark.parametrize("runner", ["torch", "auto"])
@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_nu06_odd_shapes(tmp_path: Path, number: int, runner: str) -> None:
    """Five prompts at once, each as it is alone with Transformers; or a refusal that names the shape."""
    fields = SHAPES[number]
    folder = save(tmp_path, LlamaConfig(**fields))
    prompts = [ids_of(length, seed=length, vocab_size=fields["vocab_size"]) for length in (40, 7, 33, 16, 1)]
    params = SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=0, ignore_eos=True)
    with LLM(str(folder), **OPTIONS, runner=runner, max_model_len=64) as llm:
        outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        logprobs_t, tokens = expected(folder, prompt, 6)
        assert output.outputs[0].token_ids == tokens
        rows = (output.prompt_logprobs or [])[1:]
        got = [row[token].logprob for row, token in zip(rows, prompt[1:], strict=True) if row]
        torch.testing.assert_close(torch.tensor(got), logprobs_t, atol=1e-3, rtol=0)


def test_nu06_workers_must_divide_heads(tmp_path: Path) -> None:
    folder = save(tmp_path, LlamaConfig(**shape(9, 3, 16)))
    with pytest.raises((ModelError, ConfigError), match=r"tensor.parallel.size"):
        LLM(str(folder), **OPTIONS, tensor_parallel_size=2)
