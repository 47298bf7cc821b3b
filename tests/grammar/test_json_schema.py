"""No output violates its schema: values spelled out byte by byte, and outputs of allowed bytes picked at random."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.grammar.conformance import is_valid, verdicts
from tests.grammar.corpus import CORPUS
from tests.grammar.driver import Driver, accepted, spell, wander

SEEDS = 6


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    return Driver(tmp_path_factory.mktemp("schema"), num_rows=64, max_tokens=400)


def test_conformance(tmp_path: Path) -> None:
    """See conformance.py: nothing wrong is accepted, and few valid values can't be written."""
    found = list(verdicts(tmp_path))
    assert [(v.schema, v.wrong) for v in found if v.wrong] == []
    counts = [sum(v.counts[name] for v in found) for name in ("pass", "narrow")]
    assert counts[0] > 7000
    assert counts[1] < 60
    refused = {v.keyword for v in found if v.refusal is not None}
    assert refused < {*CORPUS}
    for verdict in found:
        if verdict.refusal is not None and verdict.schema is not False:
            assert verdict.refusal.startswith("structured_outputs.json: at #"), verdict.refusal


@pytest.mark.parametrize("keyword", CORPUS)
def test_random_outputs_are_valid(driver: Driver, keyword: str) -> None:
    for schema, _ in CORPUS[keyword]:
        if schema is False:
            continue
        rows = driver.run([({"json": schema}, wander(seed)) for seed in range(SEEDS)])
        for row in rows:
            if row.refusal is None and row.finish == "stop":
                assert is_valid(schema, row.text), (schema, row.text)
            assert row.finish != "error", (schema, row.reason)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (
            {"type": "object", "properties": {"a/b": {"type": "array", "contains": 1}}},
            '#/properties/a~1b: keyword "contains"',
        ),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"pattern": "(?<=x)"}}]}, "#/anyOf/1/items: regex"),
        ({"$defs": {"x": {"not": {"type": "null"}}}, "items": {"$ref": "#/$defs/x"}}, '#/$defs/x: keyword "not"'),
        ({"items": {"type": "integer", "minimum": 5, "maximum": 4}, "minItems": 1, "type": "array"}, "#/items: Unsat"),
    ],
)
def test_refusals_name_the_place(driver: Driver, schema: object, place: str) -> None:
    [row] = driver.run([({"json": schema}, wander(0))])
    assert row.refusal is not None
    assert row.refusal.startswith(f"structured_outputs.json: at {place}"), row.refusal


@pytest.mark.parametrize(
    "names", [{"type": "string"}, {"enum": ["a", "b"]}, {"$ref": "#/$defs/N"}, {"pattern": "^[ab]$"}]
)
def test_maps_as_generators_write_them_are_taken(driver: Driver, names: object) -> None:
    """zod's z.record and pydantic's dict[Literal[…], …] and dict[Enum, …] come with propertyNames."""
    schema = {
        "type": "object",
        "properties": {"m": {"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}}},
        "required": ["m"],
        "additionalProperties": False,
        "$defs": {"N": {"title": "N", "enum": ["a", "b"], "type": "string"}},
    }
    rows = driver.run([({"json": schema}, wander(seed)) for seed in range(8)])
    assert [row.refusal for row in rows] == [None] * 8
    for row in rows:
        if row.finish == "stop":
            assert is_valid(schema, row.text), row.text


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"type": "integer", "minimum": 0, "exclusiveMinimum": True}, {"type": "integer", "exclusiveMinimum": 0}),
        ({"type": "integer", "maximum": 9, "exclusiveMaximum": False}, {"type": "integer", "maximum": 9}),
        ({"anyOf": [{"not": {}}, {"type": "boolean"}]}, {"type": "boolean"}),
        ({"type": "array", "items": {"not": {}}}, {"type": "array", "maxItems": 0}),
        ({"type": "boolean", "not": False}, {"type": "boolean"}),
    ],
)
def test_other_spellings_are_understood(driver: Driver, older: object, newer: object) -> None:
    """OpenAPI 3.0's bounds, zod 3's z.never() and z.undefined()."""
    for row in driver.run([({"json": older}, wander(seed)) for seed in range(12)]):
        assert row.refusal is None
        if row.finish == "stop":
            assert is_valid(newer, row.text), row.text


def test_names_have_one_spelling(driver: Driver) -> None:
    """An escape in a name would be a way round the schema of that name."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    texts = ['{"a":1}', '{"b":"x"}', '{"\\u0061":"x"}', '{"a":1,"\\u0062":"x"}', '{"a":1,"a":"x"}', '{"b":"\\u00e9"}']
    rows = driver.run([({"json": schema}, spell(text)) for text in texts])
    assert [accepted(row, text) for row, text in zip(rows, texts, strict=True)] == [True, True] + 4 * [False]


def test_whitespace(driver: Driver) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
    texts = [
        '{"a":[1,2]}',
        '{ "a": [1, 2] }',
        '{\n  "a": [\n    1\n  ]\n}',
        '{  "a":[1]}',
        '{\n\n"a":[1]}',
        '{"a":[1]}\n\n',
    ]
    cases: list[tuple[dict[str, object], list[bool]]] = [
        ({}, [True, True, True, False, False, False]),
        ({"disable_any_whitespace": True}, [True, False, False, False, False, False]),
        ({"whitespace_pattern": " {2}"}, [True, False, False, True, False, False]),
    ]
    for options, expected in cases:
        rows = driver.run([({"json": schema, **options}, spell(text)) for text in texts])
        assert [accepted(row, text) for row, text in zip(rows, texts, strict=True)] == expected, options


def test_disable_additional_properties(driver: Driver) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}}}
    texts = ['{"a":{"b":1}}', '{"a":{"c":1}}', '{"z":1}']
    for closed, expected in ((False, [True, True, True]), (True, [True, False, False])):
        rows = driver.run([({"json": schema, "disable_additional_properties": closed}, spell(text)) for text in texts])
        assert [accepted(row, text) for row, text in zip(rows, texts, strict=True)] == expected


def test_hostile_schemas_are_refused_or_bounded(driver: Driver) -> None:
    deep: dict[str, object] = {}
    for _ in range(100):
        deep = {"items": deep}
    hostile = [
        deep,
        {"type": "string", "pattern": "(a{1,1000}){1,1000}b"},
        {"type": "string", "maxLength": 10**9},
        {"allOf": [{"anyOf": [{"minLength": i}, {"maxLength": i}]} for i in range(30)]},
        {"type": "object", "properties": {f"p{i}": {"enum": [str(j) for j in range(300)]} for i in range(300)}},
    ]
    rows = driver.run([({"json": schema}, wander(1)) for schema in hostile])
    assert [row.refusal is not None or row.finish in ("stop", "length") for row in rows] == [True] * len(hostile)
    [row] = driver.run([({"json": {"type": "null"}}, spell("null"))])
    assert row.text == "null"
    assert json.loads(row.text) is None
