"""Git LFS pointers: the few lines of text that lie in place of a large file when it was not downloaded."""

from __future__ import annotations

from pathlib import Path

from octavo.errors import ModelError

# A pointer starts with "version https://git-lfs.github.com/spec/v1" (git-lfs, docs/spec.md).
START = b"version "


def refuse_lfs_pointer(path: Path, first_bytes: bytes) -> None:
    """ModelError when a file that is not what it should be starts like a pointer."""
    if first_bytes.startswith(START):
        raise ModelError(f"{path}: is a Git LFS pointer, not the file itself: run `git lfs pull`, or download it again")
