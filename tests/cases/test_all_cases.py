"""Every collected case has a test that names it: 63 failures that users of other servers reported, by their numbers."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Kind -> the numbers of its cases.
CASES = {
    "ST": (1, 2, 4, 6, 7, 8),
    "TK": (1, 3, 4, 5, 7, 8),
    "SA": (1, 2, 3, 5, 6, 8, 9),
    "SO": (1, 3, 5, 7, 8, 9),
    "TC": (1, 2, 4, 5, 7, 8),
    "PC": (1, 3, 5, 6, 7),
    "SC": (1, 3, 4, 6, 7, 8, 9, 10, 11),
    "SU": (1, 3, 4, 6),
    "SE": (1, 2, 3, 5, 7, 8, 9, 10, 11),
    "NU": (1, 3, 4, 5, 6),
}
_NAME = re.compile(r"(?<![A-Za-z])([A-Z]{2}|[a-z]{2})[-_]?([0-9]{2})(?![0-9])")


def test_every_case_is_named_by_a_test() -> None:
    named = set()
    for path in ROOT.rglob("*.py"):
        if path != Path(__file__):
            named |= {f"{kind.upper()}-{number}" for kind, number in _NAME.findall(path.read_text())}
    wanted = {f"{kind}-{number:02d}" for kind, numbers in CASES.items() for number in numbers}
    assert len(wanted) == 63
    assert wanted - named == set()
