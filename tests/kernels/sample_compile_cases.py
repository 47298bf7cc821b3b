"""Every sampling kernel, compiled for sm_90 without a GPU; run by test_sample.py without the interpreter."""

from __future__ import annotations

from typing import Any

import offline_compile
import pytest
import torch
from sm90_compile import Compiled, compile_launch

from octavo.kernels.reference.last_rows import SampledInputs
from octavo.kernels.reference.sample import SlotParameters
from octavo.kernels.triton import last_rows, penalties, token_mask
from octavo.kernels.triton.launch import Launch
from octavo.kernels.triton.sample import Choice, Rows, Scratch, launches

META = torch.device("meta")
MAX_REGISTERS = 128
BOUND_REGISTERS = 256
"""Of the kernel that keeps a row's list in registers."""
SHARED_BYTES = 100 * 1024
seen: dict[Any, Compiled] = {}


def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def made(num_rows: int, vocab_size: int, choice: Choice) -> list[Launch]:
    slots = SlotParameters(
        divisor_s=empty(torch.float32, 300),
        random_s=empty(torch.bool, 300),
        k_s=empty(torch.int64, 300),
        p_s=empty(torch.float64, 300),
        min_p_log_s=empty(torch.float32, 300),
        seed_s=empty(torch.int64, 300),
        index_s=empty(torch.int64, 300),
    )
    ints = empty(torch.int32, 512)
    rows = Rows(ints[:num_rows], ints[:num_rows], ints, ints[:num_rows])
    scratch = Scratch.allocate(num_rows, vocab_size, META)
    return launches(empty(torch.float32, num_rows, vocab_size), rows, slots, scratch, choice)


@pytest.mark.parametrize("vocab_size", [128_256, 151_936, 262_144])
@pytest.mark.parametrize("num_rows", [1, 16, 256])
@pytest.mark.parametrize("choice", list(Choice))
def test_kernels_compile_without_spills(choice: Choice, num_rows: int, vocab_size: int) -> None:
    chosen = made(num_rows, vocab_size, choice)
    assert len(chosen) == {Choice.GREEDY: 2, Choice.PLAIN: 3, Choice.LIMITED: 7}[choice]
    for launch in chosen:
        if launch.variant not in seen:
            seen[launch.variant] = compile_launch(launch)
        compiled = seen[launch.variant]
        assert compiled.spill_bytes == 0, launch.kernel.__name__
        most = BOUND_REGISTERS if launch.kernel.__name__ == "bound_kernel" else MAX_REGISTERS
        assert compiled.registers < most, launch.kernel.__name__
        assert compiled.shared_bytes <= SHARED_BYTES, launch.kernel.__name__


def test_penalties_compile() -> None:
    floats = empty(torch.float32, 300)
    tables = empty(torch.bool, 300, 128_256), empty(torch.int32, 300, 128_256)
    with offline_compile.record(penalties) as recorded:
        penalties.apply_penalties(
            empty(torch.float32, 8, 128_256), empty(torch.int64, 8), *tables, floats, floats, floats
        )
    assert offline_compile.compile_launch(*recorded[0]).spill_bytes == 0


def test_token_mask_compiles() -> None:
    with offline_compile.record(token_mask) as recorded:
        token_mask.apply_token_mask(
            empty(torch.float32, 8, 128_256), empty(torch.int64, 8), empty(torch.int32, 257, 4008)
        )
    assert offline_compile.compile_launch(*recorded[0]).spill_bytes == 0


def test_last_rows_compile() -> None:
    hidden, ints = empty(torch.bfloat16, 100, 4096), empty(torch.int32, 64)
    with offline_compile.record(last_rows) as recorded:
        last_rows.gather_last_rows(
            hidden, ints, ints, ints, SampledInputs(hidden[:64], ints, ints), count=9, null_slot=256
        )
    assert offline_compile.compile_launch(*recorded[0]).spill_bytes == 0
