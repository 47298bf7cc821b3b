"""Clients that people build agents with, talking to the app in this process; the engine says what a script tells it.

LangChain, LiteLLM and Instructor on chat: tools, streaming, structured answers. OpenAI's own: test_chat_tools.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_engine import FakeLLM, says
from openai_client import client_of
from pydantic import BaseModel, SecretStr
from starlette.applications import Starlette

from octavo.config import ServerConfig

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
HI: list[Any] = [{"role": "user", "content": "hi"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city", "days"],
            },
        },
    }
]


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    days: int


@pytest.fixture
def config() -> ServerConfig:
    return ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3")


@pytest.fixture
def llm(llm: FakeLLM) -> FakeLLM:
    assert llm.facts is not None
    llm.facts = replace(llm.facts, max_model_len=8192)
    return llm


async def test_langchain(app: Starlette, llm: FakeLLM) -> None:
    """Tools bound to a model, in one piece and streamed, and a structured answer."""
    langchain = pytest.importorskip("langchain_openai")
    calls = client_of(app).chat.completions
    chat = langchain.ChatOpenAI(
        model="tiny", api_key=SecretStr("none"), base_url="http://octavo/v1", async_client=calls
    )
    llm.script = says(f"<think>hm</think>I look. {CALL}")
    bound = chat.bind_tools(TOOLS)
    message = await bound.ainvoke("hi")
    assert message.content == "I look."
    assert [(call["name"], call["args"]) for call in message.tool_calls] == [
        ("get_weather", {"city": "Oslo", "days": 2})
    ]
    whole: Any = None
    async for chunk in bound.astream("hi"):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["args"] == {"city": "Oslo", "days": 2}
    llm.script = says('<tool_call>{"name": "Weather", "arguments": {"city": "Rome", "days": 1}}</tool_call>')
    structured = chat.with_structured_output(Weather, method="function_calling")
    assert await structured.ainvoke("hi") == Weather(city="Rome", days=1)


@pytest.mark.filterwarnings("ignore")  # its own models'
async def test_litellm(app: Starlette, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no look-up on the network
    litellm = pytest.importorskip("litellm")
    client = client_of(app)
    llm.script = says(f"<think>hm</think>I look. {CALL}")
    arguments: dict[str, Any] = {"model": "openai/tiny", "messages": HI, "tools": TOOLS, "client": client}
    answer = await litellm.acompletion(**arguments)
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("I look.", "hm")
    assert message.tool_calls[0].function.arguments == '{"city": "Oslo", "days": 2}'
    chunks = [chunk async for chunk in await litellm.acompletion(**arguments, stream=True)]
    built = litellm.stream_chunk_builder(chunks, messages=HI)
    assert built.choices[0].message.tool_calls[0].function.arguments == '{"city": "Oslo", "days": 2}'
    assert built.choices[0].finish_reason == "tool_calls"


async def test_instructor(app: Starlette, llm: FakeLLM) -> None:
    instructor = pytest.importorskip("instructor")
    llm.script = says('<tool_call>{"name": "Weather", "arguments": {"city": "Oslo", "days": 2}}</tool_call>')
    client = instructor.from_openai(client_of(app), mode=instructor.Mode.TOOLS)
    weather = await client.chat.completions.create(model="tiny", messages=HI, response_model=Weather)
    assert (weather.city, weather.days) == ("Oslo", 2)
