"""fp8 checkpoints of tiny image-text models on a GPU, given text: in their kernels and CUDA graphs, against fp32 on the
CPU of the numbers that the checkpoints stand for.

    PYTHONPATH=python python tests/models/gpu_fp8_images.py [--out fp8_images.json]

Errors of the logits' rows as a share of their norm, as gpu_families.py has them. `tests/run` does not run this file.
Exit code 1 when something is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import fp8_checkpoints
import torch
from fp8_checkpoints import Fp8Checkpoint
from gpu_families import CPU, CUDA, errors_of
from test_fp8_images import make, make_experts
from tiny_models import read_config, read_tensors

from octavo.models.registry import build_model

BOUND = 0.3
"""Of the median row: tiny layers, all of them rounded (gpu_foreign.py)."""
DENSE, MIXED = ("qwen3_vl", "gemma3", "llava", "mistral3"), ("qwen3_vl_moe", "qwen3_5_moe")
FORMS = ("hf-tensor", "ct-channel", "hf-block")


def examine(name: str, made: Fp8Checkpoint) -> dict[str, Any]:
    """Median and greatest errors of a checkpoint."""
    config = read_config(made.folder)
    exact = build_model(config, dtype=torch.float32, device=CPU)
    exact.load_weights(made.tensors.items())
    ours = build_model(config, dtype=torch.bfloat16, device=CUDA, quantization="fp8")
    ours.load_weights(read_tensors(made.folder))
    errors = errors_of(exact, ours)
    row: dict[str, Any] = {step: [error.median().item(), error.max().item()] for step, error in errors.items()}
    return {"model": name, "failed": any(not error.median().item() < BOUND for error in errors.values()), **row}


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description="fp8 checkpoints of image-text models on a GPU")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    fp8_checkpoints.BLOCK = (128, 128)
    rows: list[dict[str, Any]] = []
    cases = [(model_type, form) for model_type in DENSE for form in FORMS]
    cases += [(model_type, how) for model_type in MIXED for how in ("together", "apart")]
    for model_type, how in cases:
        name = f"{model_type}, {how}"
        try:
            with tempfile.TemporaryDirectory() as folder:
                is_mixed = model_type in MIXED
                made = (
                    make_experts(model_type, Path(folder), (128, 256), how)
                    if is_mixed
                    else make(model_type, Path(folder), how)
                )
                rows.append(examine(name, made))
        except Exception:  # the others shall run
            traceback.print_exc()
            rows.append({"model": name, "failed": True})
        print(json.dumps(rows[-1]), flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows))
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
