"""OpenAI's agents library on /v1/responses: its loop of turns and tools, streamed and not, and hosted MCP tools."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from agents import (
    Agent,
    HostedMCPTool,
    ModelSettings,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    Tool,
    function_tool,
)
from mcp_server import ToolServerThread
from openai_client import client_of
from scripted import CALLED, Scripted, call, text, thought
from starlette.applications import Starlette

from octavo.config import ServerConfig

OFFLINE = RunConfig(tracing_disabled=True)
CALC = HostedMCPTool(tool_config={"type": "mcp", "server_label": "calc", "require_approval": "never"})


@pytest.fixture(scope="module")
def server() -> Iterator[ToolServerThread]:
    made = ToolServerThread()
    yield made
    made.close()


@pytest.fixture
def config(server: ToolServerThread) -> ServerConfig:
    server.calls.clear()
    return ServerConfig(tool_server=[f"calc={server.url}"])


def agent(app: Starlette, *tools: Tool) -> Agent[None]:
    model = OpenAIResponsesModel("tiny", client_of(app))
    settings = ModelSettings(max_tokens=90)
    return Agent("brief", instructions="Be brief.", model=model, tools=list(tools), model_settings=settings)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_function_tool(app: Starlette, scripted: Scripted, streamed: bool) -> None:
    asked: list[str] = []

    @function_tool
    def weather(city: str) -> str:
        """Weather of a city."""
        asked.append(city)
        return "sunny"

    scripted.say([*thought("hm"), *call(0, "weather", '{"city":', '"Rome"}'), *CALLED], text("It is ", "sunny."))
    if streamed:
        result = Runner.run_streamed(agent(app, weather), "Rome?", run_config=OFFLINE)
        kinds = [event.type async for event in result.stream_events()]
        assert "run_item_stream_event" in kinds
        final = result.final_output
    else:
        final = (await Runner.run(agent(app, weather), "Rome?", run_config=OFFLINE)).final_output
    assert final == "It is sunny."
    assert asked == ["Rome"]
    messages = scripted.turns[1].request.messages
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]
    assert messages[3]["content"] == "sunny"


async def test_a_hosted_tool(app: Starlette, scripted: Scripted, server: ToolServerThread) -> None:
    scripted.say([*call(0, "add", '{"a": 1, "b": 2}'), *CALLED], text("3"))
    result = await Runner.run(agent(app, CALC), "1+2?", run_config=OFFLINE)
    assert result.final_output == "3"
    assert server.calls == [("add", (1, 2))]
