"""The trained tokenizers as fixtures."""

from __future__ import annotations

import os

import pytest
from trained_tokenizers import KINDS, Pair, make_pair

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def pairs() -> dict[str, Pair]:
    return {kind: make_pair(kind) for kind in KINDS}


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
    return pairs[request.param]
