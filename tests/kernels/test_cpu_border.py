"""What the CPU kernels refuse at the extension's border: raw addresses and sizes, without tensors that vouch for them.

Each wrong argument is a ValueError that names it, and leaves the output as it was.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo._core import cpu_paged_attention, cpu_write_kv

BLOCKS, HEADS, BLOCK, DIM = 4, 2, 8, 16
HUGE = 1 << 62


class Memory:
    """Arrays of a step of two rows, and the calls over them."""

    def __init__(self) -> None:
        rng = np.random.default_rng(5)
        self.q = rng.standard_normal((3, HEADS, DIM), dtype=np.float32)
        # Whatever no row may read is NaN: one number of it in a sum shows.
        self.cache = np.full((BLOCKS, 2, HEADS, BLOCK, DIM), np.nan, np.float32)
        self.cache[1, :, :, :5] = rng.standard_normal((2, HEADS, 5, DIM))
        self.cache[3, :, :, :2] = rng.standard_normal((2, HEADS, 2, DIM))
        self.out = np.full((3, HEADS, DIM), 7.0, np.float32)
        self.slot, self.start = np.array([0, 1], np.int32), np.array([0, 1, 3], np.int32)
        self.length = np.array([5, 2], np.int32)
        self.table = np.array([[1, -1], [3, -1]], np.int32)
        self.places = np.array([8 * 1 + 5, 8 * 3 + 2, 8 * 3 + 3], np.int64)

    def attention(self) -> dict[str, Any]:
        return {
            "q": self.q.ctypes.data,
            "q_stride": HEADS * DIM,
            "kv_cache": self.cache.ctypes.data,
            "out": self.out.ctypes.data,
            "dtype": "float32",
            "row_slot": self.slot.ctypes.data,
            "query_start": self.start.ctypes.data,
            "kv_len": self.length.ctypes.data,
            "block_table": self.table.ctypes.data,
            "num_rows": 2,
            "num_tokens": 3,
            "num_slots": 2,
            "max_blocks_per_slot": 2,
            "num_blocks": BLOCKS,
            "block_size": BLOCK,
            "num_heads": HEADS,
            "num_kv_heads": HEADS,
            "head_dim": DIM,
            "scale": 0.25,
            "window": 0,
            "soft_cap": 0.0,
            "num_threads": 1,
        }

    def write(self) -> dict[str, Any]:
        return {
            "k": self.q.ctypes.data,
            "k_stride": HEADS * DIM,
            "v": self.q.ctypes.data,
            "v_stride": HEADS * DIM,
            "kv_cache": self.cache.ctypes.data,
            "dtype": "float32",
            "slot_mapping": self.places.ctypes.data,
            "num_tokens": 3,
            "num_blocks": BLOCKS,
            "block_size": BLOCK,
            "num_kv_heads": HEADS,
            "head_dim": DIM,
        }


POINTERS = ("q", "kv_cache", "out", "row_slot", "query_start", "kv_len", "block_table")
SIZES = ("num_slots", "max_blocks_per_slot", "num_blocks", "block_size", "num_heads", "num_kv_heads", "head_dim")


@pytest.fixture
def memory() -> Memory:
    return Memory()


def refused(memory: Memory, match: str, **wrong: Any) -> None:
    cache = memory.cache.copy()
    with pytest.raises(ValueError, match=match):
        cpu_paged_attention(**{**memory.attention(), **wrong})
    assert (memory.out == 7.0).all()
    np.testing.assert_array_equal(memory.cache, cache)


@pytest.mark.parametrize("name", POINTERS)
def test_null_and_misaligned_pointers(memory: Memory, name: str) -> None:
    refused(memory, f"{name} is a null pointer", **{name: 0})
    for offset in (1, 2, 3):
        refused(memory, f"{name} is not aligned to 4 bytes", **{name: memory.attention()[name] + offset})


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_cannot_be(memory: Memory, name: str) -> None:
    refused(memory, f"{name} must be at least 1", **{name: 0})
    refused(memory, "too large|not a multiple|stride|must be|not one of", **{name: HUGE})


def test_indices_out_of_range(memory: Memory) -> None:
    wrong: list[tuple[Any, Any, int, str]] = [
        (memory.slot, 1, 2, r"row_slot\[1\] is 2"),
        (memory.slot, 0, -1, r"row_slot\[0\] is -1"),
        (memory.start, 0, 1, r"query_start\[0\]"),
        (memory.start, 2, 4, r"query_start\[2\]"),
        (memory.start, 1, -5, r"query_start\[1\]"),
        (memory.length, 0, 17, r"kv_len\[0\] is 17"),
        (memory.length, 1, 1, r"kv_len\[1\] is 1"),
        (memory.table, (0, 0), BLOCKS, r"block_table\[0, 0\] is 4"),
        (memory.table, (1, 0), -1, r"block_table\[1, 0\] is -1"),
    ]
    for array, place, value, match in wrong:
        kept = array[place].copy()
        array[place] = value
        refused(memory, match)
        array[place] = kept


def test_numbers_that_are_none(memory: Memory) -> None:
    refused(memory, "scale must be finite", scale=float("nan"))
    refused(memory, "soft_cap must be finite", soft_cap=float("inf"))
    refused(memory, "q_stride", q_stride=HEADS * DIM - 1)
    refused(memory, "unknown dtype", dtype="float64")


def test_nothing_is_read_that_no_row_has(memory: Memory) -> None:
    cpu_paged_attention(**memory.attention())
    assert np.isfinite(memory.out).all()
    cpu_paged_attention(**{**memory.attention(), "num_threads": 3})
    assert np.isfinite(memory.out).all()


def test_writes_are_refused_whole(memory: Memory) -> None:
    before = memory.cache.copy()
    wrong: list[tuple[str, dict[str, Any]]] = [
        *((f"{name} is a null pointer", {name: 0}) for name in ("k", "v", "kv_cache", "slot_mapping")),
        *((f"{name} is not aligned", {name: memory.write()[name] + 2}) for name in ("k", "v", "kv_cache")),
        ("slot_mapping is not aligned to 8", {"slot_mapping": memory.places.ctypes.data + 4}),
        *(
            (f"{name} must be at least 1", {name: 0})
            for name in ("num_blocks", "block_size", "num_kv_heads", "head_dim")
        ),
        ("too large", {"num_blocks": HUGE}),
        ("k_stride", {"k_stride": 1}),
    ]
    for match, arguments in wrong:
        with pytest.raises(ValueError, match=match):
            cpu_write_kv(**{**memory.write(), **arguments})
    for value in (-1, BLOCKS * BLOCK):
        memory.places[2] = value
        with pytest.raises(ValueError, match=rf"slot_mapping\[2\] is {value}"):
            cpu_write_kv(**memory.write())
    np.testing.assert_array_equal(memory.cache, before)
