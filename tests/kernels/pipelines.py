"""How deep the pipelines of a compiled kernel are: what Triton made of `num_stages`, which it may silently lower."""

from __future__ import annotations

import re

BUFFERS = re.compile(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x(?!i64)")


def depths(ttgir: str) -> tuple[int, ...]:
    """Of the operands of loops' products that are loaded ahead into shared memory: how many tiles each has room for
    (different numbers, ascending). Empty: nothing is loaded ahead.

    All stages where wgmma reads shared memory; one less where mma.sync reads registers.
    """
    return tuple(sorted({int(found) for found in BUFFERS.findall(ttgir)}))
