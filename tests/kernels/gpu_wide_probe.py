"""Where wide_gemm's time goes: variants of it that leave something out, and stamps of its phases.

PYTHONPATH=python python tests/kernels/gpu_wide_probe.py --out probe.json
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from cuda.bindings import driver
from gpu_wide import BF16, DEVICE, PROGRAMS, time_us

from octavo.kernels.cuda import wide_gemm
from octavo.kernels.cuda.compiled import Shape, check, compile_source, load_kernel, start
from octavo.kernels.cuda.wide_gemm import Wide, wgmma_source

FILE = "wide_gemm_probe.cu"
LAYERS = 6


def describe(address, rows, k, box_rows, promotion):
    types, words, longs = driver.CUtensorMapDataType, driver.cuuint32_t, driver.cuuint64_t
    promotions = driver.CUtensorMapL2promotion
    level = {
        0: promotions.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        128: promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        256: promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
    }[promotion]
    made = check(
        driver.cuTensorMapEncodeTiled(
            types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2,
            address,
            [longs(k), longs(rows)],
            [longs(k * 2)],
            [words(64), words(box_rows)],
            [words(1), words(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            level,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(made.getPtr(), 128)


class Probe:
    def __init__(self, label, n, k, rows, epilogue, config, promotion=256, **flags):
        self.label, self.config = label, Wide(*config)
        c = self.config
        silu = epilogue == "silu"
        self.n, self.k, self.rows = n, k, rows
        columns = c.columns(epilogue)
        macros = dict(
            N=n,
            K=k,
            BLOCK_N=c.block_n,
            BOXES=c.boxes,
            STAGES=c.stages,
            CM=c.cm,
            CN=c.cn,
            CK=c.ck,
            SILU=int(silu),
            RESIDUAL=0,
            WIDE_OUT=0,
            HAS_BIAS=0,
            FP8=0,
            PARTIALS=0,
            BUCKET=256,
            PDL=int(flags.pop("PDL", 1)),
            **{key: 1 for key, on in flags.items() if on},
        )
        self.flags, self.promotion, self.silu = flags, promotion, silu
        self.macros = tuple(macros.items())
        tiles = -(-rows // (128 * c.cm)) * (n // columns // c.cn)
        clusters = tiles if c.ck > 1 else min(tiles, PROGRAMS // c.cluster)
        self.shape = Shape(clusters * c.cluster, wide_gemm.THREADS, c.cluster, c.shared_bytes)
        self.pdl = bool(macros["PDL"])

    def compile(self):
        self.cubin = compile_source(FILE, self.macros, wgmma_source(self.config.block_n, fp8=False))

    def run(self):
        matrix_rows = self.n * (2 if self.silu else 1)
        rows = -(-self.rows // 128) * 128
        x = torch.randn(rows, self.k, device=DEVICE, dtype=BF16)
        y = torch.empty(rows, self.n, device=DEVICE, dtype=BF16)
        stamps = torch.zeros(self.shape.programs * 8, device=DEVICE, dtype=torch.int64)
        c = self.config
        box_w = c.block_n // 2 if self.silu or c.cm == 2 else c.block_n
        px, pw = "PACK_X" in self.flags, "PACK_W" in self.flags
        weights = [torch.randn(matrix_rows, self.k, device=DEVICE, dtype=BF16) for _ in range(LAYERS)]
        x_map = describe(
            x.data_ptr(), rows * self.k // 64 if px else rows, 64 if px else self.k, 128 // c.cn, self.promotion
        )
        maps = [
            describe(
                w.data_ptr(),
                matrix_rows * self.k // 64 if pw else matrix_rows,
                64 if pw else self.k,
                box_w,
                self.promotion,
            )
            for w in weights
        ]
        args = struct.pack("<9QifQ", 0, 0, 0, 0, y.data_ptr(), 0, 0, 0, 0, self.rows, 1.0, stamps.data_ptr())
        function = load_kernel(self.cubin, "wide_gemm", self.shape.shared_bytes)

        def launch():
            for m in maps:
                start(function, self.shape, [x_map, m, args], torch.cuda.current_stream().cuda_stream, pdl=self.pdl)

        us = time_us(launch)
        s = stamps.view(-1, 8).double()
        phases = (s[:, 1:7] - s[:, :1]).mean(0).tolist()
        return us, phases


def main():
    began = time.perf_counter()
    cases = {
        "qkv128": (6144, 4096, 128, "store", (48, 2, 5, 1, 1, 1)),
        "qkv128cn2": (6144, 4096, 128, "store", (48, 2, 5, 1, 2, 1)),
        "gate128": (14336, 4096, 128, "silu", (224, 1, 5, 1, 1, 1)),
        "gate128cn2": (14336, 4096, 128, "silu", (224, 1, 5, 1, 2, 1)),
        "gate256": (14336, 4096, 256, "silu", (224, 1, 5, 1, 1, 1)),
        "gate256cm2": (14336, 4096, 256, "silu", (224, 1, 5, 2, 1, 1)),
        "gate256b128": (14336, 4096, 256, "silu", (128, 1, 6, 1, 1, 1)),
        "down256": (4096, 14336, 256, "store", (128, 1, 6, 1, 1, 2)),
    }
    variants = [
        {},
        {"NO_MMA": 1},
        {"NO_X": 1},
        {"NO_W": 1},
        {"NO_X": 1, "NO_MMA": 1},
        {"NO_W": 1, "NO_MMA": 1},
        {"promotion": 128},
        {"promotion": 0},
        {"PACK_X": 1},
        {"PACK_W": 1},
        {"PACK_X": 1, "PACK_W": 1},
        {"ONE_POLLS": 1},
        {"PDL": 0},
    ]
    probes = [Probe(f"{name} {flags}", *case, **dict(flags)) for name, case in cases.items() for flags in variants]
    probes += [
        Probe("gate256 stages 3", 14336, 4096, 256, "silu", (224, 1, 3, 1, 1, 1)),
        Probe("gate256 boxes 2 stages 2", 14336, 4096, 256, "silu", (224, 2, 2, 1, 1, 1)),
        Probe("qkv128 stages 3", 6144, 4096, 128, "store", (48, 2, 3, 1, 1, 1)),
        Probe("qkv128 b96", 6144, 4096, 128, "store", (96, 1, 7, 1, 1, 1)),
        Probe("qkv128 b192", 6144, 4096, 128, "store", (192, 1, 5, 1, 1, 1)),
    ]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(Probe.compile, probes))
    print(
        f"[{time.perf_counter() - began:.0f} s] compiled; us a launch; clocks from entry: set up, before products,"
        " first slot full, products done, epilogue done, end",
        flush=True,
    )
    found = []
    for probe in probes:
        try:
            us, phases = probe.run()
        except Exception as error:
            print(probe.label, repr(error)[:200], flush=True)
            break
        found.append([probe.label, us, phases])
        print(f"{us:8.1f} us  {probe.label:45s} " + " ".join(f"{p:8.0f}" for p in phases), flush=True)
        torch.cuda.empty_cache()
    if "--out" in sys.argv:
        Path(sys.argv[sys.argv.index("--out") + 1]).write_text(json.dumps(found))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
