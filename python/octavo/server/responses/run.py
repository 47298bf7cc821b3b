"""Runs one response: turns of the model, and calls of server tools between them, until the model has answered.

Not here: what events say (answer.py, mcp_events.py), what server tools are (mcp.py), what is kept (store.py).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from octavo.sampling_params import SamplingParams
from octavo.server.context import ServerContext
from octavo.server.errors import ApiError, UnavailableError, to_api_error
from octavo.server.events import ToolCallDelta, ToolCallStart, TurnEnd, TurnEvent, TurnRequest
from octavo.server.responses.answer import Event, ResponseWriter
from octavo.server.responses.items import Item, to_chat
from octavo.server.responses.mcp import Served, ServerTools, approved_calls
from octavo.server.responses.mcp_events import approval_asked, call_begins, call_ends, tools_listed
from octavo.server.responses.store import Kept
from octavo.server.responses.tools import Toolbox, choose
from octavo.server.responses.truncate import drop_oldest
from octavo.server.schema.responses import ResponsesRequest
from octavo.server.schema.words import all_renamed, renamed
from octavo.server.tenants import caller
from octavo.server.turn import Turn, prompt_token_ids

T = TypeVar("T")
ENDS = ("stop", "length", "tool_calls")
_TOO_MANY = {
    "output": None,
    "error": {"type": "mcp_protocol_error", "code": 0, "message": "max_tool_calls is reached: call no more tools"},
}


@dataclass(slots=True)
class _Call:
    """A call of a server tool that the model makes."""

    served: Served
    pieces: list[str] = field(default_factory=list)
    approval_id: str | None = None

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class _Said:
    """What matters of a turn after it: calls of server tools by number, whether the client must act, how it ended."""

    calls: dict[int, _Call] = field(default_factory=dict)
    waits_for_client: bool = False
    reason: str = ""


class ResponseRun:
    """One response, for the call in progress: `start` once, iterate once, and `close` always.

    Args:
        items: The whole conversation.
        box: The request's own functions; those of servers are added by `start`.
    """

    def __init__(
        self,
        context: ServerContext,
        wanted: ResponsesRequest,
        params: SamplingParams,
        items: Sequence[Item],
        box: Toolbox,
        tools: ServerTools,
        writer: ResponseWriter,
        *,
        size_bytes: int,
    ) -> None:
        self.writer = writer
        self.request_id = caller.current().request_id
        self._context = context
        self._wanted = wanted
        self._params = params
        self._items = items
        self._box = box
        self._tools = tools
        self._size_bytes = size_bytes
        self._approved: list[_Call] = []
        self._turn: Turn | None = None
        self._num_turns = 0
        self._num_calls = 0
        self._deadline_s = time.monotonic() + context.config.tool_loop_timeout_s
        self._usages: list[dict[str, Any]] = []
        self._has_begun = False
        self._between: asyncio.Task[Any] | None = None
        """Work between two turns."""
        self._cut: ApiError | None = None

    async def start(self) -> None:
        """Ask for tools and submit the first turn. Errors as of `Turn.start`, in the words of this API; what it was
        `cut` with."""
        self._context.live.runs.add(self)
        await self._unless_cut(self._begin())

    async def _begin(self) -> None:
        await self._find_tools()
        for item in approved_calls(self._items):
            for name in self._tools.of(item.get("server_label"), item.get("name"))[:1]:
                served = self._tools.find(name)
                assert served is not None
                self._approved.append(_Call(served, [str(item.get("arguments") or "")], item["id"]))
        if not self._approved:
            await self._start_turn(last=False)

    @property
    def is_between_turns(self) -> bool:
        """Whether it waits for a tool, not for the model."""
        return self._turn is None

    def cut(self, error: ApiError) -> None:
        """End it between two turns, from outside: its reader gets `error`, at the latest when the next turn begins."""
        self._cut = error
        self._context.live.runs.discard(self)
        if self._between is not None:
            self._between.cancel()

    async def _unless_cut(self, work: Coroutine[Any, Any, T]) -> T:
        """Do work between two turns; raises what the run is `cut` with."""
        if self._cut is not None:
            work.close()
            raise self._cut
        between = asyncio.create_task(work)
        self._between = between
        try:
            return await between
        except asyncio.CancelledError:
            if self._cut is None:
                raise
            raise self._cut from None
        finally:
            self._between = None

    async def _find_tools(self) -> None:
        await self._tools.list_into(self._box)
        choose(self._box, self._wanted.tool_choice, self._tools.of)

    async def count_input(self) -> int:
        """Instead of `start`: the number of tokens that the first turn would read."""
        await self._find_tools()
        with renamed(self._wanted.words):
            request = self._request(last=False)
            return len(await prompt_token_ids(self._context, request, size_bytes=self._size(request)))

    def _size(self, request: TurnRequest) -> int:
        """About how much text there is to encode: the body's, or more when turns came before it."""
        return max(self._size_bytes, len(repr(request.messages)))

    def _request(self, *, last: bool) -> TurnRequest:
        """The next turn; the last one calls no tools."""
        wanted = self._wanted
        choice = self._box.choice if not self._num_turns else "auto"  # a forced call has been made
        return TurnRequest(
            messages=to_chat(wanted.instructions, [*self._items, *self.writer.response["output"]]),
            params=self._params,
            tools=self._box.functions,
            tool_choice="none" if last else choice,
            parallel_tool_calls=wanted.parallel_tool_calls,
            reasoning_effort=wanted.effort,
            include_reasoning=wanted.include_reasoning,
            template_options=wanted.chat_template_kwargs or {},
            priority=wanted.priority,
            cache_salt=wanted.cache_salt,
        )

    async def _start_turn(self, *, last: bool) -> None:
        """Submit the next turn."""
        request = self._request(last=last)
        self._num_turns += 1
        with renamed(self._wanted.words):
            if self._wanted.truncation == "auto":
                request = await drop_oldest(self._context, request, size_bytes=self._size(request))
            if self._num_turns > 1:
                request = self._within_budget(request)
            size_bytes = self._size(request)
            self._turn = await Turn.start(self._context, request, size_bytes=size_bytes, goes_on=self._has_begun)

    def _within_budget(self, request: TurnRequest) -> TurnRequest:
        """Later turns get what earlier ones left of max_output_tokens."""
        most = self._params.max_tokens
        if most is None:
            return request
        used = sum(usage["completion_tokens"] for usage in self._usages)
        return replace(request, params=replace(self._params, max_tokens=max(1, most - used), min_tokens=0))

    async def events(self) -> AsyncIterator[list[Event]]:
        """Everything after the start; raises what turns raise, and what it was `cut` with."""
        self._has_begun = True
        try:
            async for events in self._turns():
                yield events
        finally:
            self._context.live.runs.discard(self)

    async def _turns(self) -> AsyncIterator[list[Event]]:
        opened = False
        if self._approved:
            yield self._opening()
            opened = True
            async for events in self._run_calls(self._approved):
                yield events
            await self._unless_cut(self._start_turn(last=False))
        while True:
            said = _Said()
            turn = self._turn
            assert turn is not None, "start comes first"
            async for batch in all_renamed(turn.events(), self._wanted.words):
                events = [] if opened else self._opening()
                opened = True
                events += [out for event in batch for out in self._read(event, said)]
                if events:
                    yield events
            self._usages.append(turn.usage())
            turn.close()
            self._turn = None
            if said.reason not in ENDS:
                raise UnavailableError("the response was ended by the server")
            if not said.calls or said.reason == "length":
                break
            asking = [call for call in said.calls.values() if call.served.asks]
            async for events in self._run_calls([call for call in said.calls.values() if not call.served.asks]):
                yield events
            yield [event for call in asking for event in self._ask(call)]
            if asking or said.waits_for_client:
                break
            await self._unless_cut(self._start_turn(last=self._is_last()))
        yield list(self.writer.finish(said.reason, self._usages))

    def _opening(self) -> list[Event]:
        """The first events, with the lists of tools that the conversation does not hold yet."""
        known = [item.get("server_label") for item in self._items if item["type"] == "mcp_list_tools"]
        lists = [(label, tools) for label, tools in self._tools.listed if label not in known]
        return [
            *self.writer.begin(),
            *(event for label, tools in lists for event in tools_listed(self.writer, label, tools)),
        ]

    def _read(self, event: TurnEvent, said: _Said) -> list[Event]:
        """Events of what the model says; calls of server tools are kept until they are complete."""
        if isinstance(event, TurnEnd):
            said.reason = event.finish_reason
        elif isinstance(event, ToolCallStart):
            served = self._tools.find(event.name)
            if served is not None:
                said.calls[event.call] = _Call(served)
                return []
            said.waits_for_client = True
        elif isinstance(event, ToolCallDelta) and event.call in said.calls:
            said.calls[event.call].pieces.append(event.arguments)
            return []
        return list(self.writer.write(event))

    async def _run_calls(self, calls: Sequence[_Call]) -> AsyncIterator[list[Event]]:
        """Make calls one after another."""
        most = self._wanted.max_tool_calls
        for call in calls:
            served = call.served
            yield list(call_begins(self.writer, served.label, served.tool.name, call.arguments, call.approval_id))
            if most is not None and self._num_calls >= most:
                outcome = _TOO_MANY
            else:
                self._num_calls += 1
                outcome = await self._unless_cut(self._tools.call(served, call.arguments))
            yield list(call_ends(self.writer, outcome))

    def _ask(self, call: _Call) -> list[Event]:
        return list(approval_asked(self.writer, call.served.label, call.served.tool.name, call.arguments))

    def _is_last(self) -> bool:
        """Whether the next turn must be the last one."""
        most = self._wanted.max_tool_calls
        return (
            self._num_turns + 1 >= self._context.config.max_tool_turns
            or time.monotonic() >= self._deadline_s
            or (most is not None and self._num_calls >= most)
        )

    async def told(self) -> AsyncIterator[list[Event]]:
        """`events`, where an error after the first one is told by the last one."""
        begun = False
        try:
            async for events in self.events():
                begun = True
                yield events
        except Exception as error:
            if not begun:
                raise
            yield list(self.writer.fail(to_api_error(error), self._usages))

    async def sse(self) -> AsyncIterator[str]:
        """`told` as server-sent events."""
        async for events in self.told():
            yield "".join(sse_event(event) for event in events)

    async def response(self) -> dict[str, Any]:
        """The whole object. An error is raised."""
        async for _ in self.events():
            pass
        return self.writer.response

    def close(self) -> None:
        """Abort what still runs."""
        self._context.live.runs.discard(self)
        if self._turn is not None:
            self._turn.close()
        self._tools.close()


def sse_event(event: Event) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


async def in_background(run: ResponseRun, context: ServerContext, kept: Kept, started: asyncio.Future[None]) -> None:
    """Do the work of a background response: `started` tells whether it was accepted, the log everything else."""
    log = kept.log
    assert log is not None
    try:
        for event in run.writer.queue():
            log.add(sse_event(event))
        try:
            await run.start()
        except Exception as error:
            started.set_exception(error)
            return
        started.set_result(None)
        async for events in _all_told(run):
            for event in events:
                log.add(sse_event(event))
    except asyncio.CancelledError:
        run.writer.cancel()
    finally:
        run.close()
        log.close()
        context.responses.settle(kept)


async def _all_told(run: ResponseRun) -> AsyncIterator[list[Event]]:
    """Events of a run, an error as the last one even when it is the first: nobody else hears of it."""
    try:
        async for events in run.told():
            yield events
    except Exception as error:
        yield list(run.writer.fail(to_api_error(error), []))
