"""Request bodies, posted to every route of the real app: never a 5xx, never an exception, always the route's own error
body; a stream ends as its API says and tells what the whole answer tells."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import httpx
from call_texts import BAD, GOOD
from fake_engine import FakeLLM, says
from hypothesis import strategies as st
from starlette.applications import Starlette
from tiny_tokenizer import write_tokenizer

from octavo._core import Tokenizer
from octavo.config import ServerConfig
from octavo.server.app import make_app
from octavo.server.reasoning.table import REASONING_FORMATS
from octavo.server.tools.table import TOOL_FORMATS
from tests.fuzz.target import Case, Target, edited, spliced

ENDS = {
    "/v1/chat/completions": "data: [DONE]",
    "/v1/completions": "data: [DONE]",
    "/v1/messages": "event: message_stop",
    "/v1/responses": "event: response.",
}


class Faults(logging.Handler):
    """Keeps what handlers did not expect."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(record)


FAULTS = Faults()
logging.getLogger("octavo").addHandler(FAULTS)


@functools.cache
def loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


@functools.cache
def app(parser: str, reasoning: str) -> tuple[Starlette, FakeLLM]:
    """A server whose model writes calls and reasoning in these formats."""
    folder = Path(tempfile.mkdtemp())
    write_tokenizer(folder)
    llm = FakeLLM(Tokenizer.from_file(str(folder / "tokenizer.json")), str(folder), max_model_len=4096)
    config = ServerConfig(
        tool_call_parser=parser,
        reasoning_parser=reasoning,
        responses_store=4,
        batch_dir=tempfile.mkdtemp(),
        trust_request_chat_template=True,
    )
    return make_app(llm, config), llm  # type: ignore[arg-type]


def check(case: Case) -> None:
    """Case: a path, a body, the formats of the model, and what it writes."""
    loop().run_until_complete(_check(case))


async def _check(case: Case) -> None:
    made, llm = app(case["tools"], case["reasoning"])
    llm.script = says(case["answer"], piece=case["piece"])
    FAULTS.found.clear()
    transport = httpx.ASGITransport(app=made, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
        answers = []
        for stream in (False, True):
            body = case["body"]
            if isinstance(body, dict) and case["path"] in ENDS:
                # The whole answer takes no options of a stream.
                dropped = {} if stream else {"stream_options": None}
                body = {**body, "stream": stream, **dropped}
            answers.append(await client.post(case["path"], content=json.dumps(body)))
        for answer in answers:
            assert answer.status_code < 500, answer.text
            if answer.status_code != 200:
                assert answer.json()["error"]["message"]
    assert not FAULTS.found, FAULTS.found[0].exc_info
    whole, stream = answers
    if whole.status_code != stream.status_code:
        assert stream.status_code == 400, whole.text
        assert "stream" in stream.json()["error"]["message"], "what can't be streamed says so"
    if whole.status_code == stream.status_code == 200 and "text/event-stream" in stream.headers["content-type"]:
        assert ENDS[case["path"]] in stream.text.rstrip().rsplit("\n\n", 1)[-1]
        if case["path"] == "/v1/chat/completions":
            assert _streamed(stream.text) == _choices(whole.json())
    llm.submitted.clear()
    llm.streams.clear()


def _streamed(text: str) -> dict[int, Any]:
    """What the chunks of a chat stream say, put together: choice -> (content, reasoning, calls, why it ended)."""
    found: dict[int, list[Any]] = {}
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:]).get("choices", ()):
            parts = found.setdefault(choice["index"], ["", "", [], None])
            delta = choice["delta"]
            parts[0] += delta.get("content") or ""
            parts[1] += delta.get("reasoning") or ""
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(parts[2]):
                    parts[2].append([call["function"]["name"], ""])
                parts[2][call["index"]][1] += call["function"].get("arguments") or ""
            parts[3] = choice.get("finish_reason") or parts[3]
    return {index: tuple(parts) for index, parts in found.items()}


def _choices(body: dict[str, Any]) -> dict[int, Any]:
    found = {}
    for choice in body["choices"]:
        message = choice["message"]
        calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or ()]
        found[choice["index"]] = (
            message["content"] or "",
            message.get("reasoning") or "",
            calls,
            choice["finish_reason"],
        )
    return found


def _cases(seeds: list[Case]) -> st.SearchStrategy[Case]:
    bodies = st.sampled_from(seeds).flatmap(
        lambda seed: edited([seed["body"]]).map(lambda body: {"path": seed["path"], "body": body})
    )
    written = spliced([case.text for case in GOOD + BAD] + ["<think>", "</think>", "plain text", '{"a": 1}'])
    model = st.fixed_dictionaries(
        {
            "tools": st.sampled_from([*TOOL_FORMATS, "none"]),
            "reasoning": st.sampled_from([*REASONING_FORMATS, "none", "none"]),
            "answer": written,
            "piece": st.integers(1, 9),
        }
    )
    return st.tuples(bodies, model).map(lambda drawn: {**drawn[0], **drawn[1]})


TARGET = Target("bodies", check, _cases)
