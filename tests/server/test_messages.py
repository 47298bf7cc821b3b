"""/v1/messages through Anthropic's own client: what it sends arrives, what comes back is what it expects."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import httpx2
import pytest
from asgi_call import AsgiCall
from fake_engine import FakeDelta, FakeLLM, Item, Submitted
from scripted import CALLED, Scripted, call, text, thought
from starlette.applications import Starlette

from octavo.errors import EngineDeadError, OverloadError, RequestError
from octavo.server.anthropic.answer import signature_of
from octavo.server.events import ToolName, TurnEnd

HI: list[Any] = [{"role": "user", "content": "hi"}]
PNG = {"type": "base64", "media_type": "image/png", "data": "aGk="}
WEATHER: Any = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture
def claude(app: Starlette) -> anthropic.AsyncAnthropic:
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    http_client = httpx2.AsyncClient(transport=transport)
    return anthropic.AsyncAnthropic(
        api_key="k", base_url="http://octavo", max_retries=0, http_client=http_client, auth_token=None
    )


async def create(claude: anthropic.AsyncAnthropic, **body: Any) -> anthropic.types.Message:
    message: anthropic.types.Message = await claude.messages.create(
        **{"model": "tiny", "max_tokens": 64, "messages": HI, **body}
    )
    return message


def request_of(scripted: Scripted) -> Any:
    return scripted.turns[-1].request


async def test_an_answer_of_the_engine(claude: anthropic.AsyncAnthropic, llm: FakeLLM) -> None:
    sampled = {"temperature": 0.5, "top_k": 7, "top_p": 0.9}
    message = await create(claude, max_tokens=3, system="be kind", extra_body=sampled)
    assert [block.text for block in message.content] == ["abc"]  # type: ignore[union-attr]
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert (message.role, message.type, message.model) == ("assistant", "message", "tiny")
    assert message.id.startswith("msg_")
    prompt = llm.submitted[0]
    assert message.usage.input_tokens == len(prompt.token_ids) - 16
    assert message.usage.cache_read_input_tokens == 16
    assert message.usage.output_tokens == 3
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(prompt.token_ids, False) == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (prompt.params.temperature, prompt.params.top_k, prompt.params.top_p) == (0.5, 7, 0.9)
    assert llm.streams[0].closed


async def test_models(claude: anthropic.AsyncAnthropic, llm: FakeLLM) -> None:
    """As clients show them to choose from: none of the fields that they count on is missing."""
    listed = [model async for model in claude.models.list()]
    assert [model.id for model in listed] == ["tiny"]
    for model in (*listed, await claude.models.retrieve("tiny")):
        assert (model.type, model.display_name) == ("model", "tiny")
        assert model.created_at.tzinfo is not None
        assert llm.facts is not None
        assert model.max_input_tokens == llm.facts.max_model_len


async def test_stop_sequences(claude: anthropic.AsyncAnthropic, llm: FakeLLM) -> None:
    def script(request: Submitted) -> list[Item]:
        return [[FakeDelta(text="a", token_ids=[1], finish_reason="stop", stop_reason=request.params.stop[0])]]

    llm.script = script
    message = await create(claude, stop_sequences=["END"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")


async def test_more_tokens_than_the_context_has(claude: anthropic.AsyncAnthropic, llm: FakeLLM) -> None:
    message = await create(claude, max_tokens=20000)
    room = 128 - len(llm.submitted[0].token_ids)
    assert llm.submitted[0].params.max_tokens == room
    assert message.stop_reason == "model_context_window_exceeded"
    with pytest.raises(anthropic.BadRequestError, match="too long"):
        await create(claude, messages=[{"role": "user", "content": "x" * 200}])


async def test_prefill_goes_on(claude: anthropic.AsyncAnthropic, llm: FakeLLM) -> None:
    await create(claude, messages=[*HI, {"role": "assistant", "content": "Sure"}])
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(llm.submitted[0].token_ids, False).endswith("assistant\nSure")
    with pytest.raises(anthropic.BadRequestError, match="text to go on from"):
        await create(claude, messages=[*HI, {"role": "assistant", "content": ""}])


async def test_count_tokens_is_what_a_call_submits(claude: anthropic.AsyncAnthropic, llm: FakeLLM) -> None:
    counted = await claude.messages.count_tokens(model="tiny", messages=HI, system="s")
    assert not llm.submitted
    await create(claude, system="s")
    assert counted.input_tokens == len(llm.submitted[0].token_ids)


async def test_blocks_in_one_piece(claude: anthropic.AsyncAnthropic, scripted: Scripted) -> None:
    scripted.say(
        [*thought("I ", "think"), *text("Well", ", ")[:-1], *call(0, "weather", '{"ci', 'ty":"Rome"}'), *CALLED]
    )
    message = await create(
        claude, tools=[WEATHER], thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000
    )
    thinking, said, used = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "I think")  # type: ignore[union-attr]
    assert thinking.signature == signature_of("I think")  # type: ignore[union-attr]
    assert said.text == "Well, "  # type: ignore[union-attr]
    assert (used.type, used.id, used.name) == ("tool_use", "call_0", "weather")  # type: ignore[union-attr]
    assert used.input == {"city": "Rome"}  # type: ignore[union-attr]
    assert message.stop_reason == "tool_use"
    request = request_of(scripted)
    assert (request.reasoning_effort, request.thinking_budget, request.include_reasoning) == ("medium", 1024, True)
    assert request.tools == [
        {
            "type": "function",
            "function": {"name": "weather", "description": "of a city", "parameters": WEATHER["input_schema"]},
        }
    ]


async def test_stream_has_the_exact_order(app: Starlette, scripted: Scripted) -> None:
    scripted.say([*thought("hm"), *text("a", "b")[:-1], *call(0, "f", "{", "}"), *call(1, "g", "{}"), *CALLED])
    body = {"model": "tiny", "max_tokens": 64, "messages": HI, "stream": True, "thinking": {"type": "adaptive"}}
    sent = AsgiCall(app, "/v1/messages", body)
    start = await sent.next()
    assert dict(start["headers"])[b"content-type"] == b"text/event-stream; charset=utf-8"
    blocks = (await sent.rest()).decode().strip().split("\n\n")
    names = [block.split("\n")[0].removeprefix("event: ") for block in blocks]
    delta = "content_block_delta"
    assert names == [
        "message_start",
        *("content_block_start", "ping", delta, delta, "content_block_stop"),  # thinking and its signature
        *("content_block_start", delta, delta, "content_block_stop"),
        *("content_block_start", delta, delta, "content_block_stop"),
        *("content_block_start", delta, "content_block_stop"),
        "message_delta",
        "message_stop",
    ]


async def test_stream_helper_gets_what_one_piece_has(claude: anthropic.AsyncAnthropic, scripted: Scripted) -> None:
    scripted.say([*thought("hm"), *text("é", "\u2028")[:-1], *call(0, "f", '{"a":', "1}"), *CALLED])
    asked: Any = {"model": "tiny", "max_tokens": 64, "messages": HI, "thinking": {"type": "adaptive"}}
    whole = await claude.messages.create(**asked)
    async with claude.messages.stream(**asked) as stream:
        seen = [event.type async for event in stream]
        final = await stream.get_final_message()
    assert final.model_dump(exclude={"id"}) == whole.model_dump(exclude={"id"})
    assert {"thinking", "text", "signature", "input_json"} <= set(seen)
    assert final.usage.output_tokens == 7


async def test_thinking_can_be_left_out(claude: anthropic.AsyncAnthropic, scripted: Scripted) -> None:
    scripted.say([*thought("secret"), *text("a")])
    message = await create(
        claude, thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"}, max_tokens=2000
    )
    assert message.content[0].model_dump(include={"thinking", "signature"}) == {
        "thinking": "",
        "signature": signature_of("secret"),
    }
    for thinking in ({}, {"thinking": {"type": "disabled"}}):
        await create(claude, **thinking)
        assert request_of(scripted).reasoning_effort == "none"
        assert not request_of(scripted).include_reasoning


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "weather"}, ToolName("weather"), True),
        ({"type": "none"}, "none", True),
    ],
)
async def test_tool_choice(
    claude: anthropic.AsyncAnthropic, scripted: Scripted, choice: Any, expected: Any, parallel: bool
) -> None:
    scripted.say(text("a"))
    await create(claude, tools=[WEATHER], tool_choice=choice)
    assert request_of(scripted).tool_choice == expected
    assert request_of(scripted).parallel_tool_calls == parallel


async def test_output_format(claude: anthropic.AsyncAnthropic, scripted: Scripted, llm: FakeLLM) -> None:
    scripted.say(text("{}"))
    config: Any = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    await create(claude, output_config=config)
    assert request_of(scripted).params.structured_outputs.json == {"type": "object"}
    with pytest.raises(anthropic.BadRequestError, match="give one"):
        await create(claude, output_config=config, extra_body={"structured_outputs": {"regex": "a"}})


async def test_a_schema_that_the_engine_refuses(claude: anthropic.AsyncAnthropic, llm: FakeLLM) -> None:
    llm.script = lambda request: [RequestError("structured_outputs uses 'not'", "structured_outputs")]
    config: Any = {"format": {"type": "json_schema", "schema": {"not": {}}}}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format uses"):
        await create(claude, output_config=config)


async def test_effort(claude: anthropic.AsyncAnthropic, scripted: Scripted) -> None:
    scripted.say(text("a"))
    await create(claude, thinking={"type": "adaptive"}, output_config={"effort": "xhigh"})
    assert request_of(scripted).reasoning_effort == "high"


async def test_errors_in_the_clients_classes(claude: anthropic.AsyncAnthropic, llm: FakeLLM) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        await create(claude, model="other")
    assert missing.value.type == "not_found_error"
    assert missing.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="budget_tokens"):
        await create(claude, thinking={"type": "enabled", "budget_tokens": 64})
    llm.script = lambda request: [[FakeDelta(text="a", token_ids=[1])], EngineDeadError("the engine ended")]
    with pytest.raises(anthropic.APIStatusError) as dead:
        await create(claude)
    assert (dead.value.status_code, dead.value.type) == (503, "overloaded_error")
    llm.script = lambda request: [OverloadError("the queue is full", 3)]
    with pytest.raises(anthropic.APIStatusError, match="queue is full") as full:
        await create(claude)
    assert (full.value.status_code, full.value.type) == (529, "overloaded_error")


async def test_an_error_in_the_middle_of_a_stream(claude: anthropic.AsyncAnthropic, scripted: Scripted) -> None:
    scripted.say([*text("a")[:-1], EngineDeadError("the engine ended")], [*text("a")[:-1], TurnEnd(0, "abort")])
    for message in ("the engine ended", "ended by the server"):
        seen: list[str] = []

        async def read(into: list[str]) -> None:
            async with claude.messages.stream(model="tiny", max_tokens=9, messages=HI) as stream:
                async for event in stream.text_stream:
                    into.append(event)

        with pytest.raises(anthropic.APIStatusError, match=message) as failed:
            await read(seen)
        assert failed.value.type == "overloaded_error"
        assert seen == ["a"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": []}, "at least one message"),
        ({"max_tokens": None}, "max_tokens is required"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences must hold non-empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content must be"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "source.type must be"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": PNG}]}]}, "reads text only"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "'video' blocks are not known"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "no tool_use"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
        ({"tools": [WEATHER, WEATHER]}, "must be unique"),
        ({"tools": [{"name": "a"}]}, "input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "not available here"),
        ({"tool_choice": {"type": "any"}}, "needs tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "f"}}, "is no tool"),
        ({"tools": [WEATHER], "tool_choice": {"type": "all"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens is required"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"output_config": {"effort": "zeal"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config.format.type"),
        ({"mcp_servers": [{"type": "url", "url": "http://x"}]}, "never contacted"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"priority": 2**31}, "priority"),
    ],
)
async def test_bad_bodies(client: httpx.AsyncClient, body: Any, message: str) -> None:
    answer = await client.post("/v1/messages", json={"max_tokens": 5, "messages": HI, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert message in answer.json()["error"]["message"]
