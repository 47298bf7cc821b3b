"""Output items of tool servers and the events that build them: tool lists, calls, requests for approval."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from octavo.server.mcp.session import ServerTool
from octavo.server.responses.answer import Event, ResponseWriter


def tools_listed(writer: ResponseWriter, label: str, tools: Sequence[ServerTool]) -> Iterator[Event]:
    """A server's tools, as it gave them."""
    shown = [
        {
            "name": tool.name,
            "description": tool.description,
            "input_schema": tool.input_schema,
            "annotations": tool.annotations,
        }
        for tool in tools
    ]
    yield from writer.open_item("mcp_list_tools", server_label=label, tools=[], error=None)
    yield writer.in_item("response.mcp_list_tools.in_progress")
    writer.fill(tools=shown)
    yield writer.in_item("response.mcp_list_tools.completed")
    yield from writer.close_item()


def call_begins(
    writer: ResponseWriter, label: str, name: str, arguments: str, approval_id: str | None
) -> Iterator[Event]:
    """A call, before its server was asked."""
    yield from writer.close_item()
    yield from writer.open_item(
        "mcp_call",
        server_label=label,
        name=name,
        arguments="",
        approval_request_id=approval_id,
        output=None,
        error=None,
    )
    yield writer.in_item("response.mcp_call.in_progress")
    if arguments:
        yield writer.in_item("response.mcp_call_arguments.delta", delta=arguments)
    yield writer.in_item("response.mcp_call_arguments.done", arguments=arguments)
    writer.fill(arguments=arguments)


def call_ends(writer: ResponseWriter, outcome: dict[str, Any]) -> Iterator[Event]:
    """The call's `output` or `error`."""
    writer.fill(**outcome)
    status = "completed" if outcome["error"] is None else "failed"
    yield writer.in_item(f"response.mcp_call.{status}")
    yield from writer.close_item(status)


def approval_asked(writer: ResponseWriter, label: str, name: str, arguments: str) -> Iterator[Event]:
    """A call that waits for the user's word in a later request."""
    yield from writer.close_item()
    yield from writer.open_item("mcp_approval_request", server_label=label, name=name, arguments=arguments)
    yield from writer.close_item()
