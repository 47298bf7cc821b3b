"""Fixtures of the model-source tests: a private cache, and the real model's file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from real_model import REAL_MODEL

from octavo.config import ModelConfig
from octavo.models.gguf_file import GGUFFile, open_gguf
from octavo.models.sources import resolve_source

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder that this test alone uses."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("OCTAVO_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def real_path() -> Path:
    """SmolLM2's .gguf, fetched once into the user's cache."""
    file = resolve_source(ModelConfig(model=REAL_MODEL), lambda stage, fraction: None).gguf_file
    assert file is not None
    return file.path


@pytest.fixture(scope="session")
def real_file(real_path: Path) -> GGUFFile:
    return open_gguf(real_path)
