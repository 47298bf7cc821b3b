"""Image-text models in fp8: text layers keep a checkpoint's numbers whatever names it has for them, or are rounded as
they load; what reads images stays wide.

Products are the references' here. That the images of these models are read as by Transformers is said in
tests/multimodal.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fp8_checkpoints
import pytest
import torch
import transformers
from fp8_checkpoints import Fp8Checkpoint, keep_on_device, read, write
from paged_driver import PagedDriver
from safetensors.torch import load_file, save_file
from tiny_models import read_config, read_tensors, save
from torch import Tensor

from octavo.errors import ModelError
from octavo.kernels.reference.quantize_rows import FP8, dequantize_rows
from octavo.kernels.reference.squares import dequantize_squares, quantize_squares
from octavo.layers.linear import Linear
from octavo.layers.moe import SparseMLP
from octavo.models.base import CausalLM
from octavo.models.registry import build_model, footprint, with_wide_ends
from octavo.models.vision_language import VisionLanguage
from octavo.models.weights import linears_of, mixtures_of

sys.path.insert(0, str(Path(__file__).parent / "architectures"))
from tiny import tiny_config

CPU = torch.device("cpu")
IDS = [10 + (7 * i) % 90 for i in range(80)]
PLACES = {
    "qwen3_vl": "model.language_model.",
    "qwen3_5": "model.language_model.",
    "qwen3_vl_moe": "model.language_model.",
    "qwen3_5_moe": "model.language_model.",
    "gemma3": "language_model.model.",
    "llava": "language_model.model.",
    "mistral3": "language_model.model.",
}
"""`model_type` -> where checkpoints have the text model; all classes of today have it at Qwen's place."""
TODAY = "model.language_model."
WIDE = "layers.1.mlp.down_proj"
"""Of the text model, though the checkpoints' other products are in fp8."""
NAMES: dict[str, Callable[[str, list[str]], list[str]]] = {
    "today": lambda place, vision: [f"{TODAY}{WIDE}", *vision],
    "stored": lambda place, vision: [f"{place}{WIDE}", *vision],
}
"""Who wrote the list of layers that are not quantized: a tool that looks at modules, or at tensors."""


def make(model_type: str, folder: Path, form: str, names: str = "stored", **sizes: int) -> Fp8Checkpoint:
    """A checkpoint of a tiny model of Transformers' class; `sizes` are its text model's."""
    plain = save(tiny_image_model(model_type, sizes), folder / "plain")
    layers = [name.removesuffix(".weight") for name, _ in read_tensors(plain) if name.endswith(".weight")]
    place = PLACES[model_type]
    vision = [name for name in layers if not name.startswith(place)]
    ignored = f"{place}{WIDE}", *vision
    return write(plain, folder / "fp8", form, ignored=ignored, named=tuple(NAMES[names](place, vision)))


def tiny_image_model(model_type: str, sizes: dict[str, int] | None = None) -> Any:
    config_class = transformers.CONFIG_MAPPING[model_type]
    model_class = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config_class]
    config = tiny_config(config_class, model_class)
    for name, size in (sizes or {}).items():
        setattr(config.text_config, name, size)
    if sizes:
        config.vision_config.out_hidden_size = config.text_config.hidden_size
    torch.manual_seed(1)
    model = model_class._from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_on_device(monkeypatch)


@pytest.fixture(autouse=True)
def squares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are squares of 128 x 128."""
    monkeypatch.setattr(fp8_checkpoints, "BLOCK", (128, 128))


def parts(model: CausalLM) -> Iterator[tuple[str, Tensor, Linear]]:
    """(name in the text model below "model.", what its numbers stand for, its layer) of each part of a layer."""
    assert isinstance(model, VisionLanguage)
    for i, block in enumerate(model.text.layers()):
        for layer in linears_of(block):
            wide = layer.weight.float()
            if layer.share:
                assert layer.weight_scale is not None
                wide = dequantize_squares(layer.weight, layer.weight_scale, layer.share)
            elif layer.weight_scale is not None:
                wide = dequantize_rows(layer.weight, layer.weight_scale)
            start = 0
            for name, size in layer.shards.items():
                yield f"layers.{i}.{name}", wide[start : start + size], layer
                start += size


def logits(model: CausalLM) -> Tensor:
    return PagedDriver(model, max_len=len(IDS)).step([(0, IDS)])


def meant(checkpoint: Fp8Checkpoint) -> CausalLM:
    """The fp32 model of the numbers that a checkpoint stands for."""
    model = build_model(read_config(checkpoint.folder), dtype=torch.float32, device=CPU)
    model.load_weights(checkpoint.tensors.items())
    return model


@pytest.mark.parametrize("form", ["hf-tensor", "ct-channel", "hf-block"])
@pytest.mark.parametrize("model_type", ["qwen3_vl", "gemma3", "llava", "mistral3"])
def test_text_layers_keep_their_numbers(model_type: str, form: str, tmp_path: Path, on_device: None) -> None:
    made = make(model_type, tmp_path, form)
    model, expected = read(made.folder, "fp8"), meant(made)
    assert isinstance(model, VisionLanguage)
    assert isinstance(expected, VisionLanguage)
    for name, weight, layer in parts(model):
        assert torch.equal(weight, made.tensors[f"{PLACES[model_type]}{name}.weight"]), name
        assert (layer.weight.dtype == FP8) == (name != WIDE), name
    assert not linears_of(model.vision)
    for found, wide in zip(model.vision.parameters(), expected.vision.parameters(), strict=True):
        assert torch.equal(found, wide)
    exact = logits(expected)
    assert 0.02 * exact.norm() < (logits(model) - exact).norm() < 0.16 * exact.norm(), "activations are rounded"


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_a_device_without_fp8_gets_what_they_stand_for(quantization: str, tmp_path: Path) -> None:
    made = make("gemma3", tmp_path, "ct-channel")
    model = read(made.folder, quantization)
    assert all(layer.weight.dtype == torch.float32 for _, _, layer in parts(model))
    assert torch.equal(logits(model), logits(meant(made)))


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("model_type", ["llava", "qwen3_vl"])
def test_names_of_layers_that_stay_wide(model_type: str, names: str, tmp_path: Path) -> None:
    config = read_config(make(model_type, tmp_path, "ct-channel", names).folder)
    model = build_model(config, dtype=torch.bfloat16, device=torch.device("meta"), quantization="fp8")
    assert [name for name, _, layer in parts_on_meta(model) if layer.weight.dtype != FP8] == [WIDE]


def parts_on_meta(model: CausalLM) -> Iterator[tuple[str, None, Linear]]:
    assert isinstance(model, VisionLanguage)
    for i, block in enumerate(model.text.layers()):
        yield from ((f"layers.{i}.{name}", None, layer) for layer in linears_of(block) for name in layer.shards)


@pytest.mark.parametrize("form", ["ct-channel", "hf-block"])
def test_bytes(form: str, tmp_path: Path) -> None:
    """A number a weight, and the scales."""
    config = read_config(make("mistral3", tmp_path, form).folder)
    plain, packed = (footprint(config, torch.bfloat16, quantization=kind).weight_bytes for kind in ("none", "fp8"))
    model = build_model(config, dtype=torch.bfloat16, device=torch.device("meta"), quantization="fp8")
    assert isinstance(model, VisionLanguage)
    kept = [layer for layer in linears_of(model) if layer.weight_scale is not None]
    assert len(kept) == 4 * 4 - 1
    scales = sum(layer.weight_scale.numel() for layer in kept if layer.weight_scale is not None)
    assert plain - packed == sum(layer.weight.numel() for layer in kept) - 4 * scales


def test_products_that_are_dealt_out(tmp_path: Path, on_device: None) -> None:
    """Qwen 3.5: queries and gates come in one matrix, head by head."""
    made = make("qwen3_5", tmp_path, "ct-channel")
    model, expected = read(made.folder, "fp8"), meant(made)
    kept = 0
    for (name, found, layer), (_, wide, _) in zip(parts(model), parts(expected), strict=True):
        assert torch.equal(found, wide), name
        kept += layer.weight.dtype == FP8
    assert kept > 4 * 4


@pytest.mark.parametrize("form", ["plain", "hf-block"])
def test_a_drafter_in_the_checkpoint_is_left_out(form: str, tmp_path: Path, on_device: None) -> None:
    """Qwen 3.5's, as Transformers does it."""
    made = make("qwen3_5", tmp_path, "hf-block")
    folder, quantization = (tmp_path / "plain", "none") if form == "plain" else (made.folder, "fp8")
    file = folder / "model.safetensors"
    number = torch.zeros(128, 64).to(torch.bfloat16 if form == "plain" else FP8)
    drafter = {"mtp.fc.weight": torch.zeros(64, 128), "mtp.layers.0.mlp.up_proj.weight": number}
    if form != "plain":
        drafter["mtp.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(1, 1)
    expected = logits(read(folder, quantization))
    save_file(load_file(file) | drafter, file)
    assert torch.equal(logits(read(folder, quantization)), expected)
    save_file(load_file(file) | {"another.weight": number[:2]}, file)
    with pytest.raises(ModelError, match=r"unexpected|without their weight_scale"):
        read(folder, quantization)


def test_plain_weights_are_rounded_as_they_load(tmp_path: Path, on_device: None) -> None:
    """But for the ends that stay wide."""
    plain = save(tiny_image_model("llava"), tmp_path / "plain")
    config = with_wide_ends(read_config(plain), (1, 0), (0, 1))
    model, exact = (build_model(config, dtype=torch.float32, device=CPU, quantization=kind) for kind in ("fp8", "none"))
    for each in (model, exact):
        each.load_weights(read_tensors(plain))
    wide = set()
    for (name, found, layer), (_, weight, _) in zip(parts(model), parts(exact), strict=True):
        if layer.weight.dtype == FP8:
            assert 0.01 * weight.norm() < (found - weight).norm() < 0.035 * weight.norm(), name
        else:
            wide.add(name.rpartition(".")[0])
    assert wide == {"layers.0.self_attn", "layers.3.mlp"}
    expected = logits(exact)
    assert 0 < (logits(model) - expected).norm() < 0.15 * expected.norm()


def test_damaged_checkpoints(tmp_path: Path) -> None:
    file = make("llava", tmp_path, "ct-channel").folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["language_model.model.layers.0.mlp.up_proj.weight_scale"]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"without their weight_scale.*layers.0.mlp.up_proj"):
        read(file.parent, "fp8")


EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)$")
HOW = ("together", "apart")
"""Qwen3-VL's FP8 checkpoints keep experts' matrices in one tensor [e, inputs, outputs], Qwen 3.5's one by one."""


def make_experts(model_type: str, folder: Path, sizes: tuple[int, int], how: str) -> Fp8Checkpoint:
    """A checkpoint of a tiny mixture of experts with scales of squares."""
    width, inner = sizes
    made = make(model_type, folder, "hf-block", hidden_size=width, moe_intermediate_size=inner)
    stored = dict(read_tensors(made.folder))
    for name, tensor in list(stored.items()):
        found = EXPERTS.match(name)
        if found is None:
            continue
        del stored[name]
        numbers, scales = zip(*(quantize_squares(matrix) for matrix in tensor), strict=True)
        made.tensors[name] = torch.stack([dequantize_squares(*pair) for pair in zip(numbers, scales, strict=True)])
        if how == "together":
            both = torch.stack(numbers), torch.stack(scales)
            turned = (x.mT for x in both) if model_type == "qwen3_vl_moe" else both
            stored |= zip((name, f"{name}_scale_inv"), turned, strict=True)
            continue
        parts = ("gate_proj", "up_proj") if found[2] == "gate_up_proj" else ("down_proj",)
        for i, (number, scale) in enumerate(zip(numbers, scales, strict=True)):
            pieces = zip(parts, number.chunk(len(parts)), scale.chunk(len(parts)), strict=True)
            for part, piece, piece_scale in pieces:
                stored[f"{found[1]}.{i}.{part}.weight"] = piece
                stored[f"{found[1]}.{i}.{part}.weight_scale_inv"] = piece_scale
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, made.folder / "model.safetensors")
    return made


def expert_values(model: CausalLM) -> Iterator[tuple[Tensor, SparseMLP]]:
    """(what experts' numbers stand for, their mixture), of both products of each layer."""
    assert isinstance(model, VisionLanguage)
    for mixture in mixtures_of(model):
        for number, scale in ((mixture.gate_up, mixture.gate_up_scale), (mixture.down, mixture.down_scale)):
            if scale is None:
                yield number, mixture
            elif mixture.form == "squares":
                yield dequantize_squares(number, scale), mixture
            else:
                yield number.float() * scale[..., None], mixture


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_experts_keep_their_numbers(model_type: str, how: str, tmp_path: Path, on_device: None) -> None:
    made = make_experts(model_type, tmp_path, (128, 256), how)
    model, expected = read(made.folder, "fp8"), meant(made)
    pairs = list(zip(expert_values(model), expert_values(expected), strict=True))
    assert len(pairs) == 2 * 4
    for (found, mixture), (exact, _) in pairs:
        assert mixture.form == "squares"
        assert mixture.down.dtype == FP8
        assert torch.equal(found, exact)


@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_experts_of_odd_sizes_are_rounded_again(model_type: str, tmp_path: Path, on_device: None) -> None:
    """A square has features of both gates and ups."""
    made = make_experts(model_type, tmp_path, (256, 160), "together")
    model, expected = read(made.folder, "fp8"), meant(made)
    for (found, mixture), (exact, _) in zip(expert_values(model), expert_values(expected), strict=True):
        assert mixture.form == "channels"
        assert mixture.down.dtype == FP8
        assert 0.01 * exact.norm() < (found - exact).norm() < 0.035 * exact.norm()


@pytest.mark.parametrize(
    ("change", "words"),
    [(None, r"scales alone, of .*layers.0.mlp.experts.down_proj"), (torch.ones(3, 2, 1), r"scales of \[3, ")],
)
def test_damaged_experts(change: Tensor | None, words: str, tmp_path: Path) -> None:
    file = make_experts("qwen3_vl_moe", tmp_path, (128, 256), "together").folder / "model.safetensors"
    tensors = load_file(file)
    name = f"{TODAY}layers.0.mlp.experts.down_proj_scale_inv"
    del tensors[name]
    save_file(tensors if change is None else tensors | {name: change}, file)
    with pytest.raises(ModelError, match=words):
        read(file.parent, "fp8")
