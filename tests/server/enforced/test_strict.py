"""Strict tools under `auto`, in every format: free text is free, right calls pass, wrong ones can't be written.

A chooser spells texts against the masks of a real engine core. What it can't spell goes on at random: whatever comes,
the format's parser finds no call that breaks its schema.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from reading import read
from tests.grammar.driver import ALPHABET, Allowed, Chooser, Driver, Row

from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams
from octavo.server.dialect import Dialect, Stage
from octavo.server.events import TurnRequest
from octavo.server.reasoning.table import reasoning_format
from octavo.server.tools.base import Tools
from octavo.server.tools.table import TOOL_FORMATS, tool_format
from octavo.server.turn_form import TurnForm

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "note", "parameters": {"type": "object"}}},
]
J, N = '{"name": "get_weather", "arguments": ARGS}', '{"name": "note", "arguments": {"a": [1]}}'
P = J.replace("arguments", "parameters")
XML = "<function=get_weather>\n<parameter=city>\nCITY\n</parameter>\n</function>"
GLM = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>CITY</arg_value>\n</tool_call>"
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\nARGS\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>ARGS<｜tool▁call▁end｜>"
KIMI = "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>ARGS<|tool_call_end|>"
DS = "<｜tool▁calls▁begin｜>CALL<｜tool▁calls▁end｜>"
FINAL = "<|channel|>final<|message|>"
HARMONY = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>ARGS"
# Calls as each format's parser reads them; ARGS or CITY stands for what varies.
CALLS: dict[str, list[str]] = {
    "openai": [HARMONY, f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{HARMONY}"],
    "deepseek_v3": [DS.replace("CALL", V3), V3, "So: " + V3],
    "deepseek_v31": [DS.replace("CALL", V31), V31],
    "kimi_k2": [f"<|tool_calls_section_begin|>{KIMI}<|tool_calls_section_end|>", KIMI],
    "qwen3_coder": [f"I look.\n<tool_call>\n{XML}\n</tool_call>", XML],
    "glm45": [GLM],
    "mistral": [f"[TOOL_CALLS][{J}]", f"Well [TOOL_CALLS][{N}, {J}]", "[TOOL_CALLS]get_weather[ARGS]ARGS"],
    "phi4_mini_json": [f"functools[{J}]", f"<|tool_call|>[{J}]<|/tool_call|>"],
    "granite": [f"<|tool_call|>[{J}]", f"<tool_call>\n{J}\n</tool_call>", f"<function_call>{J}"],
    "hermes": [f"Let me see <tool_call>\n{J}\n</tool_call>\n<tool_call>\n{N}\n</tool_call>"],
    "pythonic": ["[get_weather(city=CITYJSON)]", "<|python_start|>[get_weather(city=CITYJSON)]<|python_end|>"],
    "llama3_json": [P, f"  {P}; {P}", f"<|python_tag|>{P}", P.replace('"name"', '"type": "function", "name"')],
    "json": [f"[{J}]", J, f"\n[{N}, {J}]", f"```json\n[{J}]\n```", f"```json\n{J}\n```"],
}
FREE = [
    "",
    "Hello.",
    "1 < 2 [sic] {x}",
    '{"answer": 3}',
    "[1, 2]",
    "\n\n* [a](b) `c`",
    '["name"]',
    "```py\nx\n```",
    "é🦙",
]


def tokenizer(specials: list[str]) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": 256 + i, "content": name, **flags} for i, name in enumerate(["<eos>", *specials])],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {letter: i for i, letter in enumerate(ALPHABET)}, "merges": []},
    }


class Case:
    """A format under a vocabulary that has its marks as special tokens, or as text."""

    def __init__(self, folder: Path, name: str, *, special: bool, reasoning: str | None = None) -> None:
        found = tool_format(name)
        self.name = name
        self.specials = list(found.marks) if special else []
        self.driver = Driver(
            folder,
            tokenizer=tokenizer(self.specials),
            vocab_size=257 + len(self.specials),
            eos=[256],
            num_rows=8,
            max_tokens=400,
        )
        dialect = Dialect(
            found,
            reasoning_format(reasoning) if reasoning else None,
            found.shape(lambda mark: mark in self.specials),
        )
        request = TurnRequest(messages=[], params=SamplingParams(), tools=TOOLS)
        self.form = TurnForm(request, dialect)
        self.picks = random.Random(name)

    def ids(self, text: str) -> list[int]:
        for i, mark in enumerate(self.specials):
            text = text.replace(mark, chr(0xE000 + i))
        return [
            ord(char) - 0xE000 + 257 if 0xE000 <= ord(char) < 0xF000 else byte
            for char in text
            for byte in ([0] if 0xE000 <= ord(char) < 0xF000 else char.encode())
        ]

    def text(self, row: Row) -> str:
        parts = [
            self.specials[token_id - 257].encode() if token_id > 256 else bytes([token_id])
            for token_id in row.token_ids
            if token_id != 256
        ]
        return b"".join(parts).decode(errors="replace")

    def spell(self, text: str, *, strays: bool) -> Chooser:
        """The text, then EOS. What is not allowed ends the sequence, or (`strays`) something that is comes instead."""
        wanted = [*self.ids(text), 256]

        def choose(row: Row, allowed: Allowed) -> int:
            at = len(row.chosen)
            token_id = wanted[at] if at < len(wanted) else 256
            if not strays or token_id in allowed:
                return token_id
            if at >= len(wanted) and row.accepts_end:
                return 256
            plain = [i for i in allowed.tolist() if i != 256 and (i > 256 or 32 <= i < 127)]
            return self.picks.choice(plain or allowed.tolist())

        return choose

    def run(self, texts: list[str], stage: Stage = "answers", *, strays: bool = False) -> list[Row]:
        outputs = self.form.outputs(stage)
        assert outputs is not None
        fields = {
            "structural_tag": outputs.structural_tag,
            "whitespace_pattern": outputs.whitespace_pattern,
            "start_after": outputs.start_after,
        }
        return self.driver.run((fields, self.spell(text, strays=strays)) for text in texts)

    def calls(self, text: str) -> list[tuple[str, str]]:
        found = read(tool_format(self.name).parser(Tools(TOOLS)), [text])
        return [(name, arguments) for name, _, arguments in found.calls]


def filled(template: str, city: str) -> str:
    arguments = json.dumps({"city": city})
    text = template.replace("ARGS]ARGS", f"ARGS]{arguments}") if "[ARGS]" in template else template
    text = text.replace("ARGS", arguments) if "[ARGS]" not in template else text
    return text.replace("CITYJSON", json.dumps(city)).replace("CITY", city)


def is_right(name: str, arguments: str) -> bool:
    value = json.loads(arguments)
    if name != "get_weather":
        return name == "note" and isinstance(value, dict)
    return value.get("city") in ("Oslo", "Rome") and set(value) <= {"city", "days"} and 1 <= value.get("days", 1) <= 9


CASES = [(name, special) for name in TOOL_FORMATS for special in (True, False)]


@pytest.mark.parametrize(("name", "special"), CASES)
def test_calls_and_text(tmp_path: Path, name: str, special: bool) -> None:
    case = Case(tmp_path, name, special=special)
    templates = [text for text in CALLS[name] if ("[ARGS]" in text) == (name == "mistral" and special)]
    free = [FINAL + text for text in FREE] if name == "openai" else FREE
    right, wrong = ([filled(text, city) for text in templates] for city in ("Rome", "Paris"))
    for text in right + wrong:
        assert [call for call in case.calls(text) if call[0] == "get_weather"], "the parser reads it"
    rows = case.run([*right, *wrong, *free])
    unwritten = [
        text
        for text, row in zip(right + free, [*rows[: len(right)], *rows[len(right + wrong) :]], strict=True)
        if row.finish != "stop"
    ]
    assert unwritten == []
    for text, row in zip(wrong, rows[len(right) :], strict=False):
        assert row.finish == "error", text


@pytest.mark.parametrize(("name", "special"), CASES)
def test_no_wrong_call_whatever_is_tried(tmp_path: Path, name: str, special: bool) -> None:
    case = Case(tmp_path, name, special=special)
    templates = [filled(text, city) for text in CALLS[name] for city in ("Paris", "Oslo")]
    tries = []
    for _ in range(60):
        text = list(case.picks.choice(templates))
        for _ in range(case.picks.randrange(4)):
            text[case.picks.randrange(len(text))] = case.picks.choice(
                [" ", "\n", '"', "{", "[", "x", "", "}", "(", ","]
            )
        tries.append("".join(text))
    num_calls = 0
    for row in case.run(tries, strays=True):
        assert row.finish in ("stop", "length"), row.reason
        for called, arguments in case.calls(case.text(row)) if row.finish == "stop" else []:
            assert is_right(called, arguments), case.text(row)
            num_calls += 1
    assert num_calls > 5


@pytest.mark.parametrize("name", ["json", "llama3_json", "pythonic"])
def test_calls_after_reasoning(tmp_path: Path, name: str) -> None:
    """Where nothing marks calls, they begin the answer: behind reasoning, if there is any."""
    case = Case(tmp_path, name, special=True, reasoning="qwen3")
    right, wrong = (filled(CALLS[name][0], city) for city in ("Rome", "Paris"))
    thought = "<think>\nhm [x] {\n</think>\n\n"
    texts = [right, thought + right, "Yes.", thought + "Yes.", wrong, thought + wrong]
    assert [row.finish for row in case.run(texts, "may_think")] == ["stop"] * 4 + ["error"] * 2
    texts = [f"hm</think>\n\n{right}", "hm</think>Yes.", f"hm</think>\n\n{wrong}"]
    assert [row.finish for row in case.run(texts, "thinks")] == ["stop", "stop", "error"]


def test_names_that_a_format_can_not_write() -> None:
    tool = {"type": "function", "function": {"name": "get-weather", "parameters": WEATHER, "strict": True}}
    found = tool_format("pythonic")
    request = TurnRequest(messages=[], params=SamplingParams(), tools=[tool])
    form = TurnForm(request, Dialect(found, None, found.shapes[0]))
    with pytest.raises(RequestError, match=r"tools: 'get-weather' is no name .*leave out strict"):
        form.outputs("answers")
