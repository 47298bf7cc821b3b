"""Messages and Responses over turns whose text is parsed: the engine says tagged text, official clients see blocks."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx2
import pytest
from fake_engine import FakeLLM, one_after_another, says
from mcp_server import ToolServerThread
from openai_client import client_of
from starlette.applications import Starlette

from octavo._core import Tokenizer
from octavo.config import ServerConfig
from octavo.server.app import make_app

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
PARSERS: dict[str, Any] = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def config() -> ServerConfig:
    return ServerConfig(**PARSERS)


@pytest.fixture
def llm(tokenizer: Tokenizer, model_folder: Any) -> FakeLLM:
    return FakeLLM(tokenizer, str(model_folder), max_model_len=4096)


@pytest.fixture
def claude(app: Starlette) -> anthropic.AsyncAnthropic:
    http_client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app))
    return anthropic.AsyncAnthropic(api_key="k", base_url="http://octavo", max_retries=0, http_client=http_client)


@pytest.mark.parametrize("piece", [1, 5, 1000])
async def test_messages(claude: anthropic.AsyncAnthropic, llm: FakeLLM, piece: int) -> None:
    llm.script = says(f"<think>\nhm\n</think>\n\nI add. {ADD}", piece=piece)
    asked: Any = {
        "model": "tiny",
        "max_tokens": 500,
        "messages": HI,
        "tools": [{"name": "add", "input_schema": SCHEMA}],
        "thinking": {"type": "enabled", "budget_tokens": 400},
    }
    message = await claude.messages.create(**asked)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[0].thinking == "hm"  # type: ignore[union-attr]
    assert message.content[2].input == {"a": 1, "b": 2}  # type: ignore[union-attr]
    assert message.stop_reason == "tool_use"
    async with claude.messages.stream(**asked) as stream:
        final = await stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[2].input == message.content[2].input  # type: ignore[union-attr]


async def test_messages_without_thinking(claude: anthropic.AsyncAnthropic, llm: FakeLLM) -> None:
    llm.script = says("<think>hm</think>yes")
    message = await claude.messages.create(model="tiny", max_tokens=50, messages=HI)
    assert [block.type for block in message.content] == ["text"]


async def test_a_stop_sequence_ends_content_only(claude: anthropic.AsyncAnthropic, llm: FakeLLM) -> None:
    llm.script = says("<think>END is near</think>one END two", piece=3)
    message = await claude.messages.create(
        model="tiny", max_tokens=500, messages=HI, stop_sequences=["END"], thinking={"type": "adaptive"}
    )
    assert message.content[1].text == "one "  # type: ignore[union-attr]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")


async def test_a_cut_call(app: Starlette, claude: anthropic.AsyncAnthropic, llm: FakeLLM) -> None:
    llm.script = says('<tool_call>{"name": "add", "arguments": {"a": 1', finish="length")
    asked: Any = {"model": "tiny", "max_tokens": 20, "messages": HI, "tools": [{"name": "add", "input_schema": SCHEMA}]}
    message = await claude.messages.create(**asked)
    assert message.content[0].input == {}  # type: ignore[union-attr]
    assert message.stop_reason in ("max_tokens", "model_context_window_exceeded")
    answer = await client_of(app).responses.create(
        model="tiny",
        input="hi",
        max_output_tokens=20,
        tools=[{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}],
    )
    assert (answer.status, answer.output[0].status) == ("incomplete", "incomplete")  # type: ignore[union-attr]


@pytest.mark.parametrize("piece", [1, 5, 1000])
async def test_responses(app: Starlette, llm: FakeLLM, piece: int) -> None:
    llm.script = says(f"<think>\nhm\n</think>\n\nI add. {ADD}{ADD}", piece=piece)
    tool: Any = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}
    answer = await client_of(app).responses.create(model="tiny", input="hi", tools=[tool], max_output_tokens=900)
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    assert answer.output_text == "I add."
    calls = [item for item in answer.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"a": 1, "b": 2}] * 2
    assert calls[0].call_id != calls[1].call_id
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens >= (piece < 10)


async def test_a_tool_server(llm: FakeLLM) -> None:
    server = ToolServerThread()
    try:
        config = ServerConfig(tool_server=[f"calc={server.url}"], **PARSERS)
        llm.script = one_after_another(says(f"<think>sum</think>{ADD}"), says("<think>ok</think>It is 3."))
        tool: Any = {"type": "mcp", "server_label": "calc", "require_approval": "never"}
        answer = await client_of(make_app(llm, config)).responses.create(  # type: ignore[arg-type]
            model="tiny", input="1+2?", tools=[tool], max_output_tokens=900
        )
    finally:
        server.close()
    kinds = [item.type for item in answer.output]
    assert kinds == ["mcp_list_tools", "reasoning", "mcp_call", "reasoning", "message"]
    assert answer.output_text == "It is 3."
    assert server.calls == [("add", (1, 2))]
    assert llm.tokenizer is not None
    assert "3" in llm.tokenizer.decode(llm.submitted[1].token_ids, False)
