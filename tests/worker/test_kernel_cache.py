"""Two who want the same kernel: the second waits for the first, reads what it made, and takes over when it died."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton")

from triton import knobs
from triton.runtime.cache import get_cache_manager

from octavo.worker import kernel_cache
from octavo.worker.kernel_cache import SharedCache

KEY, FILE = "ab" * 32, "kernel.json"


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with knobs.cache.scope():
        knobs.cache.manager_class = None
        kernel_cache.share()
        yield


def manager() -> SharedCache:
    made = get_cache_manager(KEY)
    assert isinstance(made, SharedCache)
    return made


class Reader(threading.Thread):
    """Looks for the kernel, as a process of its own does."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = manager()
        self.found: dict[str, str] | None = {}
        self.start()

    def run(self) -> None:
        self.found = self.manager.get_group(FILE)


def test_the_second_reads_what_the_first_has_made() -> None:
    first = manager()
    assert first.get_group(FILE) is None
    reader = Reader()
    group = {FILE: first.put("{}", FILE, binary=False)}
    assert reader.is_alive(), "it waits: the kernel is not whole yet"
    first.put_group(FILE, group)
    reader.join(10)
    assert reader.found == group
    assert manager().get_group(FILE) == group, "and nobody holds the lock"


def test_the_second_takes_over_when_the_first_fails() -> None:
    first = manager()
    assert first.get_group(FILE) is None
    reader = Reader()
    del first
    reader.join(10)
    assert not reader.is_alive()
    assert reader.found is None
    last = Reader()
    reader.manager.put_group(FILE, {FILE: reader.manager.put("{}", FILE, binary=False)})
    last.join(10)
    assert last.found is not None


def test_who_waits_too_long_compiles_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "PATIENCE_S", 0.0)
    first, second = manager(), manager()
    assert first.get_group(FILE) is None
    assert second.get_group(FILE) is None
    group = {FILE: second.put("{}", FILE, binary=False)}
    second.put_group(FILE, group)
    first.put_group(FILE, group)
    assert manager().get_group(FILE) == group


def test_a_manager_that_the_user_named_stays() -> None:
    class Other(SharedCache):
        pass

    knobs.cache.manager_class = Other
    kernel_cache.share()
    assert knobs.cache.manager_class is Other
