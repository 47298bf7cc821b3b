"""Every seed and everything that was ever found, again; and a few fresh cases of each target."""

from __future__ import annotations

import pytest

from tests.fuzz.table import TARGETS, examples
from tests.fuzz.target import Target


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_corpus(target: Target) -> None:
    seeds = target.seeds()
    assert seeds
    for case in seeds:
        target.check(case)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_fresh_cases(target: Target) -> None:
    examples(target, 60, seed=1)
