"""Mamba 2 from states in blocks: Transformers' logits and tokens, cut anywhere, from prefixes, and when pushed out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fp8_checkpoints import keep_on_device, read, write
from tiny_models import read_config, read_tensors

from octavo import LLM, SamplingParams
from octavo.kernels.reference.quantize_rows import FP8, dequantize_rows
from octavo.layers.quant.methods import fits
from octavo.models.mamba2 import Mamba2
from octavo.models.registry import build_model, with_wide_ends
from octavo.models.weights import linears_of

CPU, META = torch.device("cpu"), torch.device("meta")

OPTIONS: dict[str, Any] = {
    "runner": "torch",
    "device": "cpu",
    "dtype": "float32",
    "block_size": 8,
    "num_gpu_blocks_override": 64,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "max_model_len": 160,
    "cpu_threads": 1,
}
PROMPTS = [[5 + (i * i) % 90 for i in range(count)] for count in (1, 40, 71, 17, 2)]
COUNT = 24


@pytest.fixture(scope="module")
def reference() -> Any:
    config = transformers.Mamba2Config(
        vocab_size=101, hidden_size=32, num_hidden_layers=3, num_heads=8, head_dim=8, state_size=16, n_groups=2,
        conv_kernel=4, chunk_size=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.Mamba2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.3)
            elif not name.endswith("A_log"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def folder(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mamba2")
    reference.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def wanted(reference: Any) -> list[list[int]]:
    """Greedy tokens, each from the whole sequence."""
    found = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(COUNT):
                logits = reference(torch.tensor([tokens]), use_cache=False).logits
                tokens.append(int(logits[0, -1].argmax()))
        found.append(tokens[len(prompt) :])
    return found


def run(llm: LLM, **params: Any) -> list[list[int]]:
    values = {"max_tokens": COUNT, "temperature": 0.0, "ignore_eos": True, "detokenize": False, **params}
    outputs = llm.generate(PROMPTS, SamplingParams(**values))
    return [completion.token_ids for output in outputs for completion in output.outputs]


@pytest.mark.parametrize(
    "changes",
    [{}, {"max_num_batched_tokens": 7}, {"block_size": 5, "overlap_depth": 2}, {"num_gpu_blocks_override": 8}],
    ids=["plain", "cut", "overlapped", "starved"],
)
def test_tokens_are_those_of_transformers(folder: Path, wanted: list[list[int]], changes: dict[str, Any]) -> None:
    with LLM(str(folder), **{**OPTIONS, **changes}) as llm:
        assert run(llm) == wanted
        before = llm.stats()
        assert run(llm) == wanted
        stats = llm.stats()
        if "num_gpu_blocks_override" not in changes:
            assert stats["prefix_hit_tokens"] - before["prefix_hit_tokens"] >= 100
        else:
            assert stats["num_preemptions"] > 0
        assert stats["num_free_blocks"] == stats["num_blocks"]


def test_siblings_and_logprobs(folder: Path, reference: Any) -> None:
    with LLM(str(folder), **OPTIONS) as llm:
        sampled = {"n": 3, "temperature": 0.8, "seed": 5}
        assert run(llm, **sampled) == run(llm, **sampled)
        prompt = PROMPTS[2]
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0, detokenize=False)
        (output,) = llm.generate([prompt], params)
    with torch.no_grad():
        expected = reference(torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None
    for position, entries in enumerate(output.prompt_logprobs[1:]):
        token = prompt[position + 1]
        assert entries is not None
        assert abs(entries[token].logprob - float(expected[position, token])) < 1e-3


def test_products_are_rounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they load, or as a checkpoint has them; the first layers' stay wide if asked for."""
    keep_on_device(monkeypatch)
    config = read_config(folder)
    exact, model = (build_model(config, dtype=torch.float32, device=CPU, quantization=kind) for kind in ("none", "fp8"))
    for each in (exact, model):
        assert isinstance(each, Mamba2)
        each.load_weights(read_tensors(folder))
    for wide, layer in zip(linears_of(exact), linears_of(model), strict=True):
        if fits(layer):
            assert layer.weight.dtype == FP8
            assert layer.weight_scale is not None
            error = (dequantize_rows(layer.weight, layer.weight_scale) - wide.weight).norm()
            assert 0.01 * wide.weight.norm() < error < 0.035 * wide.weight.norm()
        else:
            assert torch.equal(layer.weight, wide.weight)
    assert sum(layer.weight.dtype == FP8 for layer in linears_of(model)) >= 3
    ends = build_model(with_wide_ends(config, (1, 0), (0, 0)), dtype=torch.bfloat16, device=META, quantization="fp8")
    assert isinstance(ends, Mamba2)
    kept = [[layer.weight.dtype == FP8 for layer in linears_of(block)] for block in ends.layers()]
    assert not any(kept[0])
    assert all(any(block) for block in kept[1:])
    made = write(folder, folder.parent / f"{folder.name}-fp8", "ct-channel", ignored=("lm_head",))
    stored = read(made.folder, "fp8")
    assert isinstance(stored, Mamba2)
    for block, layers in enumerate(stored.layers()):
        for layer in linears_of(layers):
            if layer.weight_scale is not None:
                (name,) = layer.shards
                found = dequantize_rows(layer.weight, layer.weight_scale)
                assert torch.equal(found, made.tensors[f"backbone.layers.{block}.{name}.weight"])
