"""Launches of wide_gemm.cu: products of 65 to 512 rows with a weight matrix, with the epilogues of decode steps.

Shape suffixes: m rows, n output features, k input features, f flat.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from cuda.bindings import driver
from torch import Tensor

from octavo.kernels.cuda.compiled import Shape, check, compile_source, load_kernel, start

FILE = "wide_gemm.cu"
TILE_ROWS = 128
THREADS = 384
SHARED_BYTES = 227 << 10
"""What a program may use on sm_90."""
ROW_BYTES = 128
"""Of k, in a box."""
EPILOGUES = ("store", "silu", "residual")


@dataclass(frozen=True, slots=True)
class Wide:
    """See wide_gemm.cu. `block_n`: rows of W in a tile (gate_up: half of them are gate's); `boxes` of 128 bytes of k in
    a slot; of the programs of a cluster `cm` share W, `cn` share x, `ck` split k."""

    block_n: int
    boxes: int
    stages: int
    cm: int
    cn: int
    ck: int

    @property
    def cluster(self) -> int:
        """Its size."""
        return self.cm * self.cn * self.ck

    @property
    def shared_bytes(self) -> int:
        """The ring, aligned to 1024 bytes, and its barriers."""
        slot = self.boxes * ROW_BYTES * (TILE_ROWS + self.block_n)
        return 1024 + self.stages * (slot + 16)

    def columns(self, epilogue: str) -> int:
        """Of the output, in a tile."""
        return self.block_n // 2 if epilogue == "silu" else self.block_n

    def fits(self, epilogue: str, n: int, k: int, item_bytes: int = 2) -> bool:
        """Whether tiles cover an output of n columns exactly and the ring fits on chip."""
        columns = self.columns(epilogue)
        step = self.ck * self.boxes * ROW_BYTES // item_bytes
        may_split = self.ck == 1 or (epilogue != "silu" and self.block_n // 8 % self.ck == 0)
        return n % (columns * self.cn) == 0 and k % step == 0 and may_split and self.shared_bytes <= SHARED_BYTES


def wgmma_source(n: int, *, fp8: bool) -> str:
    """`wgmma(d, a, b, keep)`: d[64, n] = a b^T + (keep ? d : 0), both operands in shared memory."""
    count = n // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    kind = f"m64n{n}k32.f32.e4m3.e4m3" if fp8 else f"m64n{n}k16.f32.bf16.bf16"
    flags = "p, 1, 1" if fp8 else "p, 1, 1, 0, 0"
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return (
        f"__device__ __forceinline__ void wgmma(float (&d)[{count}], unsigned long long a, unsigned long long b,"
        f" int keep) {{\n"
        f'    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"\n'
        f'        "wgmma.mma_async.sync.aligned.{kind} {{{registers}}}, %{count}, %{count + 1}, {flags};\\n}}"\n'
        f'        : {outputs} : "l"(a), "l"(b), "r"(keep));\n}}\n'
    )


@cache
def describe(address: int, rows: int, k: int, item_bytes: int, box_rows: int) -> bytes:
    """A row-major matrix [rows, k] to the tensor memory accelerator, in boxes of 128 swizzled bytes of k."""
    types = driver.CUtensorMapDataType
    words, longs = driver.cuuint32_t, driver.cuuint64_t
    kind = types.CU_TENSOR_MAP_DATA_TYPE_UINT8 if item_bytes == 1 else types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    tensor_map = check(
        driver.cuTensorMapEncodeTiled(
            kind,
            2,
            address,
            [longs(k), longs(rows)],
            [longs(k * item_bytes)],
            [words(ROW_BYTES // item_bytes), words(box_rows)],
            [words(1), words(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(tensor_map.getPtr(), 128)


@dataclass(frozen=True, slots=True)
class WideLaunch:
    """A launch as triton/launch.py has them. Tensors whose addresses it holds must outlive it."""

    macros: tuple[tuple[str, int], ...]
    block_n: int
    shape: Shape
    parameters: tuple[bytes, ...]

    @property
    def kernel(self) -> str:
        """What is launched."""
        return FILE

    @property
    def variant(self) -> tuple[Any, ...]:
        """Equal for launches of one compiled kernel."""
        return (FILE, *self.macros)

    def _cubin(self, pdl: bool) -> bytes:
        macros = (*self.macros, ("PDL", int(pdl)))
        return compile_source(FILE, macros, wgmma_source(self.block_n, fp8=bool(dict(macros)["FP8"])))

    def run(self, *, pdl: bool = True) -> None:
        """Start it on the current stream."""
        function = load_kernel(self._cubin(pdl), "wide_gemm", self.shape.shared_bytes)
        start(function, self.shape, list(self.parameters), torch.cuda.current_stream().cuda_stream, pdl=pdl)

    def warm_up(self, *, pdl: bool = True) -> None:
        """Compile it, without running it."""
        self._cubin(pdl)


@dataclass(frozen=True, slots=True)
class Operands:
    """What a product reads and writes; None where its epilogue or dtype has no use for it."""

    x_mk: Tensor
    weight_nk: Tensor
    y_mn: Tensor
    """The residual for epilogue "residual"."""
    gained_mn: Tensor | None = None
    gain_n: Tensor | None = None
    squares_in: Tensor | None = None
    squares_out: Tensor | None = None
    x_scale_m: Tensor | None = None
    scale_n: Tensor | None = None
    bias_n: Tensor | None = None


def wide_launch(
    config: Wide, operands: Operands, epilogue: str, *, bucket: int, partials: int, eps: float, num_programs: int
) -> WideLaunch:
    """The product's launch, for a device of `num_programs` multiprocessors. Sums of squares are at [p * bucket + m]."""
    num_rows, k = operands.x_mk.shape
    n = operands.y_mn.shape[1]
    item_bytes = operands.x_mk.element_size()
    shares_w = epilogue == "silu" or config.cm == 2
    maps = (
        describe(operands.x_mk.data_ptr(), num_rows, k, item_bytes, TILE_ROWS // config.cn),
        describe(
            operands.weight_nk.data_ptr(),
            operands.weight_nk.shape[0],
            k,
            item_bytes,
            config.block_n // 2 if shares_w else config.block_n,
        ),
    )
    is_residual = epilogue == "residual"
    pointers = (
        operands.squares_in,
        operands.x_scale_m,
        operands.scale_n,
        operands.bias_n,
        operands.y_mn,
        operands.y_mn if is_residual else None,
        operands.gained_mn,
        operands.gain_n,
        operands.squares_out,
    )
    args = struct.pack("<9Qif", *(0 if t is None else t.data_ptr() for t in pointers), num_rows, eps)
    macros = {
        "N": n,
        "K": k,
        "BLOCK_N": config.block_n,
        "BOXES": config.boxes,
        "STAGES": config.stages,
        "CM": config.cm,
        "CN": config.cn,
        "CK": config.ck,
        "SILU": epilogue == "silu",
        "RESIDUAL": is_residual,
        "WIDE_OUT": operands.y_mn.dtype == torch.float32,
        "HAS_BIAS": operands.bias_n is not None,
        "FP8": item_bytes == 1,
        "PARTIALS": partials,
        "BUCKET": bucket,
    }
    groups = -(-num_rows // (TILE_ROWS * config.cm))
    tiles = groups * (n // config.columns(epilogue) // config.cn)
    clusters = tiles if config.ck > 1 else min(tiles, num_programs // config.cluster)
    shape = Shape(clusters * config.cluster, THREADS, config.cluster, config.shared_bytes)
    return WideLaunch(tuple((name, int(value)) for name, value in macros.items()), config.block_n, shape, (*maps, args))
