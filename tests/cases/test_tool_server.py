"""A whole tool loop on the real engine: a call forced by grammar, a real MCP server, an answer after the result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.cases.conftest import FLAGS
from tests.server.mcp_server import ToolServerThread
from tests.server.serving import ServerProcess


@pytest.fixture
def tools() -> Iterator[ToolServerThread]:
    made = ToolServerThread()
    yield made
    made.close()


def test_a_tool_loop(model: Path, tools: ToolServerThread) -> None:
    calc: Any = {"type": "mcp", "server_label": "calc", "require_approval": "never", "allowed_tools": ["add"]}
    asked: Any = {"model": "tiny", "input": "1+2?", "tools": [calc], "tool_choice": "required", "temperature": 0}
    with (
        ServerProcess("--model", str(model), *FLAGS, "--tool-server", f"calc={tools.url}") as server,
        openai.OpenAI(base_url=f"{server.wait_ready()}/v1", api_key="none", max_retries=0) as client,
    ):
        whole = client.responses.create(**asked, max_output_tokens=150, parallel_tool_calls=False)
        events = list(client.responses.create(**asked, max_output_tokens=150, parallel_tool_calls=False, stream=True))
    listed, used, *_ = whole.output
    assert [listed.type, used.type] == ["mcp_list_tools", "mcp_call"]
    assert isinstance(used, openai.types.responses.response_output_item.McpCall)
    arguments = json.loads(used.arguments)
    assert set(arguments) == {"a", "b"}
    assert used.output == str(arguments["a"] + arguments["b"])
    assert tools.calls == [("add", (arguments["a"], arguments["b"]))] * 2
    final: Any = events[-1]
    assert [item.type for item in final.response.output] == [item.type for item in whole.output]
    assert final.response.output_text == whole.output_text
