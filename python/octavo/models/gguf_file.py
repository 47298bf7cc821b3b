"""A .gguf file's header: metadata, and where each tensor lies. Every offset is checked against the file before use.

The `gguf` package's reader makes several numpy arrays per vocabulary entry (1.7 s for 49k tokens); this one reads the
same format in a tenth of that and turns any corruption into one line. Not here: what the metadata means
(gguf_config.py, tokenizer_gguf.py) and the tensors' values (gguf_tensors.py).
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from octavo.errors import ModelError
from octavo.models.lfs import refuse_lfs_pointer
from octavo.models.mapped import release_pages

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""Value type of the format -> struct code."""
STRING = 8
ARRAY = 9

Metadata = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor: `type` is the ggml type's number, `shape` is in torch's order (rows first), `offset` counts from the
    start of the file."""

    name: str
    type: int
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A parsed header. `header` is its bytes (for cache keys); `buffer` maps the whole file."""

    path: Path
    metadata: Metadata
    tensors: dict[str, GGUFTensor]
    header: memoryview
    buffer: mmap.mmap

    def data(self, tensor: GGUFTensor) -> memoryview:
        """The tensor's raw bytes, mapped."""
        return memoryview(self.buffer)[tensor.offset : tensor.offset + tensor.num_bytes]

    def release(self, tensor: GGUFTensor) -> None:
        """The tensor's pages leave memory until somebody reads them."""
        release_pages(self.buffer, tensor.offset, tensor.num_bytes)


class _Cursor:
    """Reads values one after another; refuses to read past the end."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.at = 0
        self.end = len(buffer)

    def take(self, num_bytes: int, what: str) -> int:
        """Advance over `num_bytes`; where they start."""
        start = self.at
        if num_bytes > self.end - start:
            raise ModelError(f"{self.path}: the file is truncated or corrupt: {what} at byte {start} leaves the file")
        self.at = start + num_bytes
        return start

    def unpack(self, code: str, what: str) -> Any:
        return struct.unpack_from(code, self.buffer, self.take(struct.calcsize(code), what))[0]

    def string(self, what: str) -> str:
        length = self.unpack("<Q", what)
        start = self.take(length, what)
        try:
            return self.buffer[start : start + length].decode()
        except UnicodeDecodeError:
            raise ModelError(f"{self.path}: the file is corrupt: {what} is not UTF-8 text") from None

    def value(self, kind: int, what: str) -> Any:
        if kind == STRING:
            return self.string(what)
        if kind == ARRAY:
            return self.array(what)
        if kind not in SCALARS:
            raise ModelError(f"{self.path}: the file is corrupt: {what} has the unknown value type {kind}")
        return self.unpack(SCALARS[kind], what)

    def array(self, what: str) -> list[Any]:
        kind = self.unpack("<I", what)
        count = self.unpack("<Q", what)
        if kind == STRING:
            if count > (self.end - self.at) // 8:
                self.take(count * 8, what)
            return [self.string(what) for _ in range(count)]
        if kind not in SCALARS:
            raise ModelError(f"{self.path}: the file is corrupt: {what} is an array of the unknown type {kind}")
        code = SCALARS[kind][1]
        start = self.take(count * struct.calcsize("<" + code), what)
        return list(struct.unpack_from(f"<{count}{code}", self.buffer, start))


def open_gguf(path: Path) -> GGUFFile:
    """Read a header. ModelError: not a GGUF, truncated, corrupt, an unknown tensor type, or one part of a split."""
    try:
        with path.open("rb") as f:
            buffer = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as e:  # ValueError: an empty file can't be mapped
        raise ModelError(f"{path}: can't be read: {e}") from None
    cursor = _Cursor(path, buffer)
    num_tensors, num_values = _read_preamble(cursor)
    metadata: Metadata = {}
    for _ in range(num_values):
        key = cursor.string("a metadata key")
        if key in metadata:
            raise ModelError(f"{path}: the file is corrupt: the metadata key {key} appears twice")
        metadata[key] = cursor.value(cursor.unpack("<I", key), key)
    if metadata.get("split.count", 1) > 1:
        raise ModelError(
            f"{path}: is part {metadata.get('split.no', 0) + 1} of {metadata['split.count']}: "
            "merge the parts first (llama-gguf-split --merge)"
        )
    tensors = _read_tensors(cursor, num_tensors, _alignment(path, metadata))
    return GGUFFile(path, metadata, tensors, memoryview(buffer)[: cursor.at], buffer)


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """(number of tensors, number of metadata values)."""
    if cursor.buffer[:4] != MAGIC:
        refuse_lfs_pointer(cursor.path, cursor.buffer[:8])
        raise ModelError(f"{cursor.path}: is not a GGUF file (its first bytes are {cursor.buffer[:4]!r})")
    cursor.take(4, "the magic number")
    version = cursor.unpack("<I", "the version")
    if version & 0xFFFF == 0:
        raise ModelError(f"{cursor.path}: is a big-endian GGUF; convert it with gguf-convert-endian")
    if version not in VERSIONS:
        raise ModelError(f"{cursor.path}: GGUF version {version} is not one of {VERSIONS}")
    return cursor.unpack("<Q", "the tensor count"), cursor.unpack("<Q", "the metadata count")


def _alignment(path: Path, metadata: Metadata) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ModelError(f"{path}: the file is corrupt: general.alignment is {alignment!r}, not a power of two")
    return alignment


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GGUFTensor]:
    entries = []
    for _ in range(count):
        name = cursor.string("a tensor's name")
        num_dims = cursor.unpack("<I", name)
        if num_dims > MAX_DIMS:
            raise ModelError(f"{cursor.path}: the file is corrupt: tensor {name} has {num_dims} dimensions")
        dims = tuple(cursor.unpack("<Q", name) for _ in range(num_dims))
        entries.append((name, dims[::-1], cursor.unpack("<I", name), cursor.unpack("<Q", name)))
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise ModelError(f"{cursor.path}: the file is corrupt: tensor {name} appears twice")
        num_bytes = _tensor_bytes(cursor.path, name, shape, kind)
        if start + offset + num_bytes > cursor.end:
            raise ModelError(
                f"{cursor.path}: the file is truncated: tensor {name} ends at byte {start + offset + num_bytes}, "
                f"the file has {cursor.end}"
            )
        tensors[name] = GGUFTensor(name, kind, shape, start + offset, num_bytes)
    return tensors


@cache
def _block_sizes() -> dict[int, tuple[int, int]]:
    """ggml type -> (elements, bytes) of its block."""
    from gguf.constants import GGML_QUANT_SIZES

    return {int(kind): (int(block), int(num_bytes)) for kind, (block, num_bytes) in GGML_QUANT_SIZES.items()}


def _tensor_bytes(path: Path, name: str, shape: tuple[int, ...], kind: int) -> int:
    """Size of a tensor by its type's block: rows are made of whole blocks."""
    if kind not in _block_sizes():
        raise ModelError(f"{path}: tensor {name} has the unknown type {kind}")
    block, block_bytes = _block_sizes()[kind]
    if not shape or 0 in shape or shape[-1] % block:
        raise ModelError(f"{path}: the file is corrupt: tensor {name} has the shape {shape}, rows of {block}s")
    return math.prod(shape) // block * block_bytes
