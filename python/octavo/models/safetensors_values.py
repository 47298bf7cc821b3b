"""Values of safetensors as torch tensors: views of the mapped files. Headers and their checks: safetensors.py."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.models.safetensors import StoredTensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def iter_safetensors(tensors: dict[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """(name, values) in file order. Values are views of a private mapping of the file: no copy until they are used."""
    path, buffer = None, None
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].path, item[1].offset)):
        if not tensor.num_bytes:
            yield name, torch.empty(tensor.shape, dtype=DTYPES[tensor.format])
            continue
        if tensor.path != path or buffer is None:
            path = tensor.path
            with path.open("rb") as f:
                buffer = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
        yield name, _view(buffer, tensor)


def _view(buffer: mmap.mmap, tensor: StoredTensor) -> Tensor:
    """The tensor as a view; a copy where its offset is not aligned to its type."""
    count, dtype = math.prod(tensor.shape), DTYPES[tensor.format]
    if tensor.offset % dtype.itemsize:
        body = bytearray(buffer[tensor.offset : tensor.offset + tensor.num_bytes])
        return torch.frombuffer(body, dtype=dtype).reshape(tensor.shape)
    flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=tensor.offset)
    return flat.reshape(tensor.shape)
