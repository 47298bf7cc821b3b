"""Chat with tools and reasoning over HTTP, in one piece and streamed, through OpenAI's own client where it can."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from asgi_call import events
from fake_engine import FakeLLM, Submitted, says
from openai_client import client_of
from pydantic import BaseModel
from starlette.applications import Starlette

from octavo.config import ServerConfig
from octavo.server.app import make_app

CHAT = "/v1/chat/completions"
HI: Any = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
ARGUMENTS = '{"city": "Oslo \\"é\\" 🦙", "days": 3}'
CALLS = (
    f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
TEXT = f"<think>\nSo.\n</think>\n\nI look.\n{CALLS}"


@pytest.fixture
def config() -> ServerConfig:
    return ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3")


async def post(client: httpx.AsyncClient, **body: Any) -> Any:
    answer = await client.post(CHAT, json={"messages": HI, "tools": TOOLS, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def stream(client: httpx.AsyncClient, **body: Any) -> list[Any]:
    answer = await client.post(CHAT, json={"messages": HI, "tools": TOOLS, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    return events(answer.content)


def prompt_of(llm: FakeLLM, submitted: Submitted) -> str:
    assert llm.tokenizer is not None
    return llm.tokenizer.decode(submitted.token_ids, False)


async def test_an_answer_with_everything(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    llm.script = says(TEXT)
    answer = await post(client)
    [choice] = answer["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == ("I look.", "So.", "So.")
    first, second = message["tool_calls"]
    assert first == {
        "id": first["id"],
        "type": "function",
        "function": {"name": "get_weather", "arguments": ARGUMENTS},
    }
    assert (second["function"]["name"], second["function"]["arguments"]) == ("now", "{}")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


async def test_calls_alone_have_no_content(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    llm.script = says(CALLS)
    message = (await post(client))["choices"][0]["message"]
    assert message["content"] is None
    assert "reasoning" not in message


@pytest.mark.parametrize("piece", [1, 4, 17, 10_000])
async def test_streamed_as_in_one_piece(client: httpx.AsyncClient, llm: FakeLLM, piece: int) -> None:
    llm.script = says(TEXT, piece=piece)
    chunks = await stream(client, stream_options={"include_usage": True})
    assert chunks[-1] == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1] if chunk["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "So."
    assert [delta["reasoning"] == delta["reasoning_content"] for delta in deltas if "reasoning" in delta]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    starts = [call for call in calls if "id" in call]
    assert [(call["index"], call["type"], call["function"]) for call in starts] == [
        (0, "function", {"name": "get_weather", "arguments": ""}),
        (1, "function", {"name": "now", "arguments": ""}),
    ]
    assert all(call.keys() == {"index", "function"} for call in calls if "id" not in call)
    joined = ["".join(call["function"]["arguments"] for call in calls if call["index"] == i) for i in range(2)]
    assert joined == [ARGUMENTS, "{}"]
    ends = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1] if chunk["choices"]]
    assert [end for end in ends if end] == ["tool_calls"]
    assert chunks[-2]["usage"]["completion_tokens_details"]["reasoning_tokens"] >= 0


async def test_several_choices(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    llm.script = says(CALLS, "plain")
    whole = await post(client, n=2)
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["tool_calls", "stop"]
    chunks = await stream(client, n=2)
    names = [
        (chunk["choices"][0]["index"], call["function"]["name"])
        for chunk in chunks[:-1]
        for call in chunk["choices"][0]["delta"].get("tool_calls", [])
        if "id" in call
    ]
    assert names == [(0, "get_weather"), (0, "now")]


@pytest.mark.parametrize("choice", ["none", "auto", "required", {"type": "function", "function": {"name": "now"}}])
async def test_tool_choices_are_taken(client: httpx.AsyncClient, llm: FakeLLM, choice: Any) -> None:
    llm.script = says("plain")
    assert (await post(client, tool_choice=choice))["choices"][0]["finish_reason"] == "stop"
    told = "tools: get_weather,now" in prompt_of(llm, llm.submitted[0])
    assert told is (choice != "none")


async def test_allowed_tools(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]}
    await post(client, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert "tools: now\n" in prompt_of(llm, llm.submitted[0])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [{"x": 1}]}}}, "tool_choice"),
        ({"tools": {"type": "function"}}, "tools"),
        ({"tools": ["x"]}, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "x", "parameters": "y"}}]},
            "tools[0].function.parameters",
        ),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"functions": [{"name": "x"}]}, "functions"),
        ({"function_call": {"name": "x"}}, "function_call"),
    ],
)
async def test_refusals(client: httpx.AsyncClient, llm: FakeLLM, body: dict[str, Any], param: str) -> None:
    answer = await client.post(CHAT, json={"messages": HI, "tools": TOOLS, **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not llm.submitted


async def test_tool_choice_without_tools(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    for choice in ("none", "auto"):
        await post(client, tools=None, tool_choice=choice)
        await post(client, tools=[], tool_choice=choice)


@pytest.mark.parametrize("streamed", [False, True])
async def test_reasoning_can_be_left_out(client: httpx.AsyncClient, llm: FakeLLM, streamed: bool) -> None:
    llm.script = says("<think>So.</think>Yes.")
    body = {"include_reasoning": False}
    text = json.dumps(await (stream(client, **body) if streamed else post(client, **body)))
    assert "reasoning_content" not in text
    assert "So" not in text
    assert "Yes" in text


async def test_a_budget_over_http(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    llm.script = lambda request: (says("done") if 97 in request.token_ids else says("<think>" + "x" * 20, piece=1))(
        request
    )
    message = (await post(client, thinking_token_budget=3, tools=None))["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("xxx", "done")


@pytest.mark.parametrize("content", [None, "", [], "I look", [{"type": "text", "text": "I look"}]])
@pytest.mark.parametrize("result", ["18 degrees", [{"type": "text", "text": "18 degrees"}]])
async def test_a_conversation_goes_on(client: httpx.AsyncClient, llm: FakeLLM, content: Any, result: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        *HI,
        {"role": "assistant", "content": content, "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": result},
    ]
    await post(client, messages=messages, tools=None)
    prompt = prompt_of(llm, llm.submitted[0])
    assert "18 degrees" in prompt
    assert "None" not in prompt


async def test_openai_streams_tools(app: Starlette, llm: FakeLLM) -> None:
    llm.script = says(TEXT)
    client = client_of(app)
    tools: Any = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]  # it takes no others
    async with client.chat.completions.stream(model="tiny", messages=HI, tools=tools) as streamed:
        final = await streamed.get_final_completion()
    message = final.choices[0].message
    assert message.content == "I look."
    assert message.tool_calls is not None
    assert [call.function.arguments for call in message.tool_calls] == [ARGUMENTS, "{}"]


async def test_openai_parses_tools(app: Starlette, llm: FakeLLM) -> None:
    class GetWeather(BaseModel):
        city: str
        days: int

    llm.script = says('<tool_call>{"name": "GetWeather", "arguments": {"city": "Oslo", "days": 2}}</tool_call>')
    tool: Any = openai.pydantic_function_tool(GetWeather)
    parsed = await client_of(app).chat.completions.parse(model="tiny", messages=HI, tools=[tool])
    assert parsed.choices[0].message.tool_calls is not None
    assert parsed.choices[0].message.tool_calls[0].function.parsed_arguments == GetWeather(city="Oslo", days=2)


async def test_models_whose_template_knows_no_tools(llm: FakeLLM) -> None:
    """They are told of the tools in the system message, and their JSON is read."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    app = make_app(llm, ServerConfig(chat_template=template))  # type: ignore[arg-type]
    assert llm.facts is not None
    llm.facts = replace(llm.facts, max_model_len=4096)
    llm.script = says('[{"name": "now", "arguments": {}}]')
    client = client_of(app)
    for messages in (HI, [{"role": "system", "content": "Be kind."}, *HI]):
        answer = await client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
        assert answer.choices[0].finish_reason == "tool_calls"
        prompt = prompt_of(llm, llm.submitted[-1])
        assert prompt.startswith("system: You can call these functions")
        assert prompt.count("system:") == 1
        assert ("Be kind." in prompt) is (len(messages) > 1)
