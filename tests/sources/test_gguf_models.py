"""Models written to .gguf come back: the same tensors under the same names, and a config that means the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_models import CASES, make_model, weights, write_model

from octavo.config import ModelConfig
from octavo.models.config import normalize_config
from octavo.models.gguf_config import read_config
from octavo.models.gguf_file import GGUFFile, open_gguf
from octavo.models.gguf_tensors import FLOATS, dequantize, iter_gguf
from octavo.models.loader import iter_tensors
from octavo.models.sources import resolve_source

QUANTIZED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4", "F16", "BF16"]
"""Types that the package can also write."""

READ_ONLY = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS"]
READ_ONLY += ["IQ4_NL", "IQ4_XS"]


@pytest.mark.parametrize("name", CASES)
def test_tensors_come_back(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    file = open_gguf(write_model(tmp_path / "m.gguf", name, model))
    expected = weights(model)
    found = dict(iter_gguf(file))
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key], rtol=0, atol=3e-7 if "norm" in key else 0)


@pytest.mark.parametrize("name", CASES)
def test_config_means_the_same(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    raw = read_config(open_gguf(write_model(tmp_path / "m.gguf", name, model)))
    expected = normalize_config({**model.config.to_dict(), "architectures": [type(model).__name__]})
    found = normalize_config(raw)
    for key in ("bos_token_id", "eos_token_ids", "raw"):  # the file has no tokenizer
        found = dataclasses.replace(found, **{key: getattr(expected, key)})
    assert found == expected


@pytest.mark.parametrize("name", CASES)
def test_transformers_accepts_the_config(name: str, tmp_path: Path) -> None:
    """The class that Transformers builds from the rebuilt config computes the same logits from the rebuilt tensors."""
    model = make_model(name)
    file = open_gguf(write_model(tmp_path / "m.gguf", name, model))
    raw = read_config(file)
    rebuilt = type(model)(type(model.config).from_dict({k: v for k, v in raw.items() if v is not None})).eval()
    missing, extra = rebuilt.load_state_dict(dict(iter_gguf(file)), strict=False)
    assert not extra
    assert all("rotary" in key or (key == "lm_head.weight" and raw["tie_word_embeddings"]) for key in missing)
    rebuilt.tie_weights()
    ids = torch.randint(0, 96, (1, 100))
    with torch.inference_mode():
        torch.testing.assert_close(rebuilt(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("type_name", QUANTIZED)
def test_written_types_are_dequantized(type_name: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[type_name]
    width = gguf.GGML_QUANT_SIZES[kind][0] * 2
    values = np.random.default_rng(0).normal(size=(6, width)).astype(np.float32)
    packed = gguf.quants.quantize(values, kind)
    file = open_gguf(write_one(tmp_path / "m.gguf", "token_embd.weight", packed, kind))
    tensor = file.tensors["token_embd.weight"]
    assert tensor.shape == (6, width)
    found = dequantize(file, tensor)
    assert found.dtype == FLOATS.get(type_name, torch.float32)
    np.testing.assert_array_equal(found.float().numpy(), gguf.quants.dequantize(packed, kind))


@pytest.mark.parametrize("type_name", READ_ONLY)
def test_other_types_are_dequantized(type_name: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[type_name]
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    packed = np.random.default_rng(1).integers(0, 60, size=(5, 3 * num_bytes), dtype=np.uint8)
    file = open_gguf(write_one(tmp_path / "m.gguf", "blk.0.ffn_up.weight", packed, kind))
    found = dequantize(file, file.tensors["blk.0.ffn_up.weight"])
    assert found.shape == (5, 3 * block)
    np.testing.assert_array_equal(found.numpy(), gguf.quants.dequantize(packed, kind))


def write_one(path: Path, name: str, values: np.ndarray, kind: gguf.GGMLQuantizationType) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_quantized_model_loads_near_the_original(tmp_path: Path) -> None:
    model = make_model("llama")
    path = write_model(tmp_path / "m.gguf", "llama", model, kind=gguf.GGMLQuantizationType.Q8_0)
    for key, tensor in iter_gguf(open_gguf(path)):
        torch.testing.assert_close(tensor, weights(model)[key], rtol=0, atol=2e-3)


def test_source_of_a_file_and_of_a_folder_that_holds_one(tmp_path: Path, cache: Path) -> None:
    model = make_model("qwen2")
    path = write_model(tmp_path / "m.gguf", "qwen2", model)
    for name in (path, tmp_path):
        source = resolve_source(ModelConfig(model=str(name)), lambda stage, fraction: None)
        assert source.gguf_file is not None
        assert source.gguf_file.path == path
        assert source.folder is None
        assert source.tokenizer_path is None
        shapes = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in iter_tensors(source)}
        assert shapes == {k: (tuple(v.shape), torch.float32) for k, v in weights(model).items()}
        for key, tensor in iter_tensors(source, dtype=torch.bfloat16):
            assert tensor.dtype == torch.bfloat16
            assert tensor.shape == shapes[key][0]


def test_header_equals_the_packages_reader(real_path: Path, real_file: GGUFFile) -> None:
    reader = gguf.GGUFReader(real_path)
    assert [t.name for t in reader.tensors] == list(real_file.tensors)
    for theirs in reader.tensors:
        ours = real_file.tensors[theirs.name]
        assert (ours.offset, ours.num_bytes, ours.type) == (theirs.data_offset, theirs.n_bytes, theirs.tensor_type)
        assert ours.shape == tuple(reversed(theirs.shape.tolist()))
    for key, value in real_file.metadata.items():
        assert reader.fields[key].contents() == value


def test_real_model_equals_transformers_reading(real_path: Path, real_file: GGUFFile) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(real_path.parent, gguf_file=real_path.name, dtype=torch.float32)
    expected = weights(model)
    found = dict(iter_gguf(real_file))
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert torch.equal(tensor, expected[key]), key
    ours = normalize_config(read_config(real_file))
    raw = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "quantization_config": None}
    theirs = normalize_config(raw)
    assert ours.norm_eps == pytest.approx(theirs.norm_eps)
    assert dataclasses.replace(ours, dtype=theirs.dtype, norm_eps=theirs.norm_eps, raw=raw) == theirs
