"""fp8: checkpoints of every format, weights quantized at load, layers that stay plain, memory, and what is refused.

The products themselves need a GPU (tests/kernels/gpu_fp8.py); here weights are compared, and logits where the CPU
takes fp8 weights in fp32.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fp8_checkpoints
import pytest
import torch
from fp8_checkpoints import FORMATS, Fp8Checkpoint, read, write
from paged_driver import PagedDriver
from tiny_models import CASES, QWEN3_MOE, load, make_reference, read_config, read_tensors, save
from torch import Tensor

from octavo.config import make_engine_config
from octavo.errors import ConfigError, ModelError
from octavo.kernels.reference.quantize_rows import FP8, dequantize_rows, quantize_weights
from octavo.kernels.reference.squares import dequantize_squares
from octavo.layers.linear import DENSE
from octavo.layers.moe import SparseMLP
from octavo.layers.quant import fp8
from octavo.models.base import CausalLM
from octavo.models.decoder import Decoder
from octavo.models.quantization import read_quantization, with_quant_file
from octavo.models.registry import build_model, footprint, with_wide_ends
from octavo.models.weights import linears_of, mixtures_of
from octavo.worker import memory
from octavo.worker.device import DeviceFacts
from octavo.worker.memory import make_plan
from octavo.worker.resolve import resolve_quantization

CPU = torch.device("cpu")
IDS = list(range(10, 40))
SKIPPED = ("lm_head", "model.layers.1.mlp.down_proj")
H200 = DeviceFacts("cuda", "H200", 1 << 37, 1 << 37, 8, has_bfloat16=True, has_fp8=True)
OLD = DeviceFacts("cuda", "A100", 1 << 36, 1 << 36, 8, has_bfloat16=True)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_reference("llama-biases"), tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module", params=FORMATS)
def checkpoint(request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Fp8Checkpoint:
    return write(source, tmp_path_factory.mktemp("fp8") / "model", request.param, ignored=SKIPPED)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers keep fp8 weights as on a device that multiplies them."""
    monkeypatch.setattr(fp8, "multiplies_fp8", lambda device: True)


def linears(model: CausalLM) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """(name of a part, its weight, its scales) of every linear layer."""
    assert isinstance(model, Decoder)
    for i, block in enumerate(model.layers()):
        for layer in (block.attention.qkv, block.attention.o, block.mlp.gate_up, block.mlp.down):
            start = 0
            for name, size in layer.shards.items():
                rows = slice(start, start + size)
                scale = None if layer.weight_scale is None else layer.weight_scale[rows]
                yield f"model.layers.{i}.{name}", layer.weight[rows], scale
                start += size


def logits(model: CausalLM) -> Tensor:
    return PagedDriver(model).step([(0, IDS)])


def test_checkpoint_is_exact_where_it_is_dequantized(checkpoint: Fp8Checkpoint, source: Path) -> None:
    model = read(checkpoint.folder, "none")
    expected = build_model(read_config(source), dtype=torch.float32, device=CPU)
    expected.load_weights(checkpoint.tensors.items())
    assert torch.equal(logits(model), logits(expected))
    plain = logits(load(source))
    assert not torch.equal(logits(model), plain)
    assert (logits(model) - plain).norm() < 0.2 * plain.norm(), "12 products in a row, each 2.6% off"


def test_checkpoint_in_fp8_layers(checkpoint: Fp8Checkpoint, on_device: None) -> None:
    """Exact but for blocks, which are rounded again."""
    model = read(checkpoint.folder, "fp8", torch.bfloat16)
    kinds = set()
    for name, weight, scale in linears(model):
        meant = checkpoint.tensors[f"{name}.weight"]
        kinds.add(weight.dtype)
        if name in SKIPPED:
            assert scale is None
            assert torch.equal(weight, meant.to(torch.bfloat16))
            continue
        assert scale is not None
        assert scale.dtype == torch.float32
        found = dequantize_rows(weight, scale)
        if checkpoint.form.endswith("block"):
            assert 0 < (found - meant).norm() < 0.035 * meant.norm(), name
        else:
            assert torch.equal(found, meant), name
    assert kinds == {FP8, torch.bfloat16}


def test_plain_weights_are_quantized_at_load(source: Path, on_device: None) -> None:
    plain = dict(linear[:2] for linear in linears(load(source)))
    for name, weight, scale in linears(read(source, "fp8", torch.bfloat16)):
        assert scale is not None
        assert weight.dtype == FP8
        assert weight.float().abs().amax(1).ge(224).all(), "every channel uses at least all but the last factor of two"
        exact = plain[name]
        error = (dequantize_rows(weight, scale) - exact).abs()
        assert (error <= exact.abs() / 16 + scale[:, None] / 512).all(), name
        assert 0.01 * exact.norm() < error.norm() < 0.035 * exact.norm()


def test_a_device_without_fp8_keeps_the_rounded_weights(source: Path) -> None:
    model = read(source, "fp8")
    for name, weight, scale in linears(model):
        assert scale is None
        assert weight.dtype == torch.float32, name
    expected = load(source)
    for _, weight, _ in linears(expected):
        weight.copy_(dequantize_rows(*quantize_weights(weight)))
    assert torch.equal(logits(model), logits(expected))
    assert all(layer.method is DENSE for layer in model.modules() if hasattr(layer, "shards"))  # type: ignore[attr-defined]


def test_dummy_weights_look_like_dense_ones(source: Path, on_device: None) -> None:
    for _, weight, scale in linears(read(source, "fp8", torch.bfloat16, "dummy")):
        assert scale is not None
        assert 0.018 < dequantize_rows(weight, scale).std() < 0.022


def test_ends_stay_wide(source: Path, tmp_path: Path, on_device: None) -> None:
    """Of models that are rounded as they load; a checkpoint in fp8 says itself what stays."""
    config = read_config(source)
    assert config.num_layers == 3
    for attention, mlp in (((1, 1), (0, 0)), ((0, 1), (2, 0)), ((2, 2), (1, 0)), ((0, 0), (0, 0))):
        model = build_model(
            with_wide_ends(config, attention, mlp), dtype=torch.bfloat16, device=CPU, quantization="fp8"
        )
        assert isinstance(model, Decoder)
        for i, block in enumerate(model.layers()):
            for ends, layers in (
                (attention, (block.attention.qkv, block.attention.o)),
                (mlp, (block.mlp.gate_up, block.mlp.down)),
            ):
                is_wide = i < ends[0] or i >= 3 - ends[1]
                assert all((layer.weight_scale is None) == is_wide for layer in layers), (attention, mlp, i)
    stored = read_config(write(source, tmp_path / "fp8", "ct-channel").folder)
    assert with_wide_ends(stored, (1, 1), (1, 1)) is stored


def test_wide_ends_are_planned_for(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "find_device", lambda name: H200)
    options = {"runner": "torch", "device": "cuda", "dtype": "bfloat16", "quantization": "fp8", "max_model_len": 64}
    plans = [
        make_plan(
            make_engine_config({"model": str(source), "fp8_wide_attention": attention, "fp8_wide_mlp": mlp, **options})
        )
        for attention, mlp in (([0, 0], [0, 0]), ([1, 0], [1, 0]), ([1, 1], [1, 1]))
    ]
    taken = [plan.usage.weight_bytes for plan in plans]
    assert taken[1] - taken[0] == taken[2] - taken[1] > 0
    assert plans[1].model.wide_layers == ((True, True), (False, False), (False, False))


@pytest.mark.parametrize("ends", [[1], [1, -1], [1, 2, 3]])
def test_senseless_ends(ends: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"--fp8-wide-mlp .*two numbers"):
        make_engine_config({"model": "m", "fp8_wide_mlp": ends})


def test_bytes_count_eight_bits(checkpoint: Fp8Checkpoint) -> None:
    config = read_config(checkpoint.folder)
    plain, packed = (footprint(config, torch.bfloat16, quantization=kind).weight_bytes for kind in ("none", "fp8"))
    numbers = channels = 0
    for name, weight in checkpoint.tensors.items():
        layer = name.removesuffix(".weight")
        if name.endswith("proj.weight") and layer not in SKIPPED:
            numbers, channels = numbers + weight.numel(), channels + weight.shape[0]
    assert plain - packed == numbers - 4 * channels


def experts(model: CausalLM) -> Iterator[tuple[Tensor, Tensor | None]]:
    """(matrix, scales) of each expert of each layer."""
    assert isinstance(model, Decoder)
    for block in model.layers():
        assert isinstance(block.mlp, SparseMLP)
        for matrix, scale in (
            (block.mlp.gate_up, block.mlp.gate_up_scale),
            (block.mlp.down, block.mlp.down_scale),
        ):
            yield from ((part, None if scale is None else scale[i]) for i, part in enumerate(matrix))


@pytest.mark.parametrize("form", FORMATS)
def test_experts_of_checkpoints(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact but for blocks; a device without fp8 gets the numbers that the e4m3 ones stand for."""
    plain = save(make_reference("qwen3-moe"), tmp_path / "plain")
    made = write(plain, tmp_path / "fp8", form)
    expected = build_model(read_config(plain), dtype=torch.float32, device=CPU)
    expected.load_weights(made.tensors.items())
    assert torch.equal(logits(read(made.folder, "none")), logits(expected))
    wide = read(made.folder, "fp8")
    monkeypatch.setattr(fp8, "multiplies_fp8", lambda device: True)
    kept = read(made.folder, "fp8", torch.bfloat16)
    for (number, scale), (value, no_scale), (exact, _) in zip(
        experts(kept), experts(wide), experts(expected), strict=True
    ):
        assert number.dtype == FP8
        assert scale is not None
        assert no_scale is None
        found = dequantize_rows(number, scale)
        assert torch.equal(found, value)
        if form.endswith("block"):
            assert 0 < (found - exact).norm() < 0.035 * exact.norm()
        else:
            assert torch.equal(found, exact)


def test_experts_without_gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded as they load; a device without fp8 gets the numbers that the e4m3 ones stand for."""
    folder = save(make_reference("nemotron-h-experts"), tmp_path)
    exact, wide = read(folder, "none"), read(folder, "fp8")
    monkeypatch.setattr(fp8, "multiplies_fp8", lambda device: True)
    models = exact, wide, read(folder, "fp8", torch.bfloat16)
    mixtures = [mixtures_of(model) for model in models if isinstance(model, Decoder)]
    assert [len(found) for found in mixtures] == [2, 2, 2]
    for meant, value, kept in zip(*mixtures, strict=True):
        assert kept.gate_up.shape == (8, 32, 64)
        for name in ("gate_up", "down"):
            number, scale = getattr(kept, name), getattr(kept, f"{name}_scale")
            assert number.dtype == FP8
            found = dequantize_rows(number.flatten(0, 1), scale.flatten()).view(number.shape)
            assert torch.equal(found, getattr(value, name))
            matrix = getattr(meant, name)
            assert 0 < (found - matrix).norm() < 0.035 * matrix.norm()


def write_squares(folder: Path, monkeypatch: pytest.MonkeyPatch, form: str = "hf-block") -> Fp8Checkpoint:
    """A mixture of experts large enough for blocks of 128 x 128."""
    sizes = {**QWEN3_MOE, "hidden_size": 128, "moe_intermediate_size": 256, "num_hidden_layers": 1, "num_experts": 3}
    monkeypatch.setitem(CASES, "qwen3-moe", ("Qwen3Moe", sizes))
    monkeypatch.setattr(fp8_checkpoints, "BLOCK", (128, 128))
    return write(save(make_reference("qwen3-moe"), folder / "plain"), folder / "fp8", form)


@pytest.mark.parametrize("form", ["hf-block", "ct-block"])
def test_squares_of_experts_are_kept(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit; a device without fp8 gets the numbers that they stand for."""
    made = write_squares(tmp_path, monkeypatch, form)
    expected = build_model(read_config(made.folder), dtype=torch.float32, device=CPU)
    expected.load_weights(made.tensors.items())
    wide = read(made.folder, "fp8")
    monkeypatch.setattr(fp8, "multiplies_fp8", lambda device: True)
    kept = read(made.folder, "fp8", torch.bfloat16)
    triples = list(zip(experts(kept), experts(wide), experts(expected), strict=True))
    assert len(triples) == 6
    for (number, scale), (value, _), (exact, _) in triples:
        assert number.dtype == FP8
        assert scale is not None
        assert scale.shape == (number.shape[0] // 128, number.shape[1] // 128)
        assert torch.equal(dequantize_squares(number[None], scale[None])[0], exact)
        assert torch.equal(value, exact)


@pytest.mark.parametrize("change", [torch.zeros(256, 128), torch.zeros(256, 128).to(torch.float8_e5m2)])
def test_squares_without_their_numbers(
    change: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_device: None
) -> None:
    from safetensors.torch import load_file, save_file

    file = write_squares(tmp_path, monkeypatch).folder / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.mlp.experts.1.up_proj.weight": change}, file)
    with pytest.raises(ModelError, match=r"experts\.1\.up_proj"):
        read(file.parent, "fp8", torch.bfloat16)


@pytest.mark.parametrize("is_merged", [False, True])
def test_experts_are_quantized_at_load(is_merged: bool, tmp_path: Path, on_device: None) -> None:
    """One tensor an expert, or (Transformers' parameters) one for all."""
    reference = make_reference("qwen3-moe")
    source = save(reference, tmp_path / "plain")
    model = build_model(read_config(source), dtype=torch.bfloat16, device=CPU, quantization="fp8")
    model.load_weights(reference.state_dict().items() if is_merged else read_tensors(source))
    plain = [matrix for matrix, _ in experts(load(source))]
    for (number, scale), exact in zip(experts(model), plain, strict=True):
        assert scale is not None
        assert number.dtype == FP8
        error = (dequantize_rows(number, scale) - exact).norm()
        assert 0.01 * exact.norm() < error < 0.035 * exact.norm()


def test_rounded_experts_give_nearly_the_same_logits(tmp_path: Path) -> None:
    """The whole model on a device without fp8 products."""
    source = save(make_reference("qwen3-moe"), tmp_path / "plain")
    exact, rounded = (logits(read(source, kind)) for kind in ("none", "fp8"))
    assert 0 < (rounded - exact).norm() < 0.15 * exact.norm()


def test_experts_that_no_kernel_runs_stay_plain(tmp_path: Path, on_device: None) -> None:
    """40 is no multiple of 32."""
    config = read_config(save(make_reference("qwen3-moe"), tmp_path / "plain"), moe_intermediate_size=40)
    model = build_model(config, dtype=torch.bfloat16, device=CPU, quantization="fp8")
    assert all(matrix.dtype == torch.bfloat16 for matrix, _ in experts(model))
    assert all(layer.weight.dtype == FP8 for layer in linears_of(model))  # type: ignore[arg-type]


def test_a_transformers_model_gets_dequantized_weights(tmp_path: Path) -> None:
    plain = save(make_reference("opt"), tmp_path / "plain")
    made = write(plain, tmp_path / "fp8", "ct-channel", ignored=("lm_head", "re:.*fc[12]$"))
    expected = build_model(read_config(plain), dtype=torch.float32, device=CPU)
    expected.load_weights(made.tensors.items())
    assert torch.equal(logits(read(made.folder, "none")), logits(expected))
    assert torch.equal(logits(read(made.folder, "fp8")), logits(expected))  # without fp8 products


@pytest.mark.parametrize(
    ("form", "change", "words"),
    [
        ("ct-channel", {"model.layers.0.mlp.up_proj.weight_scale": None}, "without their weight_scale.*up_proj"),
        ("ct-channel", {"model.layers.0.mlp.up_proj.weight_scale": torch.ones(3)}, r"up_proj: scales of shape \[3\]"),
        ("hf-block", {"model.layers.2.mlp.up_proj.weight_scale_inv": torch.ones(3, 9)}, r"not \[5, 3\]"),
        ("hf-tensor", {"model.layers.2.mlp.gate_proj.weight": None}, "scales alone, of model.layers.2.mlp.gate_proj"),
    ],
)
def test_damaged_checkpoints(source: Path, tmp_path: Path, form: str, change: dict[str, Any], words: str) -> None:
    from safetensors.torch import load_file, save_file

    file = write(source, tmp_path / "fp8", form).folder / "model.safetensors"
    tensors = load_file(file) | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    with pytest.raises(ModelError, match=words):
        read(file.parent, "none")


def test_parts_of_one_matrix_must_agree(source: Path, tmp_path: Path) -> None:
    made = write(source, tmp_path / "fp8", "hf-tensor", ignored=("lm_head", "model.layers.0.self_attn.k_proj"))
    with pytest.raises(ModelError, match=r"self_attn.q_proj but not all of .*k_proj.*--quantization none"):
        read(made.folder, "fp8")
    read(made.folder, "none")


GROUP = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}, "targets": ["Linear"]}


@pytest.mark.parametrize(
    ("config", "covered", "kept"),
    [
        ({"quant_method": "fp8"}, ["a.q_proj"], []),
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.1"]},
            ["model.layers.11.x"],
            ["model.layers.1.x"],
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*.gate", "vision*", "a.b"]},
            ["a.bc", "x.gate_proj"],
            ["lm_head", "x.mlp.gate", "vision_tower.q_proj", "a.b", "a.b.c"],
        ),
        ({"quant_method": "fp8", "modules_to_not_convert": ["down_proj"]}, ["m.up_proj"], ["m.down_proj"]),
        ({"quant_method": "fp8", "ignored_layers": ["a.b"]}, ["a.bc"], ["a.b", "a.b.c"]),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": GROUP}, "ignore": ["re:.*mlp.*", "a.b"]},
            ["a.bc", "x.attn"],
            ["x.mlp.up", "a.b"],
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {**GROUP, "targets": ["re:.*q_proj$"]}},
            },
            ["x.q_proj"],
            ["x.k_proj"],
        ),
    ],
)
def test_which_layers_a_checkpoint_quantizes(config: dict[str, Any], covered: list[str], kept: list[str]) -> None:
    found = read_quantization({"quantization_config": config})
    assert found is not None
    assert [name for name in covered + kept if found.covers(name)] == covered


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "awq"}, r"quantized \(awq\).*reads fp8"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int", "strategy": "group"}}},
            },
            "pack-quantized, 4-bit int with strategy group",
        ),
        ({"quant_method": "compressed-tensors"}, "no config_groups"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, r"modelopt, NVFP4.*\.gguf"),
    ],
)
def test_refused_formats(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read_quantization({"quantization_config": config})


def test_what_model_optimizer_says_beside_config_json(source: Path, tmp_path: Path) -> None:
    """Older checkpoints of it. What config.json says counts more."""
    made = write(source, tmp_path / "fp8", "modelopt-tensor", ignored=SKIPPED)
    expected = logits(read(made.folder, "none"))
    raw = json.loads((made.folder / "config.json").read_text())
    del raw["quantization_config"]
    (made.folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=r"fp8 weights \(model.*no quantization_config"):
        read(made.folder, "none")
    said = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": list(SKIPPED)}
    (made.folder / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": said}))
    assert torch.equal(logits(read(made.folder, "none")), expected)
    plain = {"quantization_config": {"quant_method": "fp8"}}
    assert with_quant_file(plain, {"quantization": said}) == plain
    assert with_quant_file({}, {"quantization": {"quant_algo": None}}) == {}


def test_resolving(source: Path, tmp_path: Path) -> None:
    plain = read_config(source)
    stored = read_config(write(source, tmp_path / "fp8", "ct-tensor").folder)

    assert [resolve_quantization(choice, plain, H200) for choice in ("auto", "none", "fp8")] == ["none", "none", "fp8"]
    assert [resolve_quantization(choice, stored, H200) for choice in ("auto", "none", "fp8")] == ["fp8", "none", "fp8"]
    assert [resolve_quantization(choice, plain, OLD) for choice in ("auto", "none", "fp8")] == ["none", "none", "fp8"]
    assert [resolve_quantization(choice, stored, OLD) for choice in ("auto", "none", "fp8")] == ["none", "none", "none"]
    with pytest.raises(ConfigError, match=r"--quantization int4 .*CPUs.*: use fp8 or none"):
        resolve_quantization("int4", plain, H200)
    with pytest.raises(ConfigError, match=r"--quantization int8 .*A100.*: use none"):
        resolve_quantization("int8", plain, OLD)


def test_plan_on_a_cpu_counts_wide_weights(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = write(source, tmp_path / "fp8", "hf-block")
    options = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 1 << 20, "max_model_len": 64}
    plans = {}
    for folder, quantization in ((source, "auto"), (source, "fp8"), (made.folder, "auto")):
        config = make_engine_config({"model": str(folder), "quantization": quantization, **options})
        with caplog.at_level("INFO", logger="octavo.worker.memory"):
            plans[folder, quantization] = make_plan(config)
    assert len({plan.usage.weight_bytes for plan in plans.values()}) == 1
    assert [plan.config.model.quantization for plan in plans.values()] == ["none", "fp8", "none"]
    assert caplog.text.count("fp8 weights are kept as float32") == 2
