"""A full queue refuses before a call's text is touched: 429 with Retry-After, in every API's words, and counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fake_engine import FakeLLM, Item, Submitted
from starlette.applications import Starlette

from octavo.config import EngineConfig, SchedulerConfig
from octavo.errors import DeadlineError, OverloadError
from octavo.server.context import ServerContext
from octavo.server.overload import Overload
from octavo.server.tenants.caller import Caller
from octavo.server.tenants.tenant import Tenant

HI = [{"role": "user", "content": "hi"}]
CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "x"},
    "/v1/messages": {"messages": HI, "max_tokens": 3},
    "/v1/responses": {"input": "x"},
}


@pytest.fixture
def context(app: Starlette, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> ServerContext:
    """A queue of four; text work is an error."""
    llm.config = EngineConfig(scheduler=SchedulerConfig(max_queued_requests=4))
    found: ServerContext = app.state.context
    return found


def forbid_text(context: ServerContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*args: Any, **options: Any) -> None:
        raise AssertionError("text was touched")

    monkeypatch.setattr(context, "run_text", touched)


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("stream", [False, True])
async def test_more_than_can_run_and_wait(
    client: httpx.AsyncClient,
    context: ServerContext,
    llm: FakeLLM,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    stream: bool,
) -> None:
    forbid_text(context, monkeypatch)
    llm.num_requests = 8 + 4
    answer = await client.post(path, json={**CALLS[path], "stream": stream})
    assert answer.status_code == (529 if path == "/v1/messages" else 429)
    assert int(answer.headers["retry-after"]) >= 1
    assert "--max-queued-requests 4" in answer.json()["error"]["message"]
    assert llm.submitted == []
    text = (await client.get("/metrics")).text
    assert 'octavo:requests_refused_total{model_name="tiny"} 7.0' in text, "six of the engine's, and this one"
    assert 'octavo:max_requests_waiting{model_name="tiny"} 4.0' in text


async def test_one_less_is_taken(client: httpx.AsyncClient, context: ServerContext, llm: FakeLLM) -> None:
    llm.num_requests = 8 + 3
    assert (await client.post("/v1/completions", json=CALLS["/v1/completions"])).status_code == 200


async def test_counting_is_no_waiting(client: httpx.AsyncClient, context: ServerContext, llm: FakeLLM) -> None:
    """Routes that don't use the engine answer all the same."""
    llm.num_requests = 1000
    assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 200
    assert (await client.post("/v1/messages/count_tokens", json={"messages": HI})).status_code == 200


async def test_a_refusal_speaks_for_the_next_calls(
    client: httpx.AsyncClient, context: ServerContext, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(request: Submitted) -> list[Item]:
        return [OverloadError("too many requests wait", 3.0)]

    llm.script = full
    body = {"prompt": "x" * 20}
    assert (await client.post("/v1/completions", json=body)).status_code == 429
    forbid_text(context, monkeypatch)
    again = await client.post("/v1/completions", json=body)
    assert (again.status_code, again.headers["retry-after"]) == (429, "3")
    assert len(llm.submitted) == 1


class Clock:
    def __init__(self) -> None:
        self.now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


def refuses(overload: Overload, caller: Caller, size_bytes: int) -> bool:
    try:
        overload.check(caller, size_bytes)
    except OverloadError:
        return True
    return False


@pytest.fixture
def caller() -> Caller:
    return Caller(Tenant("a"))


CHANGES: dict[str, Callable[[FakeLLM, Clock, Caller], Caller]] = {
    "nothing": lambda llm, clock, caller: caller,
    "time": lambda llm, clock, caller: (setattr(clock, "now_s", 5.3), caller)[1],
    "the queue": lambda llm, clock, caller: (setattr(llm.stats, "num_waiting", 2), caller)[1],
    "the tenant": lambda llm, clock, caller: Caller(Tenant("b")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_how_long_and_for_whom_it_speaks(llm: FakeLLM, caller: Caller, change: str) -> None:
    clock = Clock()
    overload = Overload(llm, clock)  # type: ignore[arg-type]
    assert not refuses(overload, caller, 100)
    overload.note(caller, OverloadError("full", 1.0))
    other = CHANGES[change](llm, clock, caller)
    assert refuses(overload, other, 100) is (change == "nothing")
    assert not refuses(overload, other, 99), "a smaller one may fit"


def test_a_deadline_is_no_full_queue(llm: FakeLLM, caller: Caller) -> None:
    overload = Overload(llm)  # type: ignore[arg-type]
    overload.note(caller, DeadlineError("late", 1.0))
    assert not refuses(overload, caller, 100)
