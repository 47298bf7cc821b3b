"""Every format: what its texts hold, wherever they are cut."""

from __future__ import annotations

import json
import random

import pytest
from call_texts import BAD, GOOD, TOOLS, Text
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import Read, all_cuts, cut, read

from octavo.server.tools.base import Tools
from octavo.server.tools.table import TOOL_FORMATS, choose_tool_format, tool_format

NAMES = list(TOOL_FORMATS)


def parse(name: str, pieces: list[str]) -> Read:
    return read(tool_format(name).parser(Tools(TOOLS)), pieces)


def check(case: Text, found: Read) -> None:
    assert found.content == case.content
    assert [name for name, _, _ in found.calls] == [name for name, _ in case.calls]
    for (_, _, arguments), (_, wanted) in zip(found.calls, case.calls, strict=True):
        assert (arguments if isinstance(wanted, str) else json.loads(arguments)) == wanted
    if case.ids is not None:
        assert tuple(own_id for _, own_id, _ in found.calls) == case.ids


def label(case: Text) -> str:
    return f"{case.format}-{case.text[:24]!r}"


def test_every_format_has_texts() -> None:
    assert {case.format for case in GOOD} == set(NAMES)


@pytest.mark.parametrize("case", GOOD + BAD, ids=label)
def test_in_one_piece(case: Text) -> None:
    check(case, parse(case.format, [case.text]))


@pytest.mark.parametrize("case", GOOD + BAD, ids=label)
def test_wherever_it_is_cut(case: Text) -> None:
    whole = parse(case.format, [case.text])
    for pieces in all_cuts(case.text):
        assert parse(case.format, pieces) == whole, pieces


@pytest.mark.parametrize("case", GOOD, ids=label)
def test_every_beginning_of_a_text(case: Text) -> None:
    """Cut off anywhere: no call looks complete that is not, and no mark of the format shows."""
    whole = parse(case.format, [case.text])
    for end in range(len(case.text)):
        found = parse(case.format, [case.text[:end]])
        for (name, own_id, arguments), (full_name, full_id, full) in zip(found.calls, whole.calls, strict=False):
            assert (name, full.startswith(arguments)) == (full_name, True)
            assert own_id in (full_id, None)
        assert len(found.calls) <= len(whole.calls)


@pytest.mark.parametrize("name", NAMES)
def test_random_text(name: str) -> None:
    """Marks, pieces of calls and random characters in any order: the same however it is cut, and nothing raises."""
    form = tool_format(name)
    bits = [case.text for case in GOOD + BAD if case.format == name]
    marks = [
        *form.marks,
        "functools[",
        '{"name": "now", "arguments": {',
        "[now(",
        "}",
        "]",
        ")",
        '"',
        "\\",
        " ",
        "\n",
        "é",
    ]

    @settings(max_examples=60, deadline=None)
    @given(st.randoms(use_true_random=False))
    def run(rng: random.Random) -> None:
        text = ""
        for _ in range(rng.randrange(1, 8)):
            bit = rng.choice(bits)
            low = rng.randrange(len(bit) + 1)
            text += rng.choice([rng.choice(marks), bit[low : low + rng.randrange(40)], chr(rng.randrange(32, 0xD7FF))])
        whole = parse(name, [text])
        for _ in range(3):
            places = [rng.randrange(len(text) + 1) for _ in range(rng.randrange(6))]
            assert parse(name, cut(text, places)) == whole
        assert parse(name, list(text)) == whole

    run()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "openai"])
@settings(max_examples=40, deadline=None)
@given(text=st.text())
def test_plain_text_is_content(name: str, text: str) -> None:
    if not any(mark in text for mark in (*tool_format(name).marks, "functools[")):
        assert read(tool_format(name).parser(Tools(TOOLS)), list(text)).content == text


@pytest.mark.parametrize("name", NAMES)
def test_plain_text_is_not_held_back(name: str) -> None:
    """At most a beginning of a mark waits, and blanks."""
    parser = tool_format(name).parser(Tools(TOOLS))
    for word in ("Well", " then", ", a < b", " is so", "."):
        assert [part.text for part in parser.feed(word)] == [word]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("pythonic",)])
def test_arguments_come_in_pieces(name: str) -> None:
    case = next(case for case in GOOD if case.format == name and case.calls and len(str(case.calls[0][1])) > 20)
    parser = tool_format(name).parser(Tools(TOOLS))
    pieces = [part for char in case.text for part in parser.feed(char)]
    assert len(pieces) > 10


def test_marks_in_the_longest_head_are_given_back() -> None:
    """A head beyond the bound is no call: it is let go as content, all of it."""
    text = '<tool_call>{"arguments": {"a": "' + "x" * 70_000 + '"}, "name": "now"}</tool_call>'
    found = parse("hermes", [text])
    assert (found.content, found.calls) == (text, [])
    assert parse("hermes", [text[i : i + 999] for i in range(0, len(text), 999)]) == found


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>{{ tool | tojson }}</tool_call>", "hermes"),
        ("<tool_call><function=x><parameter=y>", "qwen3_coder"),
        ("<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value>", "glm45"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ("<｜tool▁calls▁begin｜>```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<|channel|><|message|>", "openai"),
        ("<|start_of_role|>assistant<|tool_call|>", "granite"),
        ("functools[", "phi4_mini_json"),
        ("<|python_start|>", "pythonic"),
        ('{"name": function name, "parameters": dictionary', "llama3_json"),
        ("<|im_start|>{{ tools }}", "json"),
        ("<|im_start|>", "json"),
    ],
)
def test_chosen_by_the_template(template: str, name: str) -> None:
    assert choose_tool_format(template) == name
