"""Every format of reasoning: what its texts hold, wherever they are cut."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import Read, all_cuts, cut, read

from octavo.server.reasoning.table import REASONING_FORMATS, choose_reasoning_format, reasoning_format


@dataclass(frozen=True)
class Text:
    """One text, and whether the prompt left it in reasoning."""

    format: str
    text: str
    reasoning: str = ""
    content: str = ""
    started: bool = False


TEXTS = [
    Text("qwen3", "<think>\nLet me see: 1 < 2.\n</think>\n\nYes.\n", "Let me see: 1 < 2.", "Yes.\n"),
    Text("qwen3", "Let me\n\nsee</think>Yes", "Let me\n\nsee", "Yes", started=True),
    Text("qwen3", "<think>again</think>Yes", "again", "Yes", started=True),
    Text("qwen3", "<think>\n\n</think>\n\nYes", "", "Yes"),
    Text("qwen3", "No thoughts </think here", "", "No thoughts </think here"),
    Text("qwen3", "  Indented, <b>so</b> what ", "", "  Indented, <b>so</b> what "),
    Text("qwen3", "one</think> two", "", "one two"),
    Text("qwen3", "<think>a</think>b<think>c</think>d", "ac", "bd"),
    Text("qwen3", "<think>never ends </thin", "never ends </thin"),
    Text(
        "qwen3",
        "is 7.25 or 7.5 more, clear</think>The larger",
        "is 7.25 or 7.5 more, clear",
        "The larger",
        started=True,
    ),
    Text("qwen3", "<think>é🦙</think>🦙é", "é🦙", "🦙é"),
    Text("glm45", "\n<think>a</think>\nb", "a", "b"),
    Text("deepseek_r1", "so</think>yes", "so", "yes", started=True),
    Text("mistral", "[THINK]a [b] [/TH c[/THINK]d [x]", "a [b] [/TH c", "d [x]"),
    Text("granite", "Here is my thought process: a\nHere is my response: b", "a", "b"),
    Text("granite", "Here's my thought process:\na\n\nHere's my response:\nb\n", "a", "b\n"),
    Text("granite", "<think>a</think><response>b</response>", "a", "b"),
    Text("granite", "Here is my response: b", "", "Here is my response: b"),
    Text("granite", "Here is my thought", "", "Here is my thought"),
    Text("granite", "a Here is my response: b", "a", "b", started=True),
    Text(
        "openai_gptoss",
        "<|channel|>analysis<|message|>User asks.<|end|><|start|>assistant<|channel|>final<|message|>Hi\n",
        "User asks.",
        "Hi\n",
    ),
    Text("openai_gptoss", "sees<|end|><|start|>assistant<|channel|>final<|message|>Hi", "sees", "Hi", started=True),
    Text("openai_gptoss", "<|channel|>analysis<|message|>cut", "cut"),
    Text("openai_gptoss", "<|channel|>commentary<|message|>Now I call.<|end|>", "", "Now I call."),
    Text("openai_gptoss", "plain", "", "plain"),
]


def parse(case: Text, pieces: list[str]) -> Read:
    return read(reasoning_format(case.format).parser(case.started), pieces)


def label(case: Text) -> str:
    return f"{case.format}-{case.text[:20]!r}-{case.started}"


def test_every_format_has_texts() -> None:
    assert {case.format for case in TEXTS} == set(REASONING_FORMATS)


@pytest.mark.parametrize("case", TEXTS, ids=label)
def test_wherever_it_is_cut(case: Text) -> None:
    wanted = Read(case.content, case.reasoning)
    for pieces in ([case.text], *all_cuts(case.text)):
        assert parse(case, pieces) == wanted, pieces


@pytest.mark.parametrize("name", REASONING_FORMATS)
@pytest.mark.parametrize("started", [False, True])
def test_random_text(name: str, started: bool) -> None:
    """Tags and text in any order: the same however it is cut, no tag is shown, and nothing else is lost."""
    form = reasoning_format(name)
    marks = [*form.marks, *form.opens, "Here is my response:", " ", "\n", "<", "[", "word", "é"]

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.one_of(st.sampled_from(marks), st.text(max_size=5)), max_size=9), st.randoms())
    def run(bits: list[str], rng: random.Random) -> None:
        case = Text(name, "".join(bits), started=started)
        whole = parse(case, [case.text])
        places = [rng.randrange(len(case.text) + 1) for _ in range(rng.randrange(6))]
        assert parse(case, cut(case.text, places)) == whole
        assert parse(case, list(case.text)) == whole
        if name in ("qwen3", "mistral"):
            rest = re.sub("|".join(map(re.escape, form.marks)), "", case.text)
            assert sorted("".join((whole.content + whole.reasoning).split())) == sorted("".join(rest.split()))

    run()


@pytest.mark.parametrize(
    ("name", "prompt_end", "started"),
    [
        ("qwen3", "<|im_start|>assistant\n", False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("deepseek_r1", "<｜Assistant｜>", True),
        ("deepseek_r1", "<｜Assistant｜></think>", False),
        ("mistral", "[/INST][THINK]", True),
        ("openai_gptoss", "<|start|>assistant", False),
    ],
)
def test_where_an_answer_starts(name: str, prompt_end: str, started: bool) -> None:
    assert reasoning_format(name).starts_in_reasoning(prompt_end) is started


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<think>' }}", "qwen3"),
        ("<|start_of_role|> <think> <response>", "granite"),
        ("[THINK] [/THINK]", "mistral"),
        ("<|channel|>analysis<|message|>", "openai_gptoss"),
        ("<|im_start|>", None),
    ],
)
def test_chosen_by_the_template(template: str, name: str | None) -> None:
    assert choose_reasoning_format(template) == name
