"""`--deterministic` on a GPU: products and attention bit by bit, an engine over random batches, and what it costs.

    PYTHONPATH=python python tests/kernels/gpu_invariant.py --out invariant.json
        [--parts products,experts,heads,attention,engine,latents,cost]

"products", "experts", "heads": a row's result must not depend on the number of rows (nor on the tile that this number
chooses). "attention": a token's must not depend on its chunk. "engine", "latents": prompts alone and in random batches,
chunked as it comes, give the same tokens (random weights: the least difference shows soon). "cost": decode steps of
Llama-3.1-8B's shape beside the usual ones. The exit code is 1 if anything differed. `tests/run` does not run it (no
test_ prefix).
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from fused_models import LLAMA_8B, QWEN3_06B
from gpu_fused import Step, config_of, make_step, product_shapes
from gpu_moe import make_experts
from gpu_report import Part, Report, capture, run_parts, time_ms
from paged_steps import make_step as make_paged_step
from torch import Tensor

from octavo.attention.base import ForwardContext, make_backend
from octavo.kernels.triton.handles import compiling
from octavo.kernels.triton.invariant_gemm import invariant_product
from octavo.kernels.triton.invariant_heads import invariant_heads
from octavo.kernels.triton.moe import mix
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
ROWS = (1, 2, 16, 17, 33, 64, 65, 128, 129, 300, 1000)
COST_ROWS = (1, 8, 64, 128, 256)
BATCHES, PROMPTS, TOKENS = 200, 24, 12


def check_products(report: Report) -> None:
    for sizes in (LLAMA_8B, QWEN3_06B):
        for op, (n, k) in product_shapes(sizes).items():
            n = n * 2 if op == "gate_up" else min(n, 32768 + 24)
            weight = torch.randn(n, k, device=DEVICE, dtype=BF16) * k**-0.5
            x = torch.randn(1024, k, device=DEVICE, dtype=BF16)
            dtype = torch.float32 if op == "head" else BF16
            with compiling():
                invariant_product(x, weight, None, dtype)
            whole = invariant_product(x, weight, None, dtype)
            expected = x.float() @ weight.float().T
            error = ((whole.float() - expected).norm() / expected.norm()).item()
            report.check(f"{op} {n} x {k}", error, 8e-3)
            for rows in ROWS:
                chosen = torch.randperm(1024, device=DEVICE)[:rows]
                some = invariant_product(x[chosen], weight, None, dtype)
                report.check(
                    f"{op} {n} x {k}: numbers that differ among {rows} rows", (some != whole[chosen]).sum().item(), 0.5
                )
    report.say("products checked")


def check_experts(report: Report) -> None:
    """A mixture's rows must not depend on the number of rows, nor on whom the other rows chose."""
    experts = make_experts()
    x = torch.randn(4096, experts.width, device=DEVICE, dtype=BF16)

    def mixed(rows: Tensor) -> Tensor:
        return mix(experts, rows, invariant_product(rows, experts.router_eh, None, BF16))

    whole = mixed(x)
    for count in (1, 2, 8, 100, 129, 300, 1500):
        chosen = torch.randperm(4096, device=DEVICE)[:count]
        report.check(
            f"experts: numbers that differ among {count} rows", (mixed(x[chosen]) != whole[chosen]).sum().item(), 0.5
        )
    report.say("experts checked")


def check_heads(report: Report) -> None:
    """Latent attention's products, of DeepSeek V3's sizes, must not depend on the number of tokens."""
    up = torch.randn(128, 256, 512, device=DEVICE, dtype=BF16) * 512**-0.5
    for name, weight in (("into latents", up[:, :128]), ("out of latents", up[:, 128:].transpose(1, 2))):
        x = torch.randn(1024, 128, weight.shape[1], device=DEVICE, dtype=BF16)

        def product(rows: Tensor, weight: Tensor = weight) -> Tensor:
            out = rows.new_empty(*rows.shape[:2], weight.shape[2])
            invariant_heads(rows, weight, out)
            return out

        whole, expected = product(x), torch.einsum("thk,hkn->thn", x.float(), weight.float())
        report.check(name, ((whole.float() - expected).norm() / expected.norm()).item(), 8e-3)
        for rows in ROWS:
            chosen = torch.randperm(1024, device=DEVICE)[:rows]
            differ = (product(x[chosen]) != whole[chosen]).sum().item()
            report.check(f"{name}: numbers that differ among {rows} tokens", differ, 0.5)
    report.say("heads checked")


def chunk_of(ctx: ForwardContext, q_thd: torch.Tensor, row: int, first: int, last: int) -> tuple[Any, torch.Tensor]:
    """A step that holds tokens [first, last) of a row's tokens in this step, and their q."""
    start = int(ctx.query_start_r[row])
    count, queries = last - first, int(ctx.query_start_r[row + 1]) - start
    length = ctx.kv_len_r[row : row + 1] - (queries - last)
    tokens = slice(start + first, start + last)
    chunk = ForwardContext(
        kv_cache=ctx.kv_cache,
        block_table_sb=ctx.block_table_sb,
        row_slot_r=ctx.row_slot_r[row : row + 1].clone(),
        query_start_r=torch.tensor([0, count], dtype=torch.int32, device=DEVICE),
        kv_len_r=length.clone(),
        position_t=ctx.position_t[tokens],
        slot_mapping_t=ctx.slot_mapping_t[tokens],
        block_size=ctx.block_size,
        num_rows=1,
        num_decode_rows=int(count == 1),
        num_tokens=count,
        max_query_len=count,
        max_kv_len=ctx.max_kv_len,
    )
    return chunk, q_thd[tokens]


def check_attention(report: Report) -> None:
    backend = make_backend("triton", deterministic=True)
    plain: dict[str, Any] = {"heads": 32, "kv_heads": 8, "dim": 128}
    latent: dict[str, Any] = {"heads": 16, "kv_heads": 1, "dim": 576, "value_dim": 512}
    for name, sizes in (("all", plain), ("window", {**plain, "window": 300}), ("latents", latent)):
        step = make_paged_step(
            [(1, 1), (1, 700), (300, 900), (130, 130), (77, 2000)],
            block_size=64,
            dtype=BF16,
            device="cuda",
            **sizes,
        )
        whole = backend.attend(step.spec, step.q_thd, step.k_tgd, step.v_tgd, step.ctx)
        for row in range(5):
            start, end = (int(step.ctx.query_start_r[i]) for i in (row, row + 1))
            cuts = sorted({0, end - start, *(random.randrange(end - start) for _ in range(3)), end - start - 1})
            for first, last in itertools.pairwise(cuts):
                ctx, q_thd = chunk_of(step.ctx, step.q_thd, row, first, last)
                part = backend.attend_cached(step.spec, q_thd, ctx)
                differ = (part != whole[start + first : start + last]).sum().item()
                report.check(f"{name} row {row} tokens {first}..{last}: numbers that differ", differ, 0.5)
    report.say("attention checked")


def check_engine(report: Report, shape: str = "qwen3-0.6b", num_layers: int = 12, batches: int = BATCHES) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "benches"))
    from shapes import write_shape

    from octavo import LLM, SamplingParams

    rng = random.Random(0)
    prompts = [[rng.randrange(100, 10000) for _ in range(rng.choice((3, 20, 70, 200, 400)))] for _ in range(PROMPTS)]
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)

    def ids(llm: Any, batch: list[list[int]]) -> list[list[int]]:
        return [list(result.outputs[0].token_ids) for result in llm.generate(batch, params)]

    with tempfile.TemporaryDirectory() as folder:
        write_shape(shape, Path(folder), num_layers)
        options = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 1024, "load_format": "dummy"}
        with LLM(model=folder, deterministic=True, gpu_memory_utilization=0.3, **options) as llm:
            alone = [ids(llm, [prompt])[0] for prompt in prompts]
            report.say(f"prompts alone: {len({tuple(x) for x in alone})} different outputs")
            differing = 0
            for _ in range(batches):
                chosen = rng.sample(range(PROMPTS), rng.randrange(1, PROMPTS + 1))
                fillers = [[rng.randrange(100, 10000) for _ in range(rng.randrange(1, 300))] for _ in range(8)]
                fillers = fillers[: rng.randrange(9)]
                found = ids(llm, [*fillers, *(prompts[i] for i in chosen)])[len(fillers) :]
                differing += sum(tokens != alone[i] for tokens, i in zip(found, chosen, strict=True))
        report.check(f"{shape}: outputs that differ in {batches} random batches", differing, 0.5)
    report.say(f"engine of {shape} checked")


def check_latents(report: Report) -> None:
    """Latent attention and many experts, whose first layer has none."""
    check_engine(report, "deepseek-v2-lite", 4, 60)


@torch.inference_mode()
def time_cost(report: Report) -> None:
    models = {}
    for name, options in {"usual": {}, "deterministic": {"deterministic": True}}.items():
        model = build_model(config_of(LLAMA_8B, LLAMA_8B.layers), dtype=BF16, device=DEVICE, **options)
        assert isinstance(model, Decoder)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
        model.set_attention_backend(make_backend("triton", deterministic=name == "deterministic"))
        models[name] = model
    for context in (190, 1024):
        for rows in COST_ROWS:
            row: dict[str, Any] = {"rows": rows, "context": context}
            for name, model in models.items():
                step: Step = make_step(model, LLAMA_8B, [context] * rows, 256 if context < 256 else 4096)
                with compiling():
                    step.logits()
                row[name] = time_ms(capture(step.logits))
                del step
                torch.cuda.empty_cache()
            report.results.append(row)
            report.say(
                f"{rows} x {context}: usual {row['usual']:.3f} ms, deterministic {row['deterministic']:.3f} ms"
                f" ({100 * (row['deterministic'] / row['usual'] - 1):+.0f}%)"
            )


PARTS: dict[str, list[Part]] = {
    "products": [check_products],
    "experts": [check_experts],
    "heads": [check_heads],
    "attention": [check_attention],
    "engine": [check_engine],
    "latents": [check_latents],
    "cost": [time_cost],
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("invariant.json"))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--budget", type=float, default=90.0)
    args = parser.parse_args()
    torch.manual_seed(int(time.time()))
    report = Report()
    run_parts(report, PARTS, args.parts, args.out, budget_s=args.budget)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
