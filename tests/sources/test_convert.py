"""The real model as a safetensors folder holds the same tensors, config and tokenizer as its .gguf."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from convert import convert
from real_model import REAL_MODEL

from octavo.config import ModelConfig
from octavo.models.config import normalize_config
from octavo.models.loader import iter_tensors
from octavo.models.sources import ModelSource, resolve_source


def resolve(name: str) -> ModelSource:
    return resolve_source(ModelConfig(model=name), lambda stage, fraction: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(REAL_MODEL, tmp_path_factory.mktemp("converted"))


def test_tensors_are_equal(folder: Path) -> None:
    ours, theirs = resolve(str(folder)), resolve(REAL_MODEL)
    expected = dict(iter_tensors(theirs))
    for name, tensor in iter_tensors(ours):
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected.pop(name)), name
    assert not expected


def test_config_is_equal(folder: Path) -> None:
    ours, theirs = (normalize_config(resolve(name).raw_config) for name in (str(folder), REAL_MODEL))
    assert dataclasses.asdict(dataclasses.replace(ours, raw={})) == dataclasses.asdict(
        dataclasses.replace(theirs, raw={})
    )


def test_tokenizer_is_the_folders_own(folder: Path) -> None:
    found = resolve(str(folder)).tokenizer_path
    assert found == folder
    original = resolve(REAL_MODEL).tokenizer_path
    assert original is not None
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (original / name).read_bytes()


def test_progress_counts_bytes_to_the_end(folder: Path) -> None:
    seen: list[float] = []
    for _ in iter_tensors(resolve(str(folder)), progress=lambda stage, fraction: seen.append(fraction)):
        pass
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert seen[0] < 0.5
