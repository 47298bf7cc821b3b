"""Every native family on a GPU: tiny random models in bf16 against their fp32 logits on the CPU; and real shapes.

    PYTHONPATH=python python tests/models/gpu_families.py tiny [--only gpt-oss,deepseek] [--out families.json]
    PYTHONPATH=python python tests/models/gpu_families.py shapes --only gpt-oss-20b [--out shapes.json]

"tiny": a prompt at once, against fp32; the prompt cut in two beside another row, and decode steps from a CUDA graph,
both against the prompt at once (a router's decision that flips in bf16 changes the tokens after it, too). Printed is
the error of the logits' rows, median and greatest, as a share of the row's norm; the median must stay below `BOUND`.
"shapes": random weights of a real model's sizes through `benches/offline.py`, in a process of its own: decode and
prefill, and the device's free memory before and after.
`tests/run` does not run this file (no test_ prefix). Exit code 1 when something is wrong.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from paged_driver import PagedDriver
from tiny_models import CASES, NATIVE_PREFIXES, make_reference, read_config, read_tensors, save
from torch import Tensor, nn

from octavo.attention.base import make_backend
from octavo.models.base import CausalLM
from octavo.models.registry import build_model

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
BOUND = 0.06
ROOT = Path(__file__).parents[2]
SHAPES = ("gpt-oss-20b", "gemma-3-27b", "deepseek-v2-lite", "glm-4.7-flash", "qwen3-30b-a3b", "qwen3-8b")
LEAK_BYTES = 256 << 20


def models_of(case: str) -> tuple[CausalLM, CausalLM]:
    """(fp32 on the CPU, bf16 on the GPU) of the same weights, which bf16 holds exactly."""
    reference = make_reference(case)
    with tempfile.TemporaryDirectory() as folder:
        config = read_config(save(reference, Path(folder)))
        tensors = {name: tensor.bfloat16().float() for name, tensor in read_tensors(Path(folder))}
    exact = build_model(config, dtype=torch.float32, device=CPU)
    ours = build_model(config, dtype=torch.bfloat16, device=CUDA)
    for model in (exact, ours):
        model.load_weights(tensors.items())
    return exact, ours


class Captured:
    """Decode steps of one row, replayed from one CUDA graph over the driver's tensors. It is captured over a slot of
    nobody: states go on from whatever ran."""

    def __init__(self, driver: PagedDriver, slot: int, spare: int) -> None:
        self.driver, self.slot = driver, slot
        self.ctx, self.token_id_t = driver.context([(spare, [5])])
        self.ctx.max_kv_len = driver.block_table_sb.shape[1] * driver.block_size
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.inference_mode():
            self._run()
            stream.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream):
                self.logits_sv = self._run()

    def _run(self) -> Tensor:
        self.driver.backend.prepare(self.ctx)
        model = self.driver.model
        return model.logits(model.forward(self.token_id_t, self.ctx.position_t, self.ctx))

    def step(self, token_id: int) -> Tensor:
        """As `PagedDriver.step` of one token."""
        ctx, token_id_t = self.driver.context([(self.slot, [token_id])])
        for name in ("row_slot_r", "query_start_r", "kv_len_r", "position_t", "slot_mapping_t"):
            getattr(self.ctx, name).copy_(getattr(ctx, name))
        self.token_id_t.copy_(token_id_t)
        self.graph.replay()
        return self.logits_sv.clone()


def on_gpu(model: CausalLM) -> PagedDriver:
    return PagedDriver(model, block_size=64, dtype=torch.bfloat16, backend=make_backend("triton"), device=CUDA)


def errors_of(exact: CausalLM, ours: CausalLM) -> dict[str, Tensor]:
    """Kind of step -> error of each row."""
    ids = torch.randint(3, 101, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    want = PagedDriver(exact).step([(0, ids)])
    found = {"prompt": on_gpu(ours).step([(0, ids)])}
    driver = on_gpu(ours)
    parts = [driver.step([(2, ids[:17])]), driver.step([(1, [7]), (2, ids[17:30])])[1:]]
    found["cut"] = torch.cat(parts)
    if ours.is_capturable:
        captured = Captured(driver, 2, spare=3)
        found["graph"] = torch.cat([captured.step(token_id) for token_id in ids[30:]])
    whole = found["prompt"]
    wanted = {"prompt": want.to(CUDA), "cut": whole[:30], "graph": whole[30:]}
    return {name: (x - wanted[name]).norm(dim=-1) / wanted[name].norm(dim=-1) for name, x in found.items()}


def run_tiny(only: list[str]) -> list[dict[str, Any]]:
    """One row a case."""
    rows = []
    cases = [case for case, (prefix, _) in CASES.items() if prefix in NATIVE_PREFIXES]
    print(f"{'case':28}{'kernels':9}" + "".join(f"{name:>18}" for name in ("prompt", "cut", "graph")))
    for case in cases:
        if only and not any(case.startswith(name) for name in only):
            continue
        row: dict[str, Any] = {"case": case, "failed": False}
        try:
            exact, ours = models_of(case)
            assert isinstance(ours, nn.Module)
            row["kernels"] = "fused" if getattr(ours, "decode_kernels", None) is not None else "plain"
            errors = errors_of(exact, ours)
            row |= {name: [error.median().item(), error.max().item()] for name, error in errors.items()}
            row["failed"] = any(not error.median() < BOUND for error in errors.values())
        except Exception as error:  # whatever it is, the other families are still of interest
            traceback.print_exc()
            row |= {"failed": True, "error": f"{type(error).__name__}: {error}"[:300]}
        cells = "".join(
            f"{'{:.3f} {:.3f}'.format(*row[n]) if n in row else '-':>18}" for n in ("prompt", "cut", "graph")
        )
        print(f"{case:28}{row.get('kernels', '-'):9}{cells}{'  FAILED' if row['failed'] else ''}", flush=True)
        rows.append(row)
    return rows


def run_shape(shape: str) -> dict[str, Any]:
    """Decode and prefill of random weights, and what memory is left."""
    free_before, _ = torch.cuda.mem_get_info()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        options = [
            "--shape",
            shape,
            "--batch",
            "1,32",
            "--max-model-len",
            "8192",
            "--repeat",
            "2",
            "--num-prompts",
            "8",
        ]
        command = [sys.executable, str(ROOT / "benches" / "offline.py"), *options, "--json", str(out)]
        done = subprocess.run([*command, "decode", "prefill"], check=False)
        results = json.loads(out.read_text())["results"] if done.returncode == 0 else {}
    torch.cuda.synchronize()
    lost = free_before - torch.cuda.mem_get_info()[0]
    row = {"shape": shape, "rc": done.returncode, "seconds": time.perf_counter() - start, "lost_bytes": lost, **results}
    print(f"{shape}: rc {done.returncode}, {row['seconds']:.0f} s, {lost / 2**20:.0f} MiB not given back", flush=True)
    return row | {"failed": done.returncode != 0 or lost > LEAK_BYTES}


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=("tiny", "shapes"))
    parser.add_argument("--only", default="", help="names (tiny: their beginnings), with commas")
    parser.add_argument("--out", type=Path, help="JSON")
    arguments = parser.parse_args()
    only = [name for name in arguments.only.split(",") if name]
    rows = run_tiny(only) if arguments.part == "tiny" else [run_shape(shape) for shape in only or SHAPES]
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=2) + "\n")
    failed = [row.get("case") or row["shape"] for row in rows if row["failed"]]
    print(f"{len(rows)} done, failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
