"""Structured outputs: any constraint is refused, or what it lets through is of its form; nothing stops the engine."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import jsonschema
from hypothesis import strategies as st

from octavo.errors import RequestError
from octavo.structured_outputs import StructuredOutputs
from tests.fuzz.target import Case, Target, edited
from tests.grammar.corpus import CORPUS
from tests.grammar.driver import Driver, spell, wander

_DRIVER: list[Driver] = []


def _driver() -> Driver:
    if not _DRIVER:
        _DRIVER.append(Driver(Path(tempfile.mkdtemp()), max_tokens=120))
    return _DRIVER[0]


def check(case: Case) -> None:
    """Case: fields of `StructuredOutputs`, the seed of what is chosen, and text that is tried against it."""
    fields = case["outputs"]
    if not isinstance(fields, dict):
        return
    try:
        StructuredOutputs.from_mapping(fields)
    except RequestError:
        return
    fields = {name: value for name, value in fields.items() if value is not None}
    fine: dict[str, Any] = {"regex": "[0-9]{2}"}
    chooses = [(fields, wander(case["seed"] + i)) for i in range(2)]
    *rows, spelled, other = _driver().run([*chooses, (fields, spell(case["text"])), (fine, wander(1))])
    assert len(other.text) == 2, "a constraint beside it was harmed"
    for row in rows:
        assert row.refusal or row.finish in ("stop", "length"), row.reason
        if row.finish == "stop":
            _judge(fields, row.content)
    if spelled.finish == "stop":
        _judge(fields, spelled.content)


def _judge(fields: dict[str, Any], content: bytes) -> None:
    """Whether a text that was let through has its form, where another library can tell."""
    if fields.get("start_after") is not None:
        return
    text = content.decode()
    if "choice" in fields:
        assert text in fields["choice"]
    elif fields.get("json_object"):
        assert isinstance(json.loads(text), dict)
    elif "json" in fields:
        value = json.loads(text)
        schema = json.loads(fields["json"]) if isinstance(fields["json"], str) else fields["json"]
        try:
            jsonschema.Draft202012Validator.check_schema(schema)
        except jsonschema.SchemaError:
            return
        jsonschema.Draft202012Validator(schema).validate(value)


def _cases(seeds: list[Case]) -> st.SearchStrategy[Case]:
    schemas = [{"json": schema} for entries in CORPUS.values() for schema, _ in entries if isinstance(schema, dict)]
    outputs = edited(schemas, max_edits=3) | edited([seed["outputs"] for seed in seeds], max_edits=3)
    texts = st.sampled_from(["", "1", "null", "[]", "{}", '{"a": 1}', '"a"', "yes", "aa"]) | st.text(max_size=6)
    return st.fixed_dictionaries({"outputs": outputs, "seed": st.integers(0, 99), "text": texts})


TARGET = Target("constraints", check, _cases)
