"""Texts that models write, and what is in them: the table that the parsers' tests read.

Every format writes the same two calls (nested JSON, escapes, marks inside strings), then its own corners.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "note": {"type": "string"},
        "days": {"type": "integer"},
        "warm": {"type": "boolean"},
        "degrees": {"type": ["number", "null"]},
        "places": {"type": "array", "items": {"$ref": "#/$defs/place"}},
        "first": {"$ref": "#/$defs/place"},
        "any": {},
    },
    "$defs": {"place": {"type": "object"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]

NASTY = {"city": "Oslo", "note": 'he said "</tool_call>" {[ é🦙 \\ \n', "n": {"a": [1, {"b": None}], "c": -1.5e3}}
NASTY_JSON = json.dumps(NASTY, ensure_ascii=False)
ESCAPED_JSON = json.dumps(NASTY)


@dataclass(frozen=True)
class Text:
    """One text: what it holds. `arguments` are values, or the text of arguments that are no JSON."""

    format: str
    text: str
    content: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    ids: tuple[str | None, ...] | None = None


def _call(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


BOTH = (("get_weather", NASTY), ("now", {}))
W, N = _call("get_weather", NASTY_JSON), _call("now", "{}")
LIST = f"[{W}, {N}]"
DS = {
    "calls": "<｜tool▁calls▁begin｜>",
    "ends": "<｜tool▁calls▁end｜>",
    "call": "<｜tool▁call▁begin｜>",
    "sep": "<｜tool▁sep｜>",
    "end": "<｜tool▁call▁end｜>",
}


def _v3(name: str, arguments: str) -> str:
    return f"{DS['call']}function{DS['sep']}{name}\n```json\n{arguments}\n```{DS['end']}"


def _v31(name: str, arguments: str) -> str:
    return f"{DS['call']}{name}{DS['sep']}{arguments}{DS['end']}"


def _kimi(call: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{call}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def _xml(name: str, **values: str) -> str:
    lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"


def _glm(name: str, **values: str) -> str:
    lines = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    return f"<tool_call>{name}\n{lines}</tool_call>"


TYPED_TEXT = {
    "city": 'a "b"\n<b>\\',
    "days": "3",
    "warm": "True",
    "degrees": "null",
    "places": '[{"a": 1}]',
    "first": '{"x": [2.5, "é"]}',
    "any": "7",
    "unknown": "plain words",
}
TYPED = {
    "city": 'a "b"\n<b>\\',
    "days": 3,
    "warm": True,
    "degrees": None,
    "places": [{"a": 1}],
    "first": {"x": [2.5, "é"]},
    "any": 7,
    "unknown": "plain words",
}
PYTHON = (
    "get_weather(city='Oslo', note=\"it's )]\", days=-3, warm=True, degrees=None, places=[{'a': (1, 2)}], any=true)"
)
PYTHON_VALUES = {
    "city": "Oslo",
    "note": "it's )]",
    "days": -3,
    "warm": True,
    "degrees": None,
    "places": [{"a": [1, 2]}],
    "any": True,
}
H = "<|channel|>commentary to=functions."

GOOD = [
    Text("hermes", f"Sure. <tool_call>\n{W}\n</tool_call>\n<tool_call>\n{N}\n</tool_call>", "Sure.", BOTH),
    Text("hermes", f"<tool_call>{W}\n{N}</tool_call>\nDone", "Done", BOTH),
    Text("hermes", f"<tool_call>{LIST}</tool_call>", "", BOTH),
    Text("hermes", f"<tool_call>{_call('get_weather', ESCAPED_JSON)}</tool_call>", "", BOTH[:1]),
    Text("hermes", f"<tool_call>{_call('get_weather', json.dumps(NASTY_JSON))}</tool_call>", "", BOTH[:1]),
    Text("hermes", f'<tool_call>{{"arguments": {NASTY_JSON}, "name": "get_weather"}}</tool_call>', "", BOTH[:1]),
    Text("hermes", '<tool_call>{"name": "now"}</tool_call>', "", BOTH[1:]),
    Text("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call> x', "x", BOTH[1:]),
    Text("hermes", '<tool_call>{"name": "now", "arguments": {}, "id": "z"}</tool_call>', "", BOTH[1:]),
    Text("hermes", f"no close <tool_call>{W}", "no close", BOTH[:1]),
    Text("hermes", f'<tool_call>{{"type": "function", "function": {W}}}</tool_call>', "", BOTH[:1]),
    Text("llama3_json", _call("get_weather", NASTY_JSON, "parameters"), "", BOTH[:1]),
    Text("llama3_json", f"{W}; {N}", "", BOTH),
    Text("llama3_json", f"<|python_tag|>{W};{N}", "", BOTH),
    Text("llama3_json", f"I will: <|python_tag|>{W}", "I will:", BOTH[:1]),
    Text("pythonic", f"[{PYTHON}, now()]", "", (("get_weather", PYTHON_VALUES), ("now", {}))),
    Text("pythonic", f"<|python_start|>[{PYTHON}]<|python_end|>", "", (("get_weather", PYTHON_VALUES),)),
    Text("pythonic", "[get_weather('Rome', days=2)]", "", (("get_weather", {"city": "Rome", "days": 2}),)),
    Text("mistral", f"Ok[TOOL_CALLS] {LIST}", "Ok", BOTH),
    Text("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "a"}]', "", BOTH[1:]),
    Text("mistral", '[TOOL_CALLS][{"id": "a1", "name": "now", "arguments": {}}]', "", BOTH[1:], ("a1",)),
    Text("mistral", f"[TOOL_CALLS]get_weather[ARGS]{NASTY_JSON}[TOOL_CALLS]now[ARGS]{{}}", "", BOTH),
    Text("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]abc123xyz[ARGS]{NASTY_JSON}", "", BOTH[:1], ("abc123xyz",)),
    Text("mistral", f"[TOOL_CALLS]get_weather{NASTY_JSON}", "", BOTH[:1]),
    Text("qwen3_coder", f"Let me see.\n{_xml('get_weather', **TYPED_TEXT)}", "Let me see.", (("get_weather", TYPED),)),
    Text("qwen3_coder", f"{_xml('now')}\n{_xml('get_weather', days='1')}", "", (BOTH[1], ("get_weather", {"days": 1}))),
    Text("qwen3_coder", "<function=now>\n</function>\n</tool_call>", "", BOTH[1:]),
    Text("qwen3_coder", _xml("get_weather", city="\n two\n\n"), "", (("get_weather", {"city": "\n two\n\n"}),)),
    Text("qwen3_coder", _xml("get_weather", days="many"), "", (("get_weather", {"days": "many"}),)),
    Text(
        "deepseek_v3", f"Hm.{DS['calls']}{_v3('get_weather', NASTY_JSON)}\n{_v3('now', '{}')}{DS['ends']}", "Hm.", BOTH
    ),
    Text("deepseek_v31", f"{DS['calls']}{_v31('get_weather', NASTY_JSON)}{_v31('now', '{}')}{DS['ends']}", "", BOTH),
    Text("deepseek_v31", f"{DS['calls']}{_v31('now', '{}')}{DS['ends']}.", ".", BOTH[1:]),
    Text(
        "glm45", f"Ok\n{_glm('get_weather', **TYPED_TEXT)}\n{_glm('now')}", "Ok", (("get_weather", TYPED), ("now", {}))
    ),
    Text("glm45", "<tool_call>now</tool_call>", "", BOTH[1:]),
    Text(
        "kimi_k2",
        f"Hm <|tool_calls_section_begin|>{_kimi('functions.get_weather:0', NASTY_JSON)}\n"
        f"{_kimi('functions.now:1', '{}')}<|tool_calls_section_end|>",
        "Hm",
        BOTH,
        ("functions.get_weather:0", "functions.now:1"),
    ),
    Text(
        "openai",
        f"<|channel|>commentary<|message|>Now.<|end|><|start|>assistant{H}get_weather <|constrain|>json<|message|>"
        f"{NASTY_JSON}<|call|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{{}}",
        "Now.",
        BOTH,
    ),
    Text("openai", "<|channel|>final<|message|>Hello <b>", "Hello <b>"),
    Text("granite", f"<|tool_call|>{LIST}", "", BOTH),
    Text("granite", f"a <function_call> {W}\n<function_call> {N}", "a", BOTH),
    Text("granite", f"<tool_call>\n{W}\n</tool_call>", "", BOTH[:1]),
    Text("phi4_mini_json", f"functools{LIST}", "", BOTH),
    Text("phi4_mini_json", f"<|tool_call|>{LIST}<|/tool_call|>", "", BOTH),
    Text("json", LIST, "", BOTH),
    Text("json", f"```json\n{W}\n```\nthat", "that", BOTH[:1]),
    Text("json", f'{{"type": "function", "function": {W}}}', "", BOTH[:1]),
    Text("json", _call("get_weather", NASTY_JSON, "parameters"), "", BOTH[:1]),
]

# What is no call is content, whole; what is cut before its name is left out; what is cut later keeps what came.
BAD = [
    Text("hermes", "a < b and <tool> is text, 1 <", "a < b and <tool> is text, 1 <"),
    Text("hermes", "</tool_call> stray", "</tool_call> stray"),
    Text("hermes", "x <tool_call>not json</tool_call> y", "x <tool_call>not json</tool_call> y"),
    Text("hermes", '<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>'),
    Text("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>'),
    Text("hermes", 'Hi <tool_call>{"name":"get_wea', "Hi "),
    Text("hermes", "Hi <tool_call>", "Hi "),
    Text("hermes", 'Hi <tool_call>{"name":"x","argu', "Hi "),
    Text("hermes", '<tool_call>{"name":"x","arguments":{"a":1}', "", (("x", '{"a":1'),)),
    Text("hermes", '<tool_call>{"name":"x","arguments":{"a":"b', "", (("x", '{"a":"b'),)),
    Text("hermes", f"<tool_call>{N}</tool_call><tool_call>oops", "<tool_call>oops", BOTH[1:]),
    Text("hermes", f"<tool_call>[{N}, oops]</tool_call>", ", oops]</tool_call>", BOTH[1:]),
    Text("llama3_json", '{"name": "Bob", "arguments": {}} is JSON', '{"name": "Bob", "arguments": {}} is JSON'),
    Text("llama3_json", '{"answer": 5}', '{"answer": 5}'),
    Text("llama3_json", ' {"name": "now"}', ' {"name": "now"}'),
    Text("llama3_json", f"see {N}", f"see {N}"),
    Text("pythonic", "[1, 2, 3]", "[1, 2, 3]"),
    Text("pythonic", "[now(x)]", "[now(x)]"),
    Text("pythonic", "[now(**{})] [now()]", "[now(**{})] [now()]"),
    Text("pythonic", "[nowhere()]", "[nowhere()]"),
    Text("pythonic", "[now(", "[now("),
    Text("pythonic", f"[now({'[' * 500}{']' * 500})]", f"[now({'[' * 500}{']' * 500})]"),
    Text("mistral", "[TOOL_CALLS] what?", "[TOOL_CALLS] what?"),
    Text("mistral", "a [TOOL", "a [TOOL"),
    Text("mistral", "a[TOOL_CALLS]get_wea", "a"),
    Text("mistral", '[TOOL_CALLS]now[ARGS]{"a', "", (("now", '{"a'),)),
    Text("qwen3_coder", "<tool_call>\nhm", "<tool_call>\nhm"),
    Text("qwen3_coder", "if <function= > x", "if <function= > x"),
    Text("qwen3_coder", "<tool_call>\n<function=now", ""),
    Text("qwen3_coder", "<function=get_weather>\n<parameter=city>\nOs", "", (("get_weather", '{"city": "Os'),)),
    Text("qwen3_coder", "<function=get_weather>\n<parameter=days>\n1", "", (("get_weather", '{"days": '),)),
    Text("deepseek_v31", f"{DS['calls']}what", f"{DS['calls']}what"),
    Text("deepseek_v3", f"{DS['calls']}{DS['call']}function{DS['sep']}no", ""),
    Text("deepseek_v31", f"{DS['call']}now{DS['sep']}{{}}", "", (("now", "{"),)),
    Text("glm45", "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>"),
    Text("glm45", "<tool_call>now<arg_key>a</arg_key>b", "<arg_key>a</arg_key>b", (("now", ""),)),
    Text("kimi_k2", "<|tool_call_begin|>a b", "<|tool_call_begin|>a b"),
    Text("openai", "plain <|end|>", "plain"),
    Text("openai", "<|channel|>anal", ""),
    Text("granite", "<|tool_call|>no", "<|tool_call|>no"),
    Text("phi4_mini_json", "functools[1]", "functools[1]"),
    Text("json", "[1, 2]", "[1, 2]"),
    Text("json", '```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```'),
    Text("json", '{"name": "get_weather", "argu', '{"name": "get_weather", "argu'),
]
