"""Stop strings in content: the one that is complete first ends it, wherever the text is cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from octavo.server.stop_strings import StopStrings

texts = st.text(alphabet="abc", max_size=12)


def run(stop: list[str], pieces: list[str], *, keep: bool) -> tuple[str, str | None]:
    strings = StopStrings(stop, keep=keep)
    text = "".join(strings.feed(piece, counts=True) for piece in pieces)
    return text + strings.finish(), strings.found


@given(
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4),
    texts,
    st.booleans(),
    st.lists(st.integers(0, 12), max_size=4),
)
def test_as_if_character_by_character(stop: list[str], text: str, keep: bool, places: list[int]) -> None:
    ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(string) for string in stop)]
    if ends:
        found = max((string for string in stop if text[: ends[0]].endswith(string)), key=len)
        wanted: tuple[str, str | None] = (text[: ends[0] if keep else ends[0] - len(found)], found)
    else:
        wanted = (text, None)
    edges = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert run(stop, [text], keep=keep) == wanted
    assert run(stop, pieces, keep=keep) == wanted
    assert run(stop, list(text), keep=keep) == wanted


def test_what_does_not_count_yet() -> None:
    strings = StopStrings(["END"], keep=False)
    assert strings.feed("a END b EN", counts=False) == "a END b "
    assert strings.feed("D c", counts=True) == ""
    assert strings.found == "END"
