"""Transformers' classes with Octavo's layers in them on a GPU: tiny random models in bf16 and in fp8 against their
fp32 logits on the CPU.

    PYTHONPATH=python python tests/models/gpu_foreign.py [--only lfm2,gpt2] [--out foreign.json]

A prompt at once, cut in two beside another row, and decode steps from a CUDA graph, as gpu_families.py does it: errors
of the logits' rows as a share of their norm. `tests/run` does not run this file. Exit code 1 when something is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers
from gpu_families import CPU, CUDA, errors_of
from tiny_models import read_config, read_tensors, save
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).parent / "architectures"))

from tiny import make_model, tiny_config

from octavo.models.registry import build_model

MODEL_TYPES = (
    "gpt2",
    "opt",
    "lfm2",
    "minicpm3",
    "gemma4_text",
    "nanochat",
    "modernbert-decoder",
    "bitnet",
    "vaultgemma",
)
BOUNDS = {"none": 0.06, "fp8": 0.3}
"""Of the median row. Tiny layers, all of them rounded, err more than those of real models: with e4m3 weights and wide
activations Gemma 4 is 0.14 off on a CPU, with both rounded 0.25 on an H200."""


def examine(model_type: str, quantization: str) -> dict[str, Any]:
    """Median and greatest errors of a class."""
    model_class = getattr(transformers, str(dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)[model_type]))
    reference = make_model(model_class, tiny_config(transformers.CONFIG_MAPPING[model_type], model_class))
    with tempfile.TemporaryDirectory() as folder:
        config = read_config(save(reference, Path(folder)))
        tensors = {name: tensor.bfloat16().float() for name, tensor in read_tensors(Path(folder))}
    exact = build_model(config, dtype=torch.float32, device=CPU)
    ours = build_model(config, dtype=torch.bfloat16, device=CUDA, quantization=quantization)
    for model in (exact, ours):
        model.load_weights(tensors.items())
    errors = errors_of(exact, ours)
    row: dict[str, Any] = {name: [error.median().item(), error.max().item()] for name, error in errors.items()}
    bound = BOUNDS[quantization]
    failed = any(not error.median().item() < bound for error in errors.values())
    return {"model": model_type, "quantization": quantization, "failed": failed, **row, "replaced": str(ours.replaced)}


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description="Transformers' classes with Octavo's layers on a GPU")
    parser.add_argument("--only", default=",".join(MODEL_TYPES))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for model_type in arguments.only.split(","):
        for quantization in BOUNDS:
            try:
                rows.append(examine(model_type, quantization))
            except Exception:  # the others shall run
                traceback.print_exc()
                rows.append({"model": model_type, "quantization": quantization, "failed": True})
            print(json.dumps(rows[-1]), flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows))
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
