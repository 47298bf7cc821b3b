"""Forms beside JSON schema: expressions, choices, Lark, GBNF, structural tags; and where a constraint starts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from octavo._core import encode_abort
from octavo.errors import RequestError
from octavo.structured_outputs import StructuredOutputs
from tests.grammar.driver import EOS, Allowed, Driver, Row, accepted, spell, wander

TOOL_CALL, THINK_END = 258, 259
ARITHMETIC = """
root  ::= expr            # the start
expr  ::= term ([-+] term)*
term  ::= num | "(" expr ")"
num   ::= [0-9]{1,3} ("." [0-9]+)?
"""
JSON_GBNF = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws     ::= [ \t\n]{0,5}
"""
CALL = {
    "type": "tag",
    "begin": "<fn=go>",
    "content": {"type": "json_schema", "json_schema": {"type": "object", "properties": {"n": {"type": "integer"}}}},
    "end": "</fn>",
}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    return Driver(tmp_path_factory.mktemp("forms"), num_rows=32, max_tokens=400)


def check(driver: Driver, fields: dict[str, Any], good: list[str], bad: list[str]) -> None:
    """Texts that the constraint takes, and texts that it does not."""
    texts = [*good, *bad]
    rows = driver.run([(fields, spell(text)) for text in texts])
    assert [row.refusal for row in rows] == [None] * len(rows)
    taken = [text for row, text in zip(rows, texts, strict=True) if accepted(row, text)]
    assert taken == good


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("[0-9]{3}", ["123"], ["12", "1234", "abc"]),
        ("^(yes|no)$", ["yes", "no"], ["yesno", ""]),
        (r"a/b\.c", ["a/b.c"], ["a/bxc"]),
        ("[\\u4e00-\\u9fff]{2}", ["日本"], ["日", "日本語", "ab"]),
        ("(?i)ok", ["ok", "OK", "oK"], ["no"]),
        ("(a|b)*", ["", "abba"], ["abc"]),
        ("x$|y", ["x", "y"], ["xy"]),
    ],
)
def test_regex(driver: Driver, pattern: str, good: list[str], bad: list[str]) -> None:
    check(driver, {"regex": pattern}, good, bad)


def test_choice(driver: Driver) -> None:
    choices = ["yes", "yes, sir", "日本", "日本語", "naïve 🫠", 'q"\\', "l1\nl2\r\n\tl3", "\x7f\x01"]
    check(driver, {"choice": choices}, choices, ["", "ye", "yes, ", "日"])


def test_lark(driver: Driver) -> None:
    grammar = """
    start: "call " name " " args
    name: /[a-z]+/
    args: %json {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    """
    check(driver, {"grammar": grammar}, ['call f {"x":1}'], ['call f {"x":"1"}', 'call F {"x":1}', "call f {}"])


def test_schemas_within_lark_keep_the_rules(driver: Driver) -> None:
    [row] = driver.run([({"grammar": 'start: %json {"type": "array", "uniqueItems": true}'}, wander(0))])
    assert row.refusal == ('structured_outputs.grammar: %json number 1: at #: keyword "uniqueItems" is not supported')


def test_gbnf(driver: Driver) -> None:
    check(driver, {"grammar": ARITHMETIC}, ["1", "1+2", "(1-23)+(4.5)", "((7))"], ["1+", "()", "1234", "(1", "a"])
    good = ["{}", '{"a": [1, 2.5e3, "x\\n"], "b": {"c": null}}', '{ "é": true }']
    check(driver, {"grammar": JSON_GBNF}, good, ["[]", '{"a"}', "{'a': 1}", '{"a": 01}'])


def test_random_outputs_of_gbnf_are_json(driver: Driver) -> None:
    rows = driver.run([({"grammar": JSON_GBNF}, wander(seed)) for seed in range(20)])
    finished = [row for row in rows if row.finish == "stop"]
    assert len(finished) > 5
    for row in finished:
        json.loads(row.text)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"regex": "["}, "structured_outputs.regex: .*unclosed character class"),
        ({"regex": "(a"}, "structured_outputs.regex: .*unclosed group"),
        ({"regex": "*a"}, "structured_outputs.regex: .*repetition operator missing"),
        ({"regex": "(?<=x)+"}, "structured_outputs.regex: .*look-"),
        ({"regex": "(?=a)b"}, "structured_outputs.regex: .*look-"),
        ({"regex": "(a)\\1"}, "structured_outputs.regex: .*backreferences are not supported"),
        ({"regex": "(" * 200 + "a" + ")" * 200}, "structured_outputs.regex: brackets are nested 200 deep"),
        ({"grammar": "root ::= "}, "structured_outputs.grammar: line 1: a rule has no end"),
        ({"grammar": 'root ::= "a" | other'}, 'structured_outputs.grammar: rule "root" refers to "other"'),
        ({"grammar": 'main ::= "a"'}, 'structured_outputs.grammar: there is no rule "root"'),
        ({"grammar": 'root ::= ["a"'}, "structured_outputs.grammar: line 1: a class is not closed"),
        ({"grammar": "root ::= root"}, "structured_outputs.grammar: "),
        ({"grammar": "start: nothing"}, "structured_outputs.grammar: .*nothing"),
        ({"choice": [""]}, "structured_outputs.choice: every choice is empty"),
        ({"structural_tag": {"format": {"type": "or", "elements": []}}}, "structural_tag: elements must not be empty"),
        ({"structural_tag": {"format": {"type": "magic"}}}, "structural_tag: format: unknown variant `magic`"),
        ({"structural_tag": {"structures": [], "triggers": ["<x"]}}, "no tag begins with the trigger"),
    ],
)
def test_bad_constraints_are_refused(driver: Driver, fields: dict[str, Any], what: str) -> None:
    [row] = driver.run([(fields, wander(0))])
    assert row.refusal is not None
    assert re.search(what, row.refusal, re.DOTALL), row.refusal
    assert row.chosen == []


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({}, "exactly one of"),
        ({"json": {}, "regex": "a"}, "got json and regex"),
        ({"json": "not json"}, "structured_outputs.json is not JSON"),
        ({"json": 5}, "must be an object, got int"),
        ({"choice": []}, "has 0 entries"),
        ({"choice": "ab"}, "must be a list of strings"),
        ({"regex": ""}, "must be text that is not empty"),
        ({"regex": "a" * 20000}, "has 20000 characters"),
        ({"json": {"description": "x" * 600_000}}, "at most 524288 are taken"),
        ({"json": {"const": float("nan")}}, "can't be written as JSON"),
        ({"regex": "a", "start_after": []}, "must have 1 to 64 token ids"),
        ({"regex": "a", "start_after": [-1]}, "must be text or a list of token ids"),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": "x*"}, "of no use"),
        ({"json": {}, "strict": True}, "has no field 'strict'"),
    ],
)
def test_malformed_constraints_raise(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(RequestError, match=what) as caught:
        StructuredOutputs.from_mapping(fields)
    assert caught.value.param == "structured_outputs"


def test_structural_tag_old_form(driver: Driver) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    structures = [{"begin": f"<fn={name}>", "schema": schema, "end": "</fn>"} for name in ("go", "stop")]
    fields = {"structural_tag": {"structures": structures, "triggers": ["<fn="]}}
    good = ["", "hello <b> & more", '<fn=go>{"n":1}</fn>', 'a <fn=go>{"n":1}</fn> b <fn=stop>{"n":2}</fn>.']
    bad = ["<fn=run>", '<fn=go>{"n":"x"}</fn>', "text <fn=go>{}</fn>", "<fn="]
    check(driver, fields, good, bad)


@pytest.mark.parametrize(
    ("format_", "good", "bad"),
    [
        ({"type": "const_string", "value": "hi"}, ["hi"], ["h", "hix"]),
        ({"type": "regex", "pattern": "[ab]+"}, ["abba"], ["c", ""]),
        ({"type": "grammar", "grammar": ARITHMETIC}, ["(1+2)"], ["(1"]),
        (
            {
                "type": "sequence",
                "elements": [{"type": "const_string", "value": "n="}, {"type": "regex", "pattern": "[0-9]"}],
            },
            ["n=1"],
            ["n=", "1"],
        ),
        (
            {"type": "or", "elements": [{"type": "const_string", "value": "x"}, {"type": "any_text"}]},
            ["x", "anything"],
            [],
        ),
        (CALL, ['<fn=go>{"n":1}</fn>'], ["<fn=go>{}", "x<fn=go>{}</fn>"]),
        (
            {**CALL, "content": {"type": "any_text"}, "end": ["</a>", "</b>"]},
            ["<fn=go>x <i></a>", "<fn=go></b>"],
            ["<fn=go>", "<fn=go></a>x"],
        ),
        (
            {
                "type": "triggered_tags",
                "triggers": ["<fn"],
                "tags": [CALL],
                "at_least_one": True,
                "stop_after_first": True,
            },
            ["hm <fn=go>{}</fn>"],
            ["hm", "<fn=go>{}</fn> x"],
        ),
        (
            {"type": "tags_with_separator", "tags": [CALL], "separator": "; ", "at_least_one": True},
            ["<fn=go>{}</fn>; <fn=go>{}</fn>"],
            ["", "<fn=go>{}</fn>;"],
        ),
    ],
)
def test_structural_tag_formats(driver: Driver, format_: dict[str, Any], good: list[str], bad: list[str]) -> None:
    check(driver, {"structural_tag": {"type": "structural_tag", "format": format_}}, good, bad)


def spell_ids(token_ids: list[int]) -> Any:
    """Takes these ids, then EOS; notes what was allowed at each place."""

    def choose(row: Row, allowed: Allowed) -> int:
        at = len(row.chosen)
        assert at >= len(token_ids) or token_ids[at] in allowed, f"{token_ids[at]} at {at} is not allowed"
        return token_ids[at] if at < len(token_ids) else EOS[1]

    return choose


def test_special_tokens_in_tags_and_never_in_text(driver: Driver) -> None:
    tag = {**CALL, "begin": "<tool_call>", "end": "<eot>"}
    structural_tag = {"format": {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [tag]}}
    ids = [*b"Sure. ", TOOL_CALL, *b'{"n":5}', EOS[1]]
    [row] = driver.run([({"structural_tag": structural_tag}, spell_ids(ids))])
    assert row.finish == "stop"
    allowed: list[set[int]] = []

    def watch(row: Row, ids: Allowed) -> int:
        allowed.append({*ids.tolist()})
        return ord("x") if len(row.chosen) < 3 else EOS[0]

    driver.run([({"regex": "(?s:.*)"}, watch)])
    assert all(ids & {TOOL_CALL, THINK_END} == set() for ids in allowed)


@pytest.mark.parametrize("start", ["</think>", [THINK_END], "done:"])
def test_start_after(driver: Driver, start: Any) -> None:
    marker = [*b"done:"] if start == "done:" else [THINK_END]
    free = [*b"<eos> anything {[ ", TOOL_CALL, *b"5 "]
    fields = {"regex": "[0-9]{2}", "start_after": start}
    [row] = driver.run([(fields, spell_ids([*free, *marker, *b"42"]))])
    assert row.finish == "stop"
    assert len(row.token_ids) == len(free) + len(marker) + 2, "it ends where the grammar is complete"
    [row] = driver.run([(fields, lambda row, allowed: [*free, *marker, *b"4x"][len(row.chosen)])])
    assert row.finish == "error"


def test_no_end_before_the_constraint_has_begun(driver: Driver) -> None:
    """An answer that must have a form does not end within the free text before it."""
    ids = [*b"free", THINK_END, *b"42"]
    ends: list[set[int]] = []

    def watch(row: Row, allowed: Allowed) -> int:
        ends.append({*allowed.tolist()} & {*EOS})
        return ids[len(row.chosen)]

    driver.run([({"regex": "[0-9]{2}", "start_after": [THINK_END]}, watch)])
    assert ends == [set()] * len(ids)


def test_every_eos_is_allowed_where_the_grammar_accepts(driver: Driver) -> None:
    seen: list[list[int]] = []

    def watch(row: Row, allowed: Allowed) -> int:
        seen.append([token_id for token_id in allowed.tolist() if token_id >= 256])
        return ord("7") if len(row.chosen) < 3 else EOS[1]

    [row] = driver.run([({"regex": "[0-9]+"}, watch)])
    assert seen == [[], [*EOS], [*EOS], [*EOS]]
    assert row.finish == "stop"


def test_a_token_that_is_not_allowed_ends_only_its_sequence(driver: Driver) -> None:
    bad, good = driver.run([({"regex": "[0-9]{3}"}, spell("12x")), ({"regex": "[0-9]{3}"}, spell("123"))])
    assert bad.finish == "error"
    assert bad.text == "12"
    assert isinstance(bad.reason, str)
    assert bad.reason.startswith("structured_outputs: the grammar can't go on after 3 tokens")
    assert good.finish == "stop"
    assert good.text == "123"


def test_equal_grammars_are_compiled_once_and_bad_ones_remembered(tmp_path: Path) -> None:
    driver = Driver(tmp_path, num_rows=4)
    first = driver.run([({"regex": "a|b"}, spell("a"))] * 3)
    again = driver.run([({"regex": "a|b"}, spell("b"))] * 3)
    assert [row.text for row in first + again] == ["a"] * 3 + ["b"] * 3
    refused = driver.run([({"regex": "["}, spell("a"))] * 3)
    assert all(row.refusal == refused[0].refusal is not None for row in refused)


def test_a_request_waits_for_its_grammar_alone(tmp_path: Path) -> None:
    """It holds no row and stops nobody: the free request behind it starts in the first step."""
    driver = Driver(tmp_path, num_rows=4)
    rows: dict[int, Row] = {}
    held = driver.add(StructuredOutputs(regex="[0-9]{2}").to_wire(), spell("42"), rows)
    driver.add(b"", lambda row, allowed: EOS[0], rows)
    plan = driver.core.step(None)
    assert (plan.num_rows, plan.needs_masks) == (1, False)
    assert driver.core.stats()["num_waiting"] == 1
    driver.core.check()
    assert held.finish is None
    assert driver.core.wait(30), "the compiling thread wakes the loop"


def test_a_request_that_leaves_while_its_grammar_is_compiled_is_forgotten(tmp_path: Path) -> None:
    driver = Driver(tmp_path, num_rows=4)
    rows: dict[int, Row] = {}
    driver.add(StructuredOutputs(regex="[0-9]{2}").to_wire(), spell("42"), rows)
    assert driver.core.step(None).num_rows == 0
    driver.core.add(encode_abort(next(iter(rows))))
    driver.core.step(None)
    driver.core.check()
    assert driver.core.stats()["num_waiting"] == 0
    assert len(driver.core.take_frames()) > 0
    [row] = driver.run([({"regex": "[0-9]{2}"}, spell("17"))])
    assert row.text == "17"
