"""safetensors: what the library writes is read back exactly; everything broken is one line that names the file."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.errors import ModelError
from octavo.models.safetensors import find_tensors, read_header
from octavo.models.safetensors_values import DTYPES, iter_safetensors


def sample() -> dict[str, Tensor]:
    """One tensor of every type, a scalar, an empty one, and odd sizes that leave the next one unaligned."""
    torch.manual_seed(0)
    out: dict[str, Tensor] = {"odd": torch.randint(0, 255, (3,), dtype=torch.uint8)}
    for name, dtype in DTYPES.items():
        bits = torch.randint(0, 100, (3, 5))
        out[f"t.{name}"] = bits.to(dtype) if dtype != torch.bool else bits > 50
    out["scalar"] = torch.tensor(3.5)
    out["empty"] = torch.empty(0, 7)
    return out


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.float(), b.float())


def test_one_file(tmp_path: Path) -> None:
    tensors = sample()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    stored = find_tensors(tmp_path)
    assert {k: (t.shape, DTYPES[t.format]) for k, t in stored.items()} == {
        k: (tuple(t.shape), t.dtype) for k, t in tensors.items()
    }
    found = dict(iter_safetensors(stored))
    assert found.keys() == tensors.keys()
    assert all(same(found[k], tensors[k]) for k in tensors)


def test_unaligned_data(tmp_path: Path) -> None:
    """Written by hand: float32 right after one byte, which the format allows."""
    values = torch.randn(4)
    header = {
        "b": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "f": {"dtype": "F32", "shape": [4], "data_offsets": [1, 17]},
    }
    body = json.dumps(header).encode()
    data = b"\x07" + values.numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(body)) + body + data)
    found = dict(iter_safetensors(find_tensors(tmp_path)))
    assert torch.equal(found["f"], values)
    assert found["b"].item() == 7


def test_values_outlive_the_iteration(tmp_path: Path) -> None:
    save_file({"a": torch.arange(1000.0)}, tmp_path / "model.safetensors")
    kept = next(iter(iter_safetensors(find_tensors(tmp_path))))[1]
    assert torch.equal(kept, torch.arange(1000.0))


def test_writing_to_a_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    save_file({"a": torch.ones(8)}, tmp_path / "model.safetensors")
    for _ in range(2):
        for _, tensor in iter_safetensors(find_tensors(tmp_path)):
            assert torch.equal(tensor, torch.ones(8))
            tensor.zero_()


SHARDS = {"model-00001-of-00002.safetensors": ["a", "b"], "model-00002-of-00002.safetensors": ["c"]}


def write_shards(folder: Path, weight_map: dict[str, str] | None = None) -> dict[str, Tensor]:
    tensors = {name: torch.randn(4, 4) for names in SHARDS.values() for name in names}
    for file, names in SHARDS.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    where = weight_map or {name: file for file, names in SHARDS.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return tensors


def test_shards(tmp_path: Path) -> None:
    tensors = write_shards(tmp_path)
    found = dict(iter_safetensors(find_tensors(tmp_path)))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[k], tensors[k]) for k in tensors)


def test_the_second_copy_of_some_repositories_is_left_alone(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"other": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    assert set(find_tensors(tmp_path)) == {"a"}


FIRST, SECOND = SHARDS


def _double(folder: Path) -> None:
    save_file({"c": torch.ones(4, 4), "a": torch.ones(4, 4)}, folder / SECOND)


def _remap(name: str, file: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"][name] = file
        path.write_text(json.dumps(index))

    return change


SHARD_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (lambda f: (f / SECOND).unlink(), f"names the file {SECOND}, which is not in the folder"),
    "absent tensor": (_remap("d", SECOND), f"names tensor d, which is not in {SECOND}"),
    "wrong shard": (_remap("a", SECOND), f"places tensor a in {SECOND}, but it is in {FIRST}"),
    "tensor in two shards": (_double, f"tensor a is in two files, {FIRST} and {SECOND}"),
    "path outside": (_remap("c", "../x.safetensors"), r"names the file \.\./x\.safetensors"),
    "no map": (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
    "index is no JSON": (
        lambda f: (f / "model.safetensors.index.json").write_text("{"),
        "index.json: the file is corr",
    ),
    "index is gone": (lambda f: (f / "model.safetensors.index.json").unlink(), "several safetensors files"),
}


@pytest.mark.parametrize("name", SHARD_FAULTS)
def test_faults_of_shards(name: str, tmp_path: Path) -> None:
    change, message = SHARD_FAULTS[name]
    write_shards(tmp_path)
    change(tmp_path)
    with pytest.raises(ModelError, match=message) as caught:
        find_tensors(tmp_path)
    assert "\n" not in str(caught.value)


def header_of(text: str, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text.encode() + data


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> str:
    return json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}})


EIGHT = b"\0" * 8

FAULTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is no safetensors file or is truncated"),
    "short": (b"\x01\x02", "is no safetensors file or is truncated"),
    "huge header": (struct.pack("<Q", 1 << 60) + b"{}", "is no safetensors file or is truncated"),
    "not JSON": (header_of("{nope}"), "the file is corrupt"),
    "not UTF-8": (struct.pack("<Q", 2) + b"\xff\xff", "the file is corrupt"),
    "no object": (header_of("[1]"), "no JSON object"),
    "tensor twice": (header_of('{"a": {}, "a": {}}'), "a appears twice"),
    "malformed entry": (header_of('{"a": {"dtype": "F32"}}'), "entry of tensor a is malformed"),
    "negative offset": (header_of(entry(offsets=(-8, 0)), EIGHT), "entry of tensor a is malformed"),
    "shape of text": (header_of(entry(shape=["x"]), EIGHT), "entry of tensor a is malformed"),
    "unknown type": (header_of(entry(dtype="F4"), EIGHT), "tensor a has the type F4"),
    "data cut off": (header_of(entry(), EIGHT[:5]), r"truncated: tensor a ends at byte \d+, the file has \d+"),
    "size against shape": (header_of(entry(shape=(3,)), EIGHT), r"tensor a \[3\] has 8 bytes of data"),
    "trailing bytes": (header_of(entry(), EIGHT + b"x"), r"tensors end at byte (\d+), the file has \d+"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "is a Git LFS pointer"),
    "backwards": (header_of(entry(offsets=(8, 0)), EIGHT), "tensor a .* has -8 bytes"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_files(name: str, tmp_path: Path) -> None:
    body, message = FAULTS[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(body)
    with pytest.raises(ModelError, match=message) as caught:
        find_tensors(tmp_path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_overlapping_tensors(tmp_path: Path) -> None:
    header = {k: {"dtype": "U8", "shape": [8], "data_offsets": [n, n + 8]} for k, n in (("a", 0), ("b", 4))}
    path = tmp_path / "model.safetensors"
    path.write_bytes(header_of(json.dumps(header), b"\0" * 12))
    with pytest.raises(ModelError, match="tensor b overlaps"):
        read_header(path)


def test_random_damage_is_an_error_or_harmless(tmp_path: Path) -> None:
    save_file(sample(), tmp_path / "model.safetensors")
    path = tmp_path / "model.safetensors"
    good = path.read_bytes()
    end = 8 + struct.unpack("<Q", good[:8])[0]
    rng, errors = random.Random(0), 0
    for _ in range(500):
        body = bytearray(good)
        body[rng.randrange(end)] = rng.randrange(256)
        path.unlink()
        path.write_bytes(body)
        try:
            list(iter_safetensors(find_tensors(tmp_path)))
        except ModelError:
            errors += 1
    assert errors > 100


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_unopened(file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(ModelError, match=rf"only pickled weights \({file}\).*save_pretrained"):
        find_tensors(tmp_path)


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no \.safetensors file \(use --load-format dummy"):
        find_tensors(tmp_path)
