"""Broken and unsupported .gguf files: one line that names the file and what is wrong, never a crash."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_models import make_model, write_model
from gguf_vocab import write_vocab

from octavo.config import ModelConfig
from octavo.errors import ModelError
from octavo.models.gguf_config import read_config
from octavo.models.gguf_file import open_gguf
from octavo.models.gguf_tensors import iter_gguf
from octavo.models.sources import resolve_source


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "m.gguf"
    return write_model(path, "llama", make_model("llama")).read_bytes()


def load_all(path: Path) -> None:
    file = open_gguf(path)
    read_config(file)
    for _ in iter_gguf(file):
        pass


HEADER = struct.Struct("<4sIQQ")


def patched(body: bytes, **fields: Any) -> bytes:
    """The file with other values in its first 24 bytes."""
    values = dict(zip(("magic", "version", "tensors", "pairs"), HEADER.unpack_from(body), strict=True)) | fields
    return HEADER.pack(*values.values()) + body[HEADER.size :]


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda b: b"", "can't be read"),
    "other file": (lambda b: b"PK\x03\x04" + b[4:], "is not a GGUF file"),
    "LFS pointer": (lambda b: b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
    "cut in the magic": (lambda b: b[:3], "is not a GGUF file"),
    "cut in the header": (lambda b: b[:20], "truncated or corrupt"),
    "cut in the metadata": (lambda b: b[:200], "truncated or corrupt"),
    "cut in the data": (lambda b: b[:-100], r"truncated: tensor \S+ ends at byte \d+, the file has \d+"),
    "version 1": (lambda b: patched(b, version=1), "version 1"),
    "big endian": (lambda b: patched(b, version=3 << 24), "big-endian"),
    "too many pairs": (lambda b: patched(b, pairs=1 << 40), "corrupt"),
    "too many tensors": (lambda b: patched(b, tensors=1 << 40), "corrupt"),
    "long string": (lambda b: b[:24] + struct.pack("<Q", 1 << 60) + b[32:], "truncated or corrupt"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(name: str, good: bytes, tmp_path: Path) -> None:
    change, message = BROKEN[name]
    path = tmp_path / "broken.gguf"
    path.write_bytes(change(good))
    with pytest.raises(ModelError, match=message) as caught:
        load_all(path)
    assert "broken.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_random_damage_is_an_error_or_harmless(good: bytes, tmp_path: Path) -> None:
    """Bytes of the header changed at random, 300 times: a ModelError, or a file that still reads."""
    path = tmp_path / "damaged.gguf"
    header = len(good) - sum(t.num_bytes for t in _tensors(good, tmp_path))
    rng = random.Random(3)
    errors = []
    for _ in range(300):
        body = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            body[rng.randrange(header)] = rng.randrange(256)
        path.write_bytes(body)
        try:
            load_all(path)
        except ModelError as e:
            errors.append(str(e))
    assert len(errors) > 50
    assert not any("\n" in message for message in errors)


def _tensors(body: bytes, folder: Path) -> Any:
    path = folder / "g.gguf"
    path.write_bytes(body)
    return open_gguf(path).tensors.values()


def tiny_writer(path: Path, architecture: str = "llama") -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), dtype=np.float32))
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, dtype=np.float32)


UNSUPPORTED: dict[str, tuple[str, Callable[[gguf.GGUFWriter], Any], str]] = {
    "architecture": ("mamba", lambda w: None, r"architecture 'mamba' is not one of llama, .*safetensors folder"),
    "experts": ("llama", lambda w: w.add_expert_count(8), "mixture-of-experts"),
    "unknown tensor": (
        "llama",
        lambda w: w.add_tensor("blk.0.attn_sinks.weight", zeros(4)),
        "tensor blk.0.attn_sinks.weight is not part of a llama model",
    ),
    "one part of a split": ("llama", lambda w: w.add_uint16("split.count", 3), "part 1 of 3.*llama-gguf-split --merge"),
    "heads differ": ("llama", lambda w: w.add_array("llama.attention.head_count_kv", [1, 2]), "head_count_kv differs"),
    "longrope": ("llama", lambda w: w.add_string("llama.rope.scaling.type", "longrope"), "'longrope' is not supported"),
    "keys and values differ": (
        "qwen3",
        lambda w: (w.add_key_length(16), w.add_value_length(32)),
        "different lengths",
    ),
    "rotated in part": ("llama", lambda w: (w.add_key_length(16), w.add_rope_dimension_count(8)), "rotated in part"),
    "odd frequency table": (
        "llama",
        lambda w: w.add_tensor("rope_freqs.weight", np.linspace(5, 1, 8, dtype=np.float32)),
        "rope_freqs.weight is not a scaling",
    ),
    "integer tensor": (
        "llama",
        lambda w: w.add_tensor("output.weight", np.zeros((8, 32), dtype=np.int32)),
        "tensor output.weight has type I32, which can't be dequantized",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_files(name: str, tmp_path: Path) -> None:
    architecture, change, message = UNSUPPORTED[name]
    path = tmp_path / "m.gguf"
    writer = tiny_writer(path, architecture)
    change(writer)
    finish(writer)
    with pytest.raises(ModelError, match=message) as caught:
        load_all(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("key", ["block_count", "context_length", "embedding_length", "attention.head_count"])
def test_missing_metadata_is_named(key: str, good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    name = f"llama.{key}".encode()
    path.write_bytes(good.replace(name, name[:-1] + b"x"))
    with pytest.raises(ModelError, match=rf"llama\.{key} is missing"):
        load_all(path)


VOCABULARIES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown model": ({"ggml.model": "bert"}, "tokenizer.ggml.model 'bert' is not one of gpt2, llama, t5"),
    "no tokens": ({"ggml.model": "llama"}, "tokenizer.ggml.tokens is missing"),
    "no merges": ({"ggml.model": "gpt2", "ggml.pre": "gpt-2", "ggml.tokens": ["a"]}, "merges is missing"),
    "a token twice": ({"ggml.model": "llama", "ggml.tokens": ["a", "b", "a"]}, "'a' twice"),
    "lengths differ": ({"ggml.model": "llama", "ggml.tokens": ["a", "b"], "ggml.scores": [1.0]}, "different lengths"),
    "placeholder scores": ({"ggml.model": "llama", "ggml.tokens": ["a", "b", "ab"]}, "scores are all equal.*--token"),
    "bad id": ({"ggml.model": "llama", "ggml.tokens": ["a"], "ggml.bos_token_id": 7}, "bos_token_id 7 is not in"),
    "bad merge": (
        {"ggml.model": "gpt2", "ggml.pre": "gpt-2", "ggml.tokens": ["a", "b"], "ggml.merges": ["a b"]},
        "merges has 'a b'",
    ),
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_bad_vocabularies(name: str, tmp_path: Path, cache: Path) -> None:
    from octavo.models.tokenizer_gguf import build_folder

    values, message = VOCABULARIES[name]
    path = write_vocab(tmp_path / "v.gguf", values)
    with pytest.raises(ModelError, match=message) as caught:
        build_folder(open_gguf(path))
    assert str(path) in str(caught.value)
    assert not list(cache.glob("tokenizers/*")), "a failed build leaves nothing behind"


def test_several_files_in_a_folder(tmp_path: Path, good: bytes) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(good)
    with pytest.raises(ModelError, match=r"several \.gguf files, name one: a\.gguf, b\.gguf"):
        resolve_source(ModelConfig(model=str(tmp_path)), lambda stage, fraction: None)
