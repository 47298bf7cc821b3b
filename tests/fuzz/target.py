"""What a fuzz target is, and how its cases are made: seeds of the corpus, edited at random.

A case is JSON, so that one that fails is a line of `corpus/<target>.jsonl`, which every test run replays. Not here: the
targets (one file each), the clock (`__main__`).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

CORPUS = Path(__file__).parent / "corpus"
# Longest line that is added to the corpus by itself.
MAX_LINE_CHARS = 4000

Case = Any
"""JSON."""


@dataclass(frozen=True)
class Target:
    """Something to feed.

    Attributes:
        check: Raises when what is fed does harm.
        cases: Makes a case, from the seeds of the corpus.
    """

    name: str
    check: Callable[[Case], None]
    cases: Callable[[list[Case]], st.SearchStrategy[Case]]

    @property
    def path(self) -> Path:
        return CORPUS / f"{self.name}.jsonl"

    def seeds(self) -> list[Case]:
        """The corpus."""
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]

    def keep(self, case: Case) -> None:
        """Add a case that failed."""
        line = json.dumps(case)
        if len(line) <= MAX_LINE_CHARS and case not in self.seeds():
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


WORDS = (
    "text type name function arguments id role content system user assistant tool auto none required json_schema "
    "json_object regex choice enum const properties items anyOf $ref #/$defs/a pattern minLength maximum format stream "
    "n stop logprobs max_tokens temperature tools tool_choice input image_url strict 24h low high true"
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from(WORDS.split())
    | st.text(max_size=12)
)
KEYS = st.sampled_from(WORDS.split()) | st.text(max_size=4)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=10
)
TEXTS = st.text(max_size=8) | st.sampled_from(
    ['"', "\\", "{", "}", "[", "]", " ", "\n", "\0", "é", "🦙", "e\u0301", "<", "\ufffd"]
)
EDITS = ("replace", "remove", "repeat", "wrap", "rename", "swap")
_Edit = tuple[int, str, Any, Any]


def edited(seeds: list[Case], *, max_edits: int = 4) -> st.SearchStrategy[Case]:
    """A seed after a few edits of its nodes."""
    edit = st.tuples(st.integers(0, 1 << 16), st.sampled_from(EDITS), KEYS, VALUES)
    return st.tuples(st.sampled_from(seeds), st.lists(edit, max_size=max_edits)).map(lambda drawn: _apply(*drawn))


def spliced(texts: list[str]) -> st.SearchStrategy[str]:
    """Pieces of texts and random characters, one after another."""

    def piece(drawn: tuple[str, int, int]) -> str:
        text, at, size = drawn
        start = at % (len(text) + 1)
        return text[start : start + size]

    cut = st.tuples(st.sampled_from(texts), st.integers(0, 1 << 12), st.integers(0, 60)).map(piece)
    whole = st.sampled_from(texts)
    return st.lists(cut | whole | TEXTS, max_size=7).map("".join)


def _apply(seed: Case, edits: list[_Edit]) -> Case:
    root = [copy.deepcopy(seed)]
    for at, kind, key, value in edits:
        places = list(_places(root))
        holder, place = places[at % len(places)]
        _edit(holder, place, kind, key, copy.deepcopy(value))
    return root[0] if root else None


def _places(holder: Any) -> Any:
    """Every (list or dict, index or key) below, in order."""
    for place in range(len(holder)) if isinstance(holder, list) else list(holder):
        yield holder, place
        if isinstance(holder[place], list | dict):
            yield from _places(holder[place])


def _edit(holder: Any, place: Any, kind: str, key: Any, value: Any) -> None:
    if kind == "remove" and len(holder) > 1:
        del holder[place]
    elif kind == "repeat" and isinstance(holder, list):
        holder.insert(place, copy.deepcopy(holder[place]))
    elif kind == "wrap":
        holder[place] = [holder[place]] if len(str(key)) % 2 else {key: holder[place]}
    elif kind == "rename" and isinstance(holder, dict):
        holder[key] = holder.pop(place)
    elif kind == "swap" and isinstance(holder, list):
        holder.reverse()
    else:
        holder[place] = value
