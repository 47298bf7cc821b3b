"""safetensors checkpoints, single or sharded: headers are checked against the files before any byte is used. Values
are read in safetensors_values.py (torch) and stored_weights.py (raw).

Format: 8 bytes little-endian header length, a JSON object name -> {dtype, shape, data_offsets}, the data. Read here
without the `safetensors` package, so that corruption becomes one line. Pickles are never read.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ModelError
from octavo.models.lfs import refuse_lfs_pointer

ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
"""The format's types that are read -> bytes of a number."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt")

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: `offset` counts from the start of `path`."""

    path: Path
    format: str
    """A name of `ITEM_BYTES`."""
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def find_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint, by name, from headers alone.

    ModelError: no safetensors (the message says how to convert pickles), a missing shard, an index that names absent
    tensors, a tensor in two shards, a truncated or corrupt file.
    """
    index = folder / INDEX
    if index.is_file():
        return _indexed(folder, index)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) > 1 and folder / "model.safetensors" in files:
        files = [folder / "model.safetensors"]
    if not files:
        raise ModelError(_nothing_to_read(folder))
    if len(files) > 1:
        names = ", ".join(f.name for f in files[:4])
        raise ModelError(f"{folder}: has several safetensors files ({names}…) but no {INDEX} that says how they fit")
    return read_header(files[0])


def _nothing_to_read(folder: Path) -> str:
    pickles = sorted(f.name for f in folder.iterdir() if f.suffix in PICKLES)
    if not pickles:
        return f"{folder}: has no .safetensors file (use --load-format dummy to run its shape with random weights)"
    return (
        f"{folder}: has only pickled weights ({pickles[0]}), which can run code when read and are never opened; "
        f'convert: python -c "from transformers import AutoModelForCausalLM as M; '
        f"M.from_pretrained('{folder}').save_pretrained('{folder.name}-safetensors')\""
    )


def _indexed(folder: Path, index: Path) -> dict[str, StoredTensor]:
    weight_map = _parse_json(index, index.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise ModelError(f"{index}: has no weight_map of tensor names to file names")
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(set(weight_map.values())):
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise ModelError(f"{index}: names the file {name}, which is not in the folder: download it again")
        for key, tensor in read_header(path).items():
            if key in tensors:
                raise ModelError(f"{folder}: tensor {key} is in two files, {tensors[key].path.name} and {name}")
            tensors[key] = tensor
    for key, name in weight_map.items():
        if key not in tensors:
            raise ModelError(f"{index}: names tensor {key}, which is not in {name}")
        if tensors[key].path.name != name:
            raise ModelError(f"{index}: places tensor {key} in {name}, but it is in {tensors[key].path.name}")
    return tensors


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys must differ."""
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in names if names.count(key) > 1)} appears twice")
    return out


def _parse_json(path: Path, body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as e:  # covers bad UTF-8 and bad JSON
        raise ModelError(f"{path}: the file is corrupt: {e}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: the file is corrupt: no JSON object")
    return value


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, each checked to lie inside it and to have the bytes that its shape needs."""
    size = path.stat().st_size
    with path.open("rb") as f:
        start = f.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if length < 2 or 8 + length > size:
            refuse_lfs_pointer(path, start)
            raise ModelError(f"{path}: is no safetensors file or is truncated ({size} bytes, header of {length})")
        header = _parse_json(path, f.read(length))
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if name != "__metadata__":
            tensors[name] = _stored(path, name, entry, 8 + length, size)
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if tensor.offset < end:
            raise ModelError(f"{path}: the file is corrupt: tensor {name} overlaps another one")
        end = tensor.offset + tensor.num_bytes
    if tensors and end < size:
        raise ModelError(f"{path}: the file is corrupt: its tensors end at byte {end}, the file has {size}")
    return tensors


def _stored(path: Path, name: str, entry: Any, start: int, size: int) -> StoredTensor:
    try:
        kind, shape, (begin, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
        sound = all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise ModelError(f"{path}: the file is corrupt: the header's entry of tensor {name} is malformed")
    if kind not in ITEM_BYTES:
        raise ModelError(f"{path}: tensor {name} has the type {kind}, which this version does not read")
    if start + end > size:
        raise ModelError(f"{path}: is truncated: tensor {name} ends at byte {start + end}, the file has {size}")
    if end - begin != math.prod(shape) * ITEM_BYTES[kind]:
        raise ModelError(f"{path}: the file is corrupt: tensor {name} {list(shape)} has {end - begin} bytes of data")
    return StoredTensor(path, kind, shape, start + begin, end - begin)
