"""Triton names what it compiles by a hash over its own files, hundreds of megabytes: half a second and more, here spent
beside imports and loading. Imports no torch.
"""

from __future__ import annotations

from threading import Thread


def start_hash() -> Thread:
    """A thread that computes the hash; Triton keeps it. Without Triton it ends at once."""
    thread = Thread(target=_hash, name="triton-hash", daemon=True)
    thread.start()
    return thread


def _hash() -> None:
    try:
        from triton.runtime.cache import triton_key
    except ImportError:  # a machine without Triton compiles nothing
        return
    triton_key()
