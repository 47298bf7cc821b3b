"""Writes .gguf files that hold a vocabulary and nothing else, and reads the rebuilt tokenizer back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer

from octavo.models import tokenizer_gguf
from octavo.models.gguf_file import open_gguf


def write_vocab(path: Path, values: dict[str, Any]) -> Path:
    """A .gguf with the metadata `tokenizer.<key>`: value for each of `values`; the type follows the Python type."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        name = f"tokenizer.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, bytes):
            writer.add_key_value(name, value, gguf.GGUFValueType.ARRAY, sub_type=gguf.GGUFValueType.UINT8)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


def rebuild(path: Path) -> Tokenizer:
    """The tokenizer of a .gguf, through the cache folder."""
    folder = tokenizer_gguf.build_folder(open_gguf(path))
    assert folder is not None
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
