"""Pages of mapped checkpoint files: they count as this process's memory until they are given back."""

from __future__ import annotations

import mmap


def release_pages(buffer: mmap.mmap, offset: int, num_bytes: int) -> None:
    """Drop mapped bytes from memory; whoever reads them again gets them from the file."""
    if hasattr(mmap, "MADV_DONTNEED") and num_bytes:
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        buffer.madvise(mmap.MADV_DONTNEED, start, offset + num_bytes - start)
