"""Collected faults of structured outputs over HTTP. Names of tests begin with the ids of the faults."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import jsonschema
import pytest

from tests.cases.calls import BYSTANDER, CANARY, CHAT, TEXT, choice_of, post, stream, strict_json, watched

Body = dict[str, Any]
HI: list[Any] = [{"role": "user", "content": "Answer."}]
LLAMA = "🦙🌶 日本語 龜 👩‍👩‍👧"
PERSON = {
    "type": "object",
    "properties": {
        "n": {"type": "string", "maxLength": 10},
        "k": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["n", "k"],
    "additionalProperties": False,
}
BAD: list[Body] = [
    *(
        {"structured_outputs": {"json": {"type": "not-a-type"}}},
        {"structured_outputs": {"json": {"$ref": "#/$defs/n"}}},
    ),
    *({"structured_outputs": {"json": {"properties": []}}}, {"structured_outputs": {"json": "not json"}}),
    *({"structured_outputs": {"regex": pattern}} for pattern in ("[", "(a", "*a", "(?<=x)+", "(?=a)b", "(a)\\1")),
    *({"structured_outputs": {"grammar": "root ::= "}}, {"structured_outputs": {"choice": []}}),
    {"structured_outputs": {"json": {"type": "object"}, "regex": "a"}},
    {"structured_outputs": {"josn": {}}},
    {"response_format": {"type": "json_schema", "schema": {"type": "object"}}},
    {"response_format": {"type": "yaml"}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "not-a-type"}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "array", "contains": {}}}}},
    {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
]
SCHEMAS: list[Body] = [
    {"type": "string", "pattern": "^[a-z]+$", "minLength": 5, "maxLength": 8},
    {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 4},
    {"type": "integer", "minimum": -5, "maximum": 20000000000},
    {"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 12},
    {"type": "number", "minimum": 0.5, "maximum": 0.75},
    {"type": "integer", "multipleOf": 7},
    {"type": "string", "format": "date"},
    {"type": "string", "enum": ["a", "b"], "minLength": 1},
    {"const": {"k": [1, None]}},
    {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}, "minItems": 2},
    {"type": "object", "propertyNames": {"pattern": "^x"}, "minProperties": 2},
    {"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 3}]},
]


def body(outputs: Body, **fields: Any) -> Body:
    return {"messages": HI, "max_tokens": 64, "structured_outputs": outputs, **fields}


@pytest.mark.parametrize("streamed", [False, True])
async def test_so01_bad_constraints_are_refused_and_leave_no_trace(streamed: bool, client: httpx.AsyncClient) -> None:
    alone = await stream(client, TEXT, **BYSTANDER)
    canary = (await choice_of(client, TEXT, **CANARY))["text"]
    async with watched(client, alone, canary):
        for fields in BAD:
            status, answer = await post(client, CHAT, {"messages": HI, "max_tokens": 8, "stream": streamed, **fields})
            assert status == 400, (fields, answer)
            assert answer["error"]["param"] in fields, answer
            assert answer["error"]["param"] in answer["error"]["message"]
    assert (await client.get("/health")).status_code == 200


NO_SCHEMA = {"type": "not-a-type"}
PLACES: list[tuple[str, Body, str]] = [
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": NO_SCHEMA}}}, "response_format"),
    (TEXT, {"response_format": {"type": "json_schema", "json_schema": {"schema": NO_SCHEMA}}}, "response_format"),
    ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": NO_SCHEMA}}}, "output_config"),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "a", "schema": NO_SCHEMA}}}, "text"),
    *((path, {"structured_outputs": {"json": NO_SCHEMA}}, "structured_outputs") for path in ("/v1/messages", TEXT)),
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("path", "fields", "field"), PLACES)
async def test_so01_the_field_is_named_as_the_request_names_it(
    path: str, fields: Body, field: str, streamed: bool, client: httpx.AsyncClient
) -> None:
    asked: Body = {"prompt": "a"} if path == TEXT else {"input": "a"} if "responses" in path else {"messages": HI}
    limit = {"max_output_tokens" if "responses" in path else "max_tokens": 16}
    status, answer = await post(client, path, {**asked, **limit, **fields, "stream": streamed})
    assert status == 400, answer
    assert answer["error"]["message"].startswith(f"{field}."), answer


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: ",".join(schema))
async def test_so03_keywords_are_enforced_or_refused(schema: Body, client: httpx.AsyncClient) -> None:
    calls = [post(client, CHAT, body({"json": schema}, temperature=1.2, seed=seed)) for seed in range(10)]
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
    for status, answer in await asyncio.gather(*calls):
        if status == 400:
            assert any(f'"{keyword}"' in answer["error"]["message"] for keyword in schema)
            continue
        choice = answer["choices"][0]
        if choice["finish_reason"] == "stop":
            validator.validate(strict_json(choice["message"]["content"]))


async def test_so05_blanks_are_bounded(client: httpx.AsyncClient) -> None:
    """Ids of this vocabulary for tab, line break and blank get the bias."""
    _, answer = await post(client, "/tokenize", {"prompt": "\t\n ", "add_special_tokens": False})
    biased = {"temperature": 0, "max_tokens": 400, "logit_bias": {str(token): 100 for token in answer["tokens"]}}
    schema = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
    choice = await choice_of(client, CHAT, messages=HI, response_format=schema, **biased)
    assert choice["finish_reason"] == "stop"
    text = choice["message"]["content"]
    assert set(json.loads(text)) == {"n", "k"}
    choice = await choice_of(client, CHAT, messages=HI, response_format={"type": "json_object"}, **biased)
    for found in (text, choice["message"]["content"]):
        outside = re.sub(r'"(?:[^"\\]|\\.)*"?', "", found)
        assert max(map(len, re.findall(r"\s+", outside)), default=0) <= 18
        assert "\n\n" not in outside


async def test_so07_ends_of_grammars(client: httpx.AsyncClient) -> None:
    true = await choice_of(client, CHAT, **body({"json": {"type": "boolean"}}, temperature=0, min_tokens=60))
    assert (true["message"]["content"] in ("true", "false"), true["finish_reason"]) == (True, "stop")
    letter = await stream(client, CHAT, **body({"json": {"enum": ["a"]}}, temperature=0, min_tokens=10))
    assert letter.text() == '"a"'
    digits = await choice_of(client, CHAT, **body({"regex": "[0-9]{3}"}, seed=1))
    assert re.fullmatch("[0-9]{3}", digits["message"]["content"])
    assert digits["finish_reason"] == "stop"
    seen = set()
    for seed in range(12):
        choice = await choice_of(client, CHAT, **body({"choice": ["yes", "yes, sir"]}, seed=seed, temperature=2))
        seen.add(choice["message"]["content"])
    assert seen <= {"yes", "yes, sir"}
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
    schema["additionalProperties"] = False
    stopped = await choice_of(client, CHAT, **body({"json": schema}, temperature=0, stop=["}"]))
    assert stopped["finish_reason"] == "stop"
    assert "}" not in stopped["message"]["content"]
    again = await choice_of(client, CHAT, **body({"regex": "[0-9]{3}"}, seed=1))
    assert again["message"] == digits["message"]


async def test_so09_characters_are_written_as_they_are(client: httpx.AsyncClient) -> None:
    members = ["天气很好", "Åsgård", "🐙", 'a"b\\c', "tab\there", "e\u0301t"]
    schema = {
        "type": "object",
        "properties": {"心情": {"enum": members}},
        "required": ["心情"],
        "additionalProperties": False,
    }
    calls = [choice_of(client, CHAT, **body({"json": schema}, temperature=1.5, seed=seed)) for seed in range(20)]
    texts = [choice["message"]["content"] for choice in await asyncio.gather(*calls)]
    values = {strict_json(text)["心情"] for text in texts}
    assert values <= {*members}
    assert len(values) > 1
    assert not any("\\u" in text for text in texts)
    choices = ["日本", "日本語", "naïve 🫠"]
    calls = [choice_of(client, CHAT, **body({"choice": choices}, temperature=1.5, seed=seed)) for seed in range(20)]
    found = {choice["message"]["content"] for choice in await asyncio.gather(*calls)}
    assert found <= {*choices}
    assert len(found) > 1
    pair = await choice_of(client, CHAT, **body({"regex": "[\\u4e00-\\u9fff]{2}"}, seed=1))
    assert re.fullmatch("[\u4e00-\u9fff]{2}", pair["message"]["content"])


@pytest.mark.parametrize("text", [LLAMA, 'l1\nl2\r\nl3 l4 "q" data: x', "  a    b\t\tc\n\n\n  d"])
async def test_st01_st07_tk07_forced_text_arrives_whole(text: str, client: httpx.AsyncClient) -> None:
    wanted = body({"choice": [text]}, temperature=0)
    whole = await choice_of(client, CHAT, **wanted)
    streamed = await stream(client, CHAT, **wanted)
    assert whole["message"]["content"] == streamed.text() == text
    assert whole["finish_reason"] == "stop"
    assert not any("\ufffd" in (part["delta"].get("content") or "") for part in streamed.of(0))


async def test_st02_cut_within_a_character(client: httpx.AsyncClient) -> None:
    fields: Body = {"prompt": "x", "max_tokens": 2, "temperature": 0, "logprobs": 1}
    fields["structured_outputs"] = {"choice": ["🌶"]}
    whole = await choice_of(client, TEXT, **fields)
    streamed = await stream(client, TEXT, **fields)
    assert whole["usage"]["completion_tokens"] == 2
    assert whole["text"] == streamed.text() in ("", "\ufffd")


@pytest.mark.parametrize(("included", "expected"), [(False, "red "), (True, "red green blue")])
async def test_st04_stop_strings_in_forced_text(included: bool, expected: str, client: httpx.AsyncClient) -> None:
    fields: Body = {"prompt": "x", "temperature": 0, "max_tokens": 40, "stop": ["green blue"]}
    fields |= {"structured_outputs": {"choice": ["red green blue black white"]}, "include_stop_str_in_output": included}
    whole = await choice_of(client, TEXT, **fields)
    streamed = await stream(client, TEXT, **fields)
    assert whole["text"] == streamed.text() == expected
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", "green blue")


async def test_sa06_logprobs_of_forced_tokens_are_numbers(client: httpx.AsyncClient) -> None:
    fields = body({"choice": ["true"]}, temperature=0.01, top_p=0.3, logprobs=True, top_logprobs=20, max_tokens=6)
    choice = await choice_of(client, CHAT, **fields)
    assert choice["message"]["content"] == "true"
    assert all(-1e4 < entry["logprob"] <= 0 for entry in choice["logprobs"]["content"])
