"""Parsers of calls and reasoning: pieces of what models write, in any order, read the same wherever they are cut."""

from __future__ import annotations

from call_texts import BAD, GOOD, TOOLS
from hypothesis import strategies as st
from reading import Read, cut, read

from octavo.server.reasoning.table import REASONING_FORMATS, reasoning_format
from octavo.server.tools.base import Tools
from octavo.server.tools.table import TOOL_FORMATS, tool_format
from tests.fuzz.target import Case, Target, spliced

NAMES = [*TOOL_FORMATS, *REASONING_FORMATS]
TEXTS = [case.text for case in GOOD + BAD]
MARKS = sorted(
    {mark for name in TOOL_FORMATS for mark in tool_format(name).marks}
    | {mark for name in REASONING_FORMATS for mark in (*reasoning_format(name).marks, *reasoning_format(name).opens)}
)


def check(case: Case) -> None:
    """Case: a parser's name, a text, where it is cut, whether a call must come or reasoning has begun."""
    text = case["text"]
    whole = _parse(case, [text])
    assert _parse(case, cut(text, [place % (len(text) + 1) for place in case["cuts"]])) == whole
    assert _parse(case, list(text)) == whole
    assert len(whole.content) + len(whole.reasoning) <= len(text)


def _parse(case: Case, pieces: list[str]) -> Read:
    if case["parser"] in TOOL_FORMATS:
        return read(tool_format(case["parser"]).parser(Tools(TOOLS, must_call=case["flag"])), pieces)
    return read(reasoning_format(case["parser"]).parser(case["flag"]), pieces)


TARGET = Target(
    "parsers",
    check,
    lambda seeds: st.fixed_dictionaries(
        {
            "parser": st.sampled_from(NAMES),
            "text": spliced(TEXTS + MARKS),
            "cuts": st.lists(st.integers(0, 400), max_size=6),
            "flag": st.booleans(),
        }
    ),
)
