"""Fields of bodies that nobody reads leave one line each in the log, and no more lines than the bound."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.server.schema import unknown
from octavo.server.schema.chat import parse_chat
from octavo.server.schema.completions import parse_completion
from octavo.server.schema.messages import parse_messages
from octavo.server.schema.pooling import parse_embedding
from octavo.server.schema.responses import parse_responses

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}


@pytest.fixture(autouse=True)
def nothing_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unknown, "_named", set())


def test_each_api_names_a_field_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        parse_completion({"prompt": "x", "temprature": 1}, {})
        parse_chat({**CHAT, "n_best": 2}, {})
        parse_messages({**CHAT, "max_tokens": 5, "top_a": 0.1}, {})
        parse_responses({"input": "x", "verbosty": "low"}, {})
        parse_embedding({"input": "x", "poling": "cls"}, 8)
    named = [str(record.args[0]) for record in caplog.records if isinstance(record.args, tuple) and record.args]
    assert named == [f"the field {name!r}" for name in ("temprature", "n_best", "top_a", "verbosty", "poling")]


def test_fields_that_are_read_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    sampling = {"temperature": 0.5, "top_k": 3, "min_p": 0.1, "seed": 1, "stop": ["a"], "logprobs": None, "suffix": ""}
    parse_completion({"prompt": "x", **sampling, "echo": False, "structured_outputs": {"regex": "a"}}, {})
    parse_chat({**CHAT, **sampling, "tools": [], "response_format": {"type": "text"}, "stream": False}, {})
    parse_messages({**CHAT, "max_tokens": 5, "top_k": 3, "stop_sequences": ["a"]}, {})
    parse_responses({"input": "x", "max_output_tokens": 5, "top_p": 0.5}, {})
    assert not caplog.records


def test_clients_that_invent_names_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    for number in range(3 * unknown.MAX_NAMES):
        parse_completion({"prompt": "x", f"{number}" * 200: 1}, {})
    assert len(caplog.records) == unknown.MAX_NAMES + 1
    assert max(len(record.getMessage()) for record in caplog.records) < 200
    assert len(unknown._named) == unknown.MAX_NAMES
