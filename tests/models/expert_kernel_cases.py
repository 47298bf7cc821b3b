"""Mixtures of experts of whole models by the kernels, in Triton's interpreter: experts without gates, and gated ones
with another activation than silu. Run by test_expert_kernels.py in a process of its own."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from paged_driver import PagedDriver
from tiny_models import CASES, SMALL, load, make_reference, save

sys.path.insert(0, str(Path(__file__).parent / "architectures"))

from tiny import make_model, tiny_config

from octavo.kernels.triton import moe as kernels
from octavo.kernels.triton.interpreter import mend
from octavo.kernels.triton.moe_experts import Experts
from octavo.layers import chosen_experts, moe

mend()
PROMPT = [3 + 7 * i % 90 for i in range(24)]


@dataclass(frozen=True, slots=True)
class Case:
    """Of a model with mixtures: what its checkpoint is made from, and what its experts are."""

    reference: Any
    num_mixtures: int
    activation: str
    is_gated: bool
    is_native: bool


def latent_nemotron() -> Any:
    """Nemotron 3 Super's: experts of latents, which Octavo has no family for."""
    _, changes = CASES["nemotron-h-experts"]
    config = transformers.NemotronHConfig(**{**SMALL, **changes, "moe_latent_size": 32})
    return make_model(transformers.NemotronHForCausalLM, config)


def gemma_4() -> Any:
    """Gemma 4's 26B: gated experts with gelu."""
    config = tiny_config(transformers.Gemma4TextConfig, transformers.Gemma4ForCausalLM).to_dict()
    config |= {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}
    return make_model(transformers.Gemma4ForCausalLM, transformers.Gemma4TextConfig(**config))


CASES_WITH_EXPERTS = {
    "nemotron-3-nano": lambda: Case(make_reference("nemotron-h-experts"), 2, "relu2", is_gated=False, is_native=True),
    "nemotron-3-super": lambda: Case(latent_nemotron(), 2, "relu2", is_gated=False, is_native=False),
    "gemma-4": lambda: Case(gemma_4(), 4, "gelu_tanh", is_gated=True, is_native=False),
}


@pytest.mark.parametrize("name", CASES_WITH_EXPERTS)
def test_logits_by_kernels(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in two parts and one token more: Transformers' logits, every mixture by the kernels."""
    case = CASES_WITH_EXPERTS[name]()
    model: Any = load(save(case.reference, tmp_path))
    assert hasattr(model, "replaced") != case.is_native
    assert case.is_native or f"{case.num_mixtures} mixtures of experts" in str(model.replaced)
    seen: list[Experts] = []
    plain = kernels.mix

    def mix(experts: Experts, *args: Any) -> torch.Tensor:
        seen.append(experts)
        return plain(experts, *args)

    monkeypatch.setattr(kernels, "mix", mix)
    monkeypatch.setattr(moe, "runs_kernels", lambda device: True)
    monkeypatch.setattr(chosen_experts, "runs_kernels", lambda device: True)
    driver = PagedDriver(model)
    steps = PROMPT[:17], PROMPT[17:-1], PROMPT[-1:]
    found = torch.cat([driver.step([(0, ids)]) for ids in steps])
    with torch.inference_mode():
        wanted = case.reference(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0]
    assert (found - wanted).abs().max() < 2e-3
    assert len(seen) == len(steps) * case.num_mixtures
    assert {(experts.activation, experts.is_gated) for experts in seen} == {(case.activation, case.is_gated)}
