"""A tenth of the architectures that Transformers knows, another one every day, against the table of the whole survey:
what ran must run and be right, what was refused must be refused or run."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "architectures"))

from survey import WAYS, entries, examine, read_table

TENTHS = 10
ENTRIES = [*entries("causal"), *entries("image-text")][datetime.now(UTC).toordinal() % TENTHS :: TENTHS]
KNOWN = read_table()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry[0]}-{entry[1]}")
def test_as_the_table_says(entry: tuple[str, str, str]) -> None:
    known = KNOWN.get(entry[:2])
    if known in (None, "untried"):
        pytest.skip("no tiny model of it in the table")
    outcome = examine(*entry)
    assert outcome.status in (*WAYS.values(), known), outcome.detail


def test_the_table_has_nothing_wrong_and_enough_that_runs() -> None:
    runs = {
        kind: sum(status in WAYS.values() for (of, _), status in KNOWN.items() if of == kind)
        for kind in ("causal", "image-text")
    }
    assert "wrong" not in KNOWN.values()
    assert runs["causal"] >= 165
    assert runs["image-text"] >= 60
