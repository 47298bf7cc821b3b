"""The small kernels of a step, each with inputs of its own, what it must give, and how much it moves: gpu_small.py
times them at true sizes, test_small_kernels.py runs them at tiny ones.

Not here: attention of heads, products, experts, samplers and recurrent layers, which have scripts of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.reference import apply_updates as reference_updates
from octavo.kernels.reference import gated as reference_gated
from octavo.kernels.reference import penalties as reference_penalties
from octavo.kernels.reference import token_mask as reference_mask
from octavo.kernels.reference import weighed_sum as reference_weighed
from octavo.kernels.reference.invariant_gemm import invariant_product as reference_product
from octavo.kernels.reference.invariant_heads import invariant_heads as reference_heads
from octavo.kernels.reference.kv_write import write_kv as reference_write
from octavo.kernels.reference.last_rows import SampledInputs
from octavo.kernels.reference.last_rows import gather_last_rows as reference_last_rows
from octavo.kernels.reference.latent_write import latent_write as reference_latent_write
from octavo.kernels.reference.paged_attention import paged_attention
from octavo.kernels.reference.prepare import prepare_step as reference_prepare
from octavo.kernels.reference.rms_norm import add_rms_norm as reference_add_norm
from octavo.kernels.reference.rms_norm import rms_norm as reference_norm
from octavo.kernels.reference.rotate_write import rotate_write as reference_rotate
from octavo.kernels.triton import (
    apply_updates,
    gated,
    kv_write,
    last_rows,
    latent_write,
    penalties,
    prepare,
    quantize_rows,
    quantized_joins,
    rms_norm,
    rotate_write,
    scale_product,
    token_mask,
    weighed_sum,
)
from octavo.kernels.triton.invariant_gemm import invariant_product, product_launch
from octavo.kernels.triton.invariant_heads import invariant_heads
from octavo.kernels.triton.paged_latent import paged_latent, plan_latent

EPS = 1e-5
BLOCK = 64
"""Positions of a block of the cache."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where tensors lie, and their types."""

    device: torch.device
    dtype: torch.dtype
    number: torch.dtype
    """Of quantized rows: e4m3, or fp32 where nothing rounds to it as it should (Triton's interpreter)."""
    pdl: bool

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def wide(self, *shape: int) -> Tensor:
        return torch.rand(shape, device=self.device) + 0.5

    def ints(self, numbers: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.as_tensor(numbers, device=self.device).to(dtype)

    def places(self, tokens: int) -> Tensor:
        """One of each token, in blocks that lie about."""
        blocks = torch.randperm(-(-tokens // BLOCK), device=self.device) + 1
        token_t = torch.arange(tokens, device=self.device)
        return blocks[token_t // BLOCK] * BLOCK + token_t % BLOCK

    def cache(self, tokens: int, parts: int, heads: int, dim: int) -> Tensor:
        return self.random(2 + tokens // BLOCK, parts, heads, BLOCK, dim)

    def bytes(self, *counts: int) -> int:
        """Of so many numbers."""
        return sum(counts) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel with its inputs."""

    run: Callable[[], Any]
    """Launch; what came of it."""
    expected: Callable[[], list[Tensor]]
    """What the next run must give, up to rounding; changes nothing."""
    num_bytes: int
    """That must be read and written at least."""
    num_flops: int = 0
    results: Callable[[Any], list[Tensor]] = list
    """Of what `run` gave, tensors as expected."""

    @property
    def rounds(self) -> bool:
        """Whether the results were numbers in e4m3."""
        return self.results is widened or self.results is widened_norm

    def error(self) -> float:
        """Largest of the results' relative errors (norms); infinite where something is no number."""
        wanted, found = self.expected(), self.results(self.run())
        pairs = [(w.float(), f.float()) for w, f in zip(wanted, found, strict=True)]
        if not all(torch.equal(w.isfinite(), f.isfinite()) for w, f in pairs):
            return float("inf")
        finite = [(w.nan_to_num(0, 0, 0), f.nan_to_num(0, 0, 0)) for w, f in pairs]
        return max(((f - w).norm() / w.norm().clamp_min(1e-30)).item() for w, f in finite)


def widened(quantized: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The rows of (numbers, scales)."""
    number, scale = quantized
    return [number.float() * scale[:, None]]


def widened_norm(found: tuple[tuple[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """Of a norm in e4m3, and the residual."""
    return [*widened(found[0]), found[1]]


def after(change: Callable[..., Any], changed: list[Tensor], *args: Any, **options: Any) -> Callable[[], list[Tensor]]:
    """What tensors become by a reference that changes its first arguments in place."""

    def expected() -> list[Tensor]:
        copies = [tensor.clone() for tensor in changed]
        change(*copies, *args, **options)
        return copies

    return expected


def writes(place: Place, tokens: int, heads: int, dim: int) -> Case:
    k, v = place.random(tokens, heads, dim), place.random(tokens, heads, dim)
    cache, where = place.cache(tokens, 2, heads, dim), place.places(tokens)

    def run() -> list[Tensor]:
        kv_write.write_kv(k, v, cache, where)
        return [cache]

    expected = after(lambda cache: reference_write(k, v, cache, where), [cache])
    return Case(run, expected, place.bytes(4 * tokens * heads * dim) + 8 * tokens)


def rotates(place: Place, tokens: int, heads: int, kv_heads: int, dim: int) -> Case:
    qkv, angles = place.random(tokens, (heads + 2 * kv_heads) * dim), place.wide(tokens, dim)
    cache, where = place.cache(tokens, 2, kv_heads, dim), place.places(tokens)
    gains, options = (place.random(dim), place.random(dim)), {"num_heads": heads, "norm_eps": EPS}

    def run() -> list[Tensor]:
        q = rotate_write.rotate_write(qkv, angles, cache, where, *gains, **options, pdl=place.pdl)
        return [q, cache]

    def expected() -> list[Tensor]:
        copy = cache.clone()
        return [reference_rotate(qkv, angles, copy, where, *gains, **options), copy]

    moved = 2 * tokens * (heads + 2 * kv_heads) * dim
    return Case(run, expected, place.bytes(moved) + 4 * tokens * dim + 8 * tokens)


def prepares(place: Place, rows: int, queries: int, length: int) -> Case:
    tokens, width = rows * queries, -(-length // BLOCK)
    table = place.ints(torch.randint(1, 9999, (1, rows + 1, width)))
    ids, position = place.ints(torch.randint(-1, 999, (tokens,))), place.ints(torch.arange(tokens) % length)
    slots, starts = place.ints(torch.randperm(rows)), place.ints(torch.arange(rows + 1) * queries)
    arrays = ids, position, slots, starts, table, place.ints(torch.randint(0, 999, (rows + 1,)))

    def run() -> list[Tensor]:
        return list(prepare.prepare_step(*arrays, block_size=BLOCK))

    return Case(run, lambda: list(reference_prepare(*arrays, block_size=BLOCK)), 36 * tokens + 12 * rows)


def updates(place: Place, count: int, copies: int, layers: int, kv_heads: int, dim: int) -> Case:
    """Entries of a block table, and copies of blocks."""
    table = place.ints(torch.zeros(max(count, 1), 8))
    update = torch.stack((torch.arange(count), torch.arange(count) % 8, torch.arange(count) + 1), 1)
    pairs = place.ints(torch.arange(2 * copies).view(copies, 2))
    caches = [place.random(2 * copies + 1, 2, kv_heads, BLOCK, dim) for _ in range(layers)]
    entries = place.ints(update)

    def run() -> list[Tensor]:
        apply_updates.apply_updates(table, entries, caches, pairs)
        return [table, *caches]

    expected = after(
        lambda table, *caches: reference_updates.apply_updates(table, entries, caches, pairs), [table, *caches]
    )
    return Case(run, expected, 16 * count + place.bytes(4 * copies * layers * kv_heads * BLOCK * dim))


def norms(place: Place, tokens: int, width: int, kind: str) -> Case:
    """Kinds: plain; add, after the residual's addition; parts, of a product in two parts; quantized, add in e4m3."""
    x, residual, gain = place.random(tokens, width), place.random(tokens, width), place.random(width)
    parts, count = torch.randn((2, tokens, width), device=place.device), tokens * width
    pdl = {"pdl": place.pdl}
    if kind == "plain":
        expected = lambda: [reference_norm(x, gain, EPS)]  # noqa: E731
        return Case(lambda: [rms_norm.rms_norm(x, gain, EPS, **pdl)], expected, place.bytes(2 * count))
    if kind == "parts":
        return Case(
            lambda: list(rms_norm.add_parts_rms_norm(parts, residual, gain, EPS, **pdl)),
            lambda: list(reference_add_norm(parts.sum(0).to(place.dtype), residual.clone(), gain, EPS)),
            place.bytes(3 * count) + 8 * count,
        )
    if kind == "add":
        source = x.clone()

        def run() -> list[Tensor]:
            return list(rms_norm.add_rms_norm(source, residual, gain, EPS, **pdl))

        return Case(run, lambda: list(reference_add_norm(source, residual, gain, EPS)), place.bytes(4 * count))

    moved = place.bytes(3 * count) + count + 4 * tokens
    return Case(
        lambda: quantized_joins.add_rms_norm(x, residual, gain, EPS, **pdl),
        lambda: list(reference_add_norm(x, residual, gain, EPS)),
        moved,
        results=widened_norm,
    )


def activations(place: Place, tokens: int, inner: int, kind: str) -> Case:
    """Kinds: silu; gelu; quantized, silu in e4m3."""
    product, count = place.random(tokens, 2 * inner), tokens * inner
    expected = reference_gated.gated_gelu if kind == "gelu" else reference_gated.gated_silu
    if kind != "quantized":
        act = gated.gated_gelu if kind == "gelu" else gated.gated_silu
        return Case(lambda: [act(product, pdl=place.pdl)], lambda: [expected(product)], place.bytes(3 * count))

    moved = place.bytes(2 * count) + count + 4 * tokens
    run = partial(quantized_joins.gated_silu, product, pdl=place.pdl)
    return Case(run, lambda: [expected(product)], moved, results=widened)


def weighed(place: Place, tokens: int, width: int) -> Case:
    tensors = (
        place.random(tokens, width),
        place.random(1, width),
        place.random(tokens, width),
        place.random(tokens, width),
    )
    return Case(
        lambda: [weighed_sum.weighed_sum(*tensors, pdl=place.pdl)],
        lambda: [reference_weighed.weighed_sum(*tensors)],
        place.bytes(4 * tokens * width),
    )


def quantizes(place: Place, tokens: int, width: int) -> Case:
    x, number = place.random(tokens, width), torch.empty((tokens, width), dtype=place.number, device=place.device)
    scale = place.wide(tokens)

    def run() -> tuple[Tensor, Tensor]:
        quantize_rows.quantize_launch(x, number, scale).run(pdl=place.pdl)
        return number, scale

    return Case(run, lambda: [x], place.bytes(tokens * width) + tokens * width + 4 * tokens, results=widened)


def scales(place: Place, tokens: int, width: int) -> Case:
    """A product by its rows' and columns' scales."""
    out, rows, columns = place.random(tokens, width), place.wide(tokens), place.wide(width)

    def expected() -> list[Tensor]:
        return [(out.float() * (rows[:, None] * columns)).to(place.dtype)]

    return Case(
        lambda: [scale_product.scale_product(out, rows, columns, None)], expected, place.bytes(2 * tokens * width)
    )


def latent_writes(place: Place, tokens: int, heads: int, latent: int, rotated: int) -> Case:
    query, low, key = place.random(tokens, heads, rotated), place.random(tokens, latent), place.random(tokens, rotated)
    angles, gain, where = place.wide(tokens, rotated), place.random(latent), place.places(tokens)
    cache, q = place.cache(tokens, 1, 1, latent + rotated), place.random(tokens, heads, latent + rotated)
    options = {"eps": EPS, "is_interleaved": True}

    def run() -> list[Tensor]:
        latent_write.latent_write(query, low, key, angles, gain, cache, where, q, **options, pdl=place.pdl)
        return [cache, q]

    def change(cache: Tensor, q: Tensor) -> None:
        reference_latent_write(query, low, key, angles, gain, cache, where, q, **options)

    moved = 2 * tokens * (heads * rotated + latent + rotated)
    return Case(run, after(change, [cache, q]), place.bytes(moved) + 4 * tokens * rotated + 8 * tokens)


def latents(place: Place, rows: int, queries: int, length: int, heads: int, latent: int, rotated: int) -> Case:
    """Attention of decode rows (of one query) or prompts over a cache of latents."""
    dim, width = latent + rotated, -(-length // BLOCK)
    cache, q = place.cache(rows * width * BLOCK, 1, 1, dim), place.random(rows * queries, heads, dim)
    table = place.ints(torch.randperm(rows * width).view(rows, width) + 1)
    slots, starts = place.ints(torch.arange(rows)), place.ints(torch.arange(rows + 1) * queries)
    arrays = q, cache, table, slots, starts, place.ints(torch.full((rows,), length))
    is_decode, out = queries == 1, place.random(rows * queries, heads, latent)
    plan = plan_latent(rows, heads, latent, place.dtype.itemsize, length, is_decode=is_decode)
    part, stat = (torch.empty(max(1, size), device=place.device) for size in plan.scratch_sizes(rows))
    scale = dim**-0.5

    def run() -> list[Tensor]:
        paged_latent(
            *arrays, out, plan, part, stat,
            first_row=0, num_rows=rows, max_query_len=queries, scale=scale, is_decode=is_decode,
        )  # fmt: skip
        return [out]

    def expected() -> list[Tensor]:
        options = {"window": 0, "soft_cap": 0.0, "value_dim": latent}
        return [paged_attention(*arrays, num_rows=rows, scale=scale, **options)]

    seen = rows * (queries * (length - queries) + queries * (queries + 1) // 2)
    moved = rows * length * dim + rows * queries * heads * (dim + latent)
    return Case(run, expected, place.bytes(moved), 2 * seen * heads * (dim + latent))


def products(place: Place, rows: int, n: int, k: int) -> Case:
    """Of the deterministic mode."""
    x, weight = place.random(rows, k), place.random(n, k)

    def run() -> list[Tensor]:
        if place.device.type == "cuda":
            return [invariant_product(x, weight, None, place.dtype)]
        y = torch.empty(rows, n, dtype=place.dtype)
        product_launch(x, weight, None, y).run(pdl=False)
        return [y]

    expected = lambda: [reference_product(x, weight, None, place.dtype)]  # noqa: E731
    return Case(run, expected, place.bytes(n * k + rows * (n + k)), 2 * rows * n * k)


def head_products(place: Place, tokens: int, heads: int, k: int, n: int) -> Case:
    """Of the deterministic mode."""
    x, weight, out = place.random(tokens, heads, k), place.random(heads, k, n), place.random(tokens, heads, n)

    def run() -> list[Tensor]:
        invariant_heads(x, weight, out)
        return [out]

    expected = after(lambda out: reference_heads(x, weight, out), [out])
    return Case(run, expected, place.bytes(heads * (k * n + tokens * (k + n))), 2 * tokens * heads * k * n)


def penalizes(place: Place, rows: int, vocab: int) -> Case:
    """All three penalties; one token in 50 was seen."""
    logits, slots = torch.randn((rows, vocab), device=place.device), place.ints(torch.randperm(rows), torch.int64)
    in_prompt = torch.rand((rows, vocab), device=place.device) < 0.01
    count = place.ints(torch.rand((rows, vocab), device=place.device) < 0.01)
    numbers = place.wide(rows), place.wide(rows), place.wide(rows)
    seen = int((in_prompt | (count > 0)).sum())

    def run() -> list[Tensor]:
        penalties.apply_penalties(logits, slots, in_prompt, count, *numbers)
        return [logits]

    def change(logits: Tensor) -> None:
        reference_penalties.apply_penalties(logits, slots, in_prompt, count, *numbers)

    return Case(run, after(change, [logits]), 5 * rows * vocab + 8 * seen)


def masks(place: Place, rows: int, vocab: int) -> Case:
    """A grammar that allows one run of 64 tokens."""
    logits, slots = torch.randn((rows, vocab), device=place.device), place.ints(torch.randperm(rows), torch.int64)
    allowed = place.ints(torch.zeros(rows, -(-vocab // 32)))
    allowed[:, 1:3] = -1

    def run() -> list[Tensor]:
        token_mask.apply_token_mask(logits, slots, allowed)
        return [logits]

    expected = after(lambda logits: reference_mask.apply_token_mask(logits, slots, allowed), [logits])
    return Case(run, expected, rows * vocab // 8 + 4 * rows * (vocab - 64))


def last_of_rows(place: Place, rows: int, queries: int, width: int) -> Case:
    hidden, slots = place.random(rows * queries, width), place.ints(torch.arange(rows))
    arrays = hidden, place.ints(torch.arange(rows + 1) * queries), slots, place.ints(torch.full((rows,), 900))
    out = SampledInputs(place.random(rows, width), slots.clone(), slots.clone())

    def run() -> list[Tensor]:
        last_rows.gather_last_rows(*arrays, out, count=rows, null_slot=rows)
        return list(out)

    def change(*out: Tensor) -> None:
        reference_last_rows(*arrays, SampledInputs(*out), count=rows, null_slot=rows)

    return Case(run, after(change, list(out)), place.bytes(2 * rows * width) + 20 * rows)


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: a kernel at one size."""

    kernel: str
    label: str
    make: Callable[..., Case]
    sizes: dict[str, Any]
    tiny: dict[str, Any]

    def case(self, place: Place, *, is_tiny: bool = False) -> Case:
        return self.make(place, **(self.sizes | self.tiny if is_tiny else self.sizes))


LLAMA = {"heads": 32, "kv_heads": 8, "dim": 128}
LITE, V3 = ({"heads": heads, "latent": 512, "rotated": 64} for heads in (16, 128))
"""DeepSeek V2 Lite's and V3's."""
TINY = {"heads": 4, "kv_heads": 2, "dim": 16}
TINY_LATENTS = {"heads": 3, "latent": 32, "rotated": 16}
FEW, SOME = {"tokens": 3}, {"tokens": 3, "width": 48}
NO_COPIES = {"copies": 0, "layers": 0, "kv_heads": 8, "dim": 128}
COPIES = {"count": 0, "copies": 16, "layers": 32, "kv_heads": 8, "dim": 128}


def _by_tokens(tokens: int) -> list[Row]:
    """What decode steps and prompts both have."""
    name, wide = f"{tokens} tokens", {"tokens": tokens, "width": 4096}
    found = [
        Row("kv_write", name, writes, {"tokens": tokens, "heads": 8, "dim": 128}, {**FEW, "dim": 16}),
        Row("rotate_write", name, rotates, {"tokens": tokens, **LLAMA}, {**FEW, **TINY}),
        Row("quantize_rows", f"{name} of 4096", quantizes, wide, SOME),
        Row("latent_write", f"{name}, 16 heads", latent_writes, {"tokens": tokens, **LITE}, {**FEW, **TINY_LATENTS}),
    ]
    for kind in ("plain", "add", "quantized"):
        found.append(Row(f"rms_norm, {kind}", f"{name} of 4096", norms, {**wide, "kind": kind}, SOME))
    for kind in ("silu", "gelu", "quantized"):
        sizes = {"tokens": tokens, "inner": 14336, "kind": kind}
        found.append(Row(f"gated, {kind}", f"{name} of 14336", activations, sizes, {**FEW, "inner": 40}))
    return found


def _latent(label: str, rows: int, queries: int, length: int, sizes: dict[str, int]) -> Row:
    tiny = {"rows": 2, "queries": 1 if queries == 1 else 9, "length": 70, **TINY_LATENTS}
    return Row("paged_latent", label, latents, {"rows": rows, "queries": queries, "length": length, **sizes}, tiny)


def _product(rows: int) -> Row:
    return Row(
        "invariant_gemm",
        f"{rows} x 4096 -> 6144",
        products,
        {"rows": rows, "n": 6144, "k": 4096},
        {"rows": 3, "n": 40, "k": 64},
    )


ROWS: tuple[Row, ...] = (
    *_by_tokens(64),
    *_by_tokens(8192),
    Row("rms_norm, parts", "192 tokens of 4096", norms, {"tokens": 192, "width": 4096, "kind": "parts"}, SOME),
    Row("weighed_sum", "8192 tokens of 2048", weighed, {"tokens": 8192, "width": 2048}, SOME),
    Row("scale_product", "8192 tokens of 6144", scales, {"tokens": 8192, "width": 6144}, SOME),
    Row("prepare", "256 rows of 1", prepares, {"rows": 256, "queries": 1, "length": 4096}, {"rows": 5, "length": 90}),
    Row(
        "prepare",
        "8 rows of 1024",
        prepares,
        {"rows": 8, "queries": 1024, "length": 4096},
        {"queries": 9, "length": 90},
    ),
    Row("apply_updates", "256 entries", updates, {"count": 256, **NO_COPIES}, {"count": 5}),
    Row("apply_updates", "16 blocks, 32 layers", updates, COPIES, {"copies": 2, "layers": 2, "kv_heads": 2, "dim": 16}),
    _latent("64 x 1k, 16 heads", 64, 1, 1024, LITE),
    _latent("64 x 1k, 128 heads", 64, 1, 1024, V3),
    _latent("1 x 8k, 16 heads", 1, 1, 8192, LITE),
    _latent("prompt of 2k, 16 heads", 1, 2048, 2048, LITE),
    *(_product(rows) for rows in (1, 64, 8192)),
    *(
        Row(
            "invariant_heads",
            f"{tokens} tokens, 128 x (128 -> 512)",
            head_products,
            {"tokens": tokens, "heads": 128, "k": 128, "n": 512},
            {"tokens": 5, "heads": 2, "k": 40, "n": 24},
        )
        for tokens in (64, 2048)
    ),
    Row("penalties", "64 x 128256", penalizes, {"rows": 64, "vocab": 128256}, {"rows": 3, "vocab": 2100}),
    Row("token_mask", "64 x 128256", masks, {"rows": 64, "vocab": 128256}, {"rows": 3, "vocab": 4200}),
    Row(
        "last_rows",
        "256 rows of 4096",
        last_of_rows,
        {"rows": 256, "queries": 4, "width": 4096},
        {"rows": 3, "width": 40},
    ),
)
