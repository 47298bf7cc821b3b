"""Strict loading: what a checkpoint may lack, may carry, and what is refused by name. Dummy weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from paged_driver import PagedDriver
from tiny_models import load, make_reference, read_config, read_tensors, save
from torch import Tensor, nn

from octavo.errors import ModelError
from octavo.layers.norm import RMSNorm
from octavo.models.base import CausalLM
from octavo.models.registry import build_model
from octavo.models.weights import init_dummy_weights

IDS = list(range(10, 40))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    cases = ("llama", "llama-tied", "gpt2", "gpt-neox", "qwen3", "gemma2")
    return {case: save(make_reference(case), tmp_path_factory.mktemp(case)) for case in cases}


def empty(folder: Path) -> CausalLM:
    return build_model(read_config(folder), dtype=torch.float32, device=torch.device("cpu"))


def refusal(model: CausalLM, tensors: dict[str, Tensor]) -> str:
    with pytest.raises(ModelError) as caught:
        model.load_weights(tensors.items())
    return str(caught.value)


@pytest.mark.parametrize("case", ["llama", "gpt-neox"])
def test_problems_are_named(folders: dict[str, Path], case: str) -> None:
    model, tensors = empty(folders[case]), dict(read_tensors(folders[case]))
    missing, misshaped, quantized = [name for name in tensors if name.endswith("weight")][1:4]
    del tensors[missing]
    tensors[misshaped] = torch.zeros(3, 5)
    tensors[quantized] = torch.zeros(tensors[quantized].shape, dtype=torch.int8)
    tensors |= {f"stranger.{i}": torch.zeros(1) for i in range(7)}
    message = refusal(model, tensors)
    assert "1 tensor missing" in message
    assert "7 tensors unexpected (stranger.0, stranger.1, stranger.2, stranger.3, stranger.4, …)" in message
    assert "2 tensors of a wrong shape or type" in message
    assert "torch.float32 [3, 5], not [" in message
    assert "is torch.int8" in message


def test_another_vocabulary_is_named(tmp_path: Path) -> None:
    folder = save(make_reference("llama"), tmp_path)
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight is torch\.float32 \[101, 64\], not \[103, 64\]"):
        load(folder, vocab_size=103)


@pytest.mark.parametrize(("case", "merged_router"), [("qwen3-moe", "mlp.gate"), ("mixtral", "mlp.gate")])
def test_experts_in_one_tensor(tmp_path: Path, case: str, merged_router: str) -> None:
    """Transformers 5 keeps all experts of a kind in one parameter; checkpoints may have its names."""
    reference = make_reference(case)
    folder = save(reference, tmp_path)
    merged = dict(reference.state_dict())
    assert "model.layers.0.mlp.experts.gate_up_proj" in merged
    assert f"model.layers.0.{merged_router}.weight" in merged
    single = dict(read_tensors(folder))
    assert not any("gate_up_proj" in name for name in single)
    models = []
    for tensors in (single, merged):
        model = empty(folder)
        model.load_weights(tensors.items())
        assert isinstance(model, nn.Module)
        models.append(model)
    for first, second in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(first, second)


def test_experts_are_missed_and_checked_by_name(tmp_path: Path) -> None:
    folder = save(make_reference("qwen3-moe"), tmp_path)
    tensors = dict(read_tensors(folder))
    tensors["model.layers.1.mlp.experts.5.down_proj.weight"] = torch.zeros(32, 64)
    del tensors["model.layers.2.mlp.experts.7.up_proj.weight"]
    message = refusal(empty(folder), tensors)
    assert "1 tensor missing (model.layers.2.mlp.experts.7.up_proj.weight)" in message
    assert "model.layers.1.mlp.experts.5.down_proj.weight is torch.float32 [32, 64], not [64, 32]" in message


def test_untied_head_is_not_guessed(folders: dict[str, Path]) -> None:
    tensors = dict(read_tensors(folders["llama-tied"]))
    model = build_model(
        read_config(folders["llama-tied"], tie_word_embeddings=False), dtype=torch.float32, device=torch.device("cpu")
    )
    assert "1 tensor missing (lm_head.weight)" in refusal(model, tensors)


@pytest.mark.parametrize(
    ("case", "head", "embedding"),
    [
        ("llama-tied", "lm_head.weight", "model.embed_tokens.weight"),
        ("gpt2", "lm_head.weight", "transformer.wte.weight"),
    ],
)
def test_tied_head_in_the_checkpoint(folders: dict[str, Path], case: str, head: str, embedding: str) -> None:
    model, tensors = empty(folders[case]), dict(read_tensors(folders[case]))
    assert head not in tensors
    model.load_weights({head: tensors[embedding].clone(), **tensors}.items())
    expected = PagedDriver(load(folders[case])).step([(0, IDS)])
    torch.testing.assert_close(PagedDriver(model).step([(0, IDS)]), expected)
    message = refusal(model, {**tensors, head: tensors[embedding] + 1})
    assert f"ties {head} to {embedding}" in message


def test_old_checkpoints(folders: dict[str, Path]) -> None:
    """GPT-2 without the decoder's prefix and with mask buffers, GPT-NeoX with mask buffers, Llama with frequencies."""
    gpt2 = {name.removeprefix("transformer."): x for name, x in read_tensors(folders["gpt2"])}
    assert "h.0.attn.c_attn.weight" in gpt2
    model = empty(folders["gpt2"])
    model.load_weights(
        {**gpt2, "h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.0.attn.masked_bias": torch.ones(())}.items()
    )
    expected = PagedDriver(load(folders["gpt2"])).step([(0, IDS)])
    torch.testing.assert_close(PagedDriver(model).step([(0, IDS)]), expected)

    neox = dict(read_tensors(folders["gpt-neox"]))
    mask = {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool)}
    empty(folders["gpt-neox"]).load_weights({**neox, **mask}.items())

    llama = dict(read_tensors(folders["llama"]))
    frequencies = {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    empty(folders["llama"]).load_weights({**llama, **frequencies}.items())


@pytest.mark.parametrize("case", ["llama", "llama-tied", "qwen3", "gpt2", "gemma2"])
def test_dummy_weights(folders: dict[str, Path], case: str) -> None:
    def logits(seed: int) -> Tensor:
        model = empty(folders[case])
        init_dummy_weights(model, seed)
        assert isinstance(model, nn.Module)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and name.endswith("weight"):
                assert (parameter == 1).all(), name
            else:
                assert 0.01 < parameter.std() < 0.03, name
        return PagedDriver(model).step([(0, IDS)])

    first = logits(1)
    assert first.isfinite().all()
    assert first.std() > 0
    assert torch.equal(first, logits(1))
    assert not torch.allclose(first, logits(2))


@pytest.mark.parametrize("case", ["qwen3", "gemma2"])
def test_bfloat16(folders: dict[str, Path], case: str) -> None:
    model = load(folders[case], torch.bfloat16)
    assert isinstance(model, nn.Module)
    shifted = {module.weight for module in model.modules() if isinstance(module, RMSNorm) and module.shift}
    assert {parameter.dtype for parameter in set(model.parameters()) - shifted} == {torch.bfloat16}
    assert bool(shifted) == (case == "gemma2")
    found = PagedDriver(model, dtype=torch.bfloat16).step([(0, IDS)])
    exact = PagedDriver(load(folders[case])).step([(0, IDS)])
    assert found.dtype == torch.float32
    divergence = nn.functional.kl_div(found.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="none")
    assert 0 < divergence.sum(-1).mean() < 1e-2
