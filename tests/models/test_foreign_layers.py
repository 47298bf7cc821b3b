"""Octavo's layers inside Transformers' classes: which were put there, what stays, weights in fp8, and the memory plan.

Logits of every class with them: tests/models/architectures/survey.py. What makes a norm or MLP one of ours:
test_foreign_trials.py.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fp8_checkpoints import keep_on_device, write
from paged_driver import PagedDriver
from safetensors.torch import load_file, save_file
from tiny_models import make_reference, read_config, read_tensors, save
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

sys.path.insert(0, str(Path(__file__).parent / "architectures"))

from tiny import make_model, tiny_config

from octavo.errors import ModelError
from octavo.kernels.reference.quantize_rows import FP8, dequantize_rows, quantize_weights
from octavo.layers.chosen_experts import ChosenExperts
from octavo.layers.norm import RMSNorm
from octavo.layers.quant import fp8
from octavo.models import transformers_guess
from octavo.models.registry import build_model, footprint, with_wide_ends
from octavo.models.transformers_layers import SwappedMLP
from octavo.models.transformers_linears import SwappedLinear
from octavo.models.transformers_watch import Calls
from octavo.models.weights import linears_of

CPU = torch.device("cpu")
IDS = list(range(10, 40))

ROUNDED = {
    "gpt2": (16, 0),
    "lfm2": (28, 0),
    "minicpm3": (16, 0),
    "gemma4_text": (29, 0),
    "bloom": (4, 0),
    "bert": (24, 0),
    "jamba": (18, 2),
    "afmoe": (32, 3),
    "lfm2_moe": (15, 3),
}
"""Model type -> matrices of a checkpoint, and mixtures of experts, that `--quantization fp8` rounds: turned matrices,
gated MLPs with names of their own, latents (whose tiny ranks are no multiples of 16), embeddings of layers, a class
that runs row by row and reads some weights itself, no gates, recurrent layers, and routers, which stay."""


def tiny(model_type: str, folder: Path) -> tuple[Any, Path]:
    """A random Transformers model, and its checkpoint."""
    names = {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    model_class = getattr(transformers, names[model_type])
    reference = make_model(model_class, tiny_config(transformers.CONFIG_MAPPING[model_type], model_class))
    return reference, save(reference, folder / model_type)


def build(folder: Path, quantization: str = "none", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Octavo's model with the folder's weights."""
    model = build_model(read_config(folder, **changes), dtype=dtype, device=CPU, quantization=quantization)
    model.load_weights(read_tensors(folder))
    return model


def logits(model: Any) -> Tensor:
    return PagedDriver(model).step([(0, IDS)])


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers keep fp8 weights as on a device that multiplies them."""
    monkeypatch.setattr(fp8, "multiplies_fp8", lambda device: True)


def rounded(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Numbers and scales of each matrix of a checkpoint that is kept in e4m3."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for layer in linears_of(model):
        if layer.weight_scale is not None:
            parts = [x.split(list(layer.shards.values())) for x in (layer.weight, layer.weight_scale)]
            found |= dict(zip(layer.shards, zip(*parts, strict=True), strict=True))
    return found


def matrices(model: nn.Module, reference: Any) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(the reference's matrix or matrices, numbers, scales) of what is kept in e4m3."""
    for name, (number_oi, scale_o) in rounded(model).items():
        layer = reference.get_submodule(name)
        yield layer.weight if isinstance(layer, nn.Linear) else layer.weight.t(), number_oi, scale_o
    for module in model.modules():
        if isinstance(module, ChosenExperts):
            own = reference.get_submodule(module.names.experts)
            assert module.gate_up_scale is not None
            assert module.down_scale is not None
            yield own.gate_up_proj, module.gate_up, module.gate_up_scale
            yield own.down_proj, module.down, module.down_scale


@pytest.mark.parametrize("model_type", ROUNDED)
@torch.inference_mode()
def test_weights_are_rounded_as_they_load(model_type: str, tmp_path: Path) -> None:
    """A device with fp8 keeps the numbers; another one has the logits of a model with the rounded weights."""
    reference, folder = tiny(model_type, tmp_path)
    found = build(folder, "fp8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "multiplies_fp8", lambda device: True)
        model: Any = build_model(read_config(folder), dtype=torch.float32, device=CPU, quantization="fp8")
        patch.setattr(type(model), "_try_out", lambda self: None, raising=False)  # no fp8 products here
        model.load_weights(read_tensors(folder))
    kept = rounded(model)
    num_mixtures = sum(isinstance(module, ChosenExperts) for module in model.modules())
    assert (len(kept), num_mixtures) == ROUNDED[model_type]
    assert not any("lm_head" in name or "router" in name for name in kept)
    exact = reference(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]
    for weight, number, scale in matrices(model, reference):
        wanted, wanted_scale = quantize_weights(weight.flatten(0, -2).contiguous())
        assert number.dtype == FP8
        assert torch.equal(number.float().flatten(0, -2), wanted.float())
        assert torch.equal(scale.flatten(), wanted_scale)
        weight.copy_(dequantize_rows(wanted, wanted_scale).view(weight.shape))
    expected = reference(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]
    assert (logits(found) - expected).abs().max() < 2e-3
    assert (exact - expected).abs().max() > 1e-2


@pytest.mark.parametrize(("form", "prefix"), [("hf-tensor", "model."), ("ct-channel", ""), ("ct-block", "model.")])
def test_fp8_checkpoints_are_kept(form: str, prefix: str, tmp_path: Path, on_device: None) -> None:
    """Bit by bit but for blocks, under the names of another time too."""
    made = write(save(make_reference("opt"), tmp_path / "plain"), tmp_path / "fp8", form)
    model = build_model(read_config(made.folder), dtype=torch.bfloat16, device=CPU, quantization="fp8")
    model.load_weights((name.replace("model.", prefix, 1), tensor) for name, tensor in read_tensors(made.folder))
    kept = rounded(model)  # type: ignore[arg-type]
    stored = load_file(made.folder / "model.safetensors")
    assert any(name.endswith("out_proj") for name in kept)
    for name, (number_oi, scale_o) in kept.items():
        if stored[f"{name}.weight"].dtype == FP8 and form != "ct-block":
            assert torch.equal(number_oi.float(), stored[f"{name}.weight"].float())
        exact = made.tensors[f"{name}.weight"]
        assert (dequantize_rows(number_oi, scale_o) - exact).norm() < 0.035 * exact.norm()


def test_what_is_put_into_a_class(tmp_path: Path) -> None:
    """By name: gated MLPs and norms that are ours, linear layers with their part in the class's plan."""
    model = build(tiny("minicpm3", tmp_path)[1])
    block = model.decoder.layers[0]
    assert isinstance(block.mlp, SwappedMLP)
    assert isinstance(block.input_layernorm, RMSNorm)
    assert block.mlp.gate_up.shards == {f"model.layers.0.mlp.{name}_proj": 96 for name in ("gate", "up")}
    assert (block.mlp.gate_up.split, block.mlp.down.split) == ("columns", "rows")
    assert isinstance(block.self_attn.q_a_proj, SwappedLinear)
    assert (block.self_attn.q_b_proj.split, block.self_attn.q_a_proj.split) == ("columns", "none")
    assert type(model.head.lm_head) is nn.Linear
    assert str(model.replaced) == "32 of 32 linear layers (cut by 16 columns, 8 rows), 17 norms, 4 gated MLPs"


def test_what_is_left_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """BitNet has a norm within its MLPs: its layers become ours one by one."""
    with caplog.at_level(logging.INFO, logger="octavo.models.registry"):
        model = build(tiny("bitnet", tmp_path)[1])
    assert not isinstance(model.decoder.layers[0].mlp, SwappedMLP)
    assert isinstance(model.decoder.layers[0].mlp.ffn_sub_norm, RMSNorm)
    told = "28 of 28 linear layers, 17 norms, 0 gated MLPs; not BitNetMLP: it has RMSNorm inside"
    assert told in caplog.text


def test_a_mixture_that_is_not_there(tmp_path: Path) -> None:
    folder = tiny("afmoe", tmp_path)[1]
    file = folder / "model.safetensors"
    tensors = {name: x for name, x in load_file(file).items() if not re.search(r"layers\.2\..*experts.*down", name)}
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"missing.*layers\.2\.mlp\.experts\.down_proj"):
        build(folder)


@pytest.mark.parametrize("model_type", ["lfm2", "gpt2", "gemma4_text", "afmoe"])
def test_the_plan_counts_what_is_there(model_type: str, tmp_path: Path, on_device: None) -> None:
    config = read_config(tiny(model_type, tmp_path)[1])
    taken = {}
    for kind in ("none", "fp8"):
        model = build_model(config, dtype=torch.bfloat16, device=CPU, quantization=kind)
        assert isinstance(model, nn.Module)
        storages = {x.data_ptr(): x.nbytes for x in (*model.parameters(), *model.buffers())}
        taken[kind] = footprint(config, torch.bfloat16, quantization=kind).weight_bytes
        assert taken[kind] == sum(storages.values())
    assert taken["fp8"] < 0.85 * taken["none"]


def test_ends_stay_wide(tmp_path: Path, on_device: None) -> None:
    """The attention of the first layer, and the MLP of the last."""
    config = with_wide_ends(read_config(tiny("gpt2", tmp_path)[1]), (1, 0), (0, 1))
    model = build_model(config, dtype=torch.bfloat16, device=CPU, quantization="fp8")
    kept = rounded(model)  # type: ignore[arg-type]
    assert {name for name in kept if ".h.0." in name} == {f"transformer.h.0.mlp.{name}" for name in ("c_fc", "c_proj")}
    assert {name for name in kept if ".h.3." in name} == {
        f"transformer.h.3.attn.{name}" for name in ("c_attn", "c_proj")
    }


@pytest.mark.parametrize("model_type", ["dbrx", "jetmoe", "reformer", "xmod"])
def test_classes_that_look_at_values_are_watched(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At which experts are chosen, and how often; at the greatest position; at a mask of languages."""
    keep_on_device(monkeypatch)
    model = build(tiny(model_type, tmp_path)[1], "fp8")
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    routers = {"dbrx": r"router", "jetmoe": r"router"}.get(model_type, "^$")
    assert all(re.search(rf"lm_head|{routers}", name) for name in linears), linears
    assert len(rounded(model)) >= 4


def test_a_class_that_can_not_be_watched_is_not_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_guess, "ANSWERS", {})
    folder = tiny("reformer", tmp_path)[1]
    with pytest.raises(ModelError, match=r"fp8 can't run ReformerModelWithLMHead \(it can't be watched.*: use none"):
        build(folder, "fp8")


@pytest.mark.parametrize("model_type", ["llava", "aria"])
def test_text_beside_images_is_rounded(model_type: str, tmp_path: Path) -> None:
    """Alone: in Octavo's decoder beside Transformers' vision tower, and in a class that is all Transformers'."""
    folder = tiny(model_type, tmp_path)[1]
    exact, found = logits(build(folder)), logits(build(folder, "fp8"))
    assert 0.005 < (found - exact).norm() / exact.norm() < 0.3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "multiplies_fp8", lambda device: True)
        kept = rounded(build(folder, "fp8", torch.bfloat16))
    assert kept
    assert not any("vision" in name or "projector" in name for name in kept)


class Reader(nn.Module):
    """Calls one layer, and reads another's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.read, self.idle = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """[t, 4] -> [t, 4]."""
        result: Tensor = F.linear(self.called(x), self.read.weight)
        return result


def test_reading_a_weight_is_noticed() -> None:
    module, calls = Reader(), Calls()
    with calls.recorded(module):
        module(torch.zeros(2, 4))
    assert list(calls.given) == ["called"]
    assert calls.read == {"read"}
    assert type(module.read) is nn.Linear
    module.called.weight.sum()
    assert calls.read == {"read"}, "a layer still tells who reads it"


def test_missing_and_extra_tensors_of_joined_layers(tmp_path: Path) -> None:
    folder = tiny("lfm2", tmp_path)[1]
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.feed_forward.w9.weight"] = tensors.pop("model.layers.0.feed_forward.w3.weight")
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"missing.*feed_forward\.w3\.weight.*unexpected.*feed_forward\.w9\.weight"):
        build(folder)
