"""Calls in flight are cut once, however often the server is told to end."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.server.errors import ApiError, UnavailableError
from octavo.server.live_calls import LiveCalls

GONE = UnavailableError("gone")


class Call:
    def __init__(self) -> None:
        self.record: Any = SimpleNamespace(caller=SimpleNamespace(request_id="a"), num_output_tokens=7)
        self.errors: list[ApiError] = []

    def cut(self, error: ApiError) -> None:
        self.errors.append(error)


class Run:
    request_id = "b"
    is_between_turns = True

    def __init__(self) -> None:
        self.errors: list[ApiError] = []

    def cut(self, error: ApiError) -> None:
        self.errors.append(error)


async def test_a_second_cut_finds_nobody(caplog: pytest.LogCaptureFixture) -> None:
    live, call, run = LiveCalls(), Call(), Run()
    live.calls.add(call)
    live.runs.add(run)
    with caplog.at_level(logging.WARNING, "octavo.server"):
        assert [live.cut_all(GONE), live.cut_all(GONE)] == [2, 0]
    assert call.errors == run.errors == [GONE]
    assert [record.getMessage() for record in caplog.records] == [
        "cut: b while a tool worked",
        "cut: a after 7 tokens",
    ]
