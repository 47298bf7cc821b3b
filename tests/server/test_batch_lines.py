"""Lines of batch files: whatever they hold, each is a request or an error that names its line."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.server.batch.lines import (
    MAX_ERRORS,
    LineError,
    Request,
    UsageSum,
    answer_line,
    parse_lines,
    unanswered_line,
)

URL = "/v1/completions"
LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["POST", URL, "a"])
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner))
OBJECTS = st.fixed_dictionaries(
    {},
    optional={
        "custom_id": VALUES,
        "method": st.just("POST") | VALUES,
        "url": st.just(URL) | VALUES,
        "body": st.dictionaries(st.sampled_from(["stream", "prompt", "background"]), VALUES) | VALUES,
    },
)
LINES = st.lists(OBJECTS.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=30), max_size=8)


@settings(max_examples=150, deadline=None)
@given(lines=LINES)
def test_every_line_is_a_request_or_an_error(lines: list[bytes]) -> None:
    found = list(parse_lines(lines, URL, max_requests=100, max_line_bytes=1000))
    filled = [i for i, line in enumerate(lines, 1) if line.strip()]
    if not filled:
        assert [each.code for each in found if isinstance(each, LineError)] == ["empty_file"]
        return
    numbers = [each.number if isinstance(each, Request) else each.line for each in found]
    assert numbers == filled
    for each in found:
        if isinstance(each, Request):
            assert json.loads(each.body) == json.loads(lines[each.number - 1])["body"]


def test_errors_are_bounded() -> None:
    found = list(parse_lines([b"{"] * 1000, URL, max_requests=10_000, max_line_bytes=1000))
    assert len(found) == MAX_ERRORS


def test_answers() -> None:
    request = Request(3, "a", "{}")
    broken = json.loads(answer_line("batch_1", request, 502, b"<html>", "r"))
    assert broken["response"] == {"status_code": 502, "request_id": "r", "body": "<html>"}
    assert broken["id"] == json.loads(unanswered_line("batch_1", 3, "a", "expired"))["id"] == "batch_req_1_3"
    usage = UsageSum()
    for counts in (
        {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
        {"input_tokens": 1, "output_tokens": 3, "output_tokens_details": {"reasoning_tokens": 2}},
    ):
        usage.add(answer_line("batch_1", request, 200, json.dumps({"usage": counts}).encode(), "r"))
    usage.add(answer_line("batch_1", request, 200, b"no JSON", "r"))
    assert usage.shown() == {
        "input_tokens": 6,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 11,
    }
