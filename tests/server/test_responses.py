"""/v1/responses through OpenAI's own client: bodies, answers, streams."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pydantic
import pytest
from asgi_call import AsgiCall
from fake_engine import FakeDelta, FakeLLM, Item, Submitted
from openai_client import client_of
from scripted import CALLED, Scripted, call, text, thought
from starlette.applications import Starlette

from octavo.errors import EngineDeadError, OverloadError, RequestError
from octavo.server.events import ContentDelta, ToolName, TurnEnd
from octavo.server.responses.items import sealed

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture
def openai_client(app: Starlette) -> openai.AsyncOpenAI:
    return client_of(app)


async def create(client: openai.AsyncOpenAI, **body: Any) -> Any:
    return await client.responses.create(**{"model": "tiny", "input": "hi", **body})


async def test_an_answer_of_the_engine(openai_client: openai.AsyncOpenAI, llm: FakeLLM) -> None:
    answer = await create(
        openai_client, instructions="be kind", max_output_tokens=3, temperature=0.5, top_p=0.9, metadata={"a": "b"}
    )
    assert answer.output_text == "abc"
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.object, answer.model, answer.temperature, answer.top_p) == ("response", "tiny", 0.5, 0.9)
    assert (answer.metadata, answer.instructions, answer.store) == ({"a": "b"}, "be kind", False)
    assert answer.output[0].status == "incomplete"
    prompt = llm.submitted[0]
    assert (answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens) == (len(prompt.token_ids), 16)
    assert (answer.usage.output_tokens, answer.usage.total_tokens) == (3, len(prompt.token_ids) + 3)
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(prompt.token_ids, False) == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert llm.streams[0].closed


async def test_output_items_in_order(openai_client: openai.AsyncOpenAI, scripted: Scripted) -> None:
    scripted.say(
        [*thought("I ", "think"), *text("Well", ".")[:-1], *call(0, "weather", '{"city":', '"Rome"}'), *CALLED]
    )
    answer = await create(
        openai_client,
        tools=[WEATHER],
        reasoning={"effort": "xhigh"},
        include=["reasoning.encrypted_content"],
        parallel_tool_calls=False,
    )
    thinking, message, used = answer.output
    assert thinking.content[0].text == "I think"
    assert thinking.encrypted_content == sealed("I think")
    assert message.content[0].text == "Well."
    assert (used.type, used.call_id, used.name) == ("function_call", "call_0", "weather")
    assert json.loads(used.arguments) == {"city": "Rome"}
    assert answer.status == "completed"
    request = scripted.turns[0].request
    assert (request.reasoning_effort, request.parallel_tool_calls) == ("high", False)
    assert request.tools[0]["function"]["parameters"] == WEATHER["parameters"]


async def test_a_round_of_tools(openai_client: openai.AsyncOpenAI, scripted: Scripted) -> None:
    scripted.say([*thought("hm"), *call(0, "weather", '{"city":"Rome"}'), *CALLED], text("sun"))
    history: list[Any] = [{"role": "user", "content": "weather?"}]
    first = await create(openai_client, input=history, tools=[WEATHER], include=["reasoning.encrypted_content"])
    history += [item.model_dump(exclude_none=True) for item in first.output]
    history.append({"type": "function_call_output", "call_id": "call_0", "output": "sunny"})
    second = await create(openai_client, input=history, tools=[WEATHER])
    assert second.output_text == "sun"
    function = {"name": "weather", "arguments": '{"city":"Rome"}'}
    assert scripted.turns[1].request.messages == [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_0", "name": "weather", "content": "sunny"},
    ]


async def test_stream_has_the_full_sequence(app: Starlette, scripted: Scripted) -> None:
    scripted.say([*thought("hm"), *text("a", "b")[:-1], *call(0, "f", "{", "}"), *CALLED])
    sent = AsgiCall(app, "/v1/responses", {"input": "hi", "stream": True})
    await sent.next()
    blocks = [block.split("\n") for block in (await sent.rest()).decode().strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [event["type"].removeprefix("response.") for event in events]
    part = ("output_item.added", "content_part.added")
    done = ("content_part.done", "output_item.done")
    assert names == [
        "created",
        "in_progress",
        *(*part, "reasoning_text.delta", "reasoning_text.done", *done),
        *(*part, "output_text.delta", "output_text.delta", "output_text.done", *done),
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [event["output_index"] for event in events if event["type"].endswith("item.done")] == [0, 1, 2]
    assert events[0]["response"]["output"] == []
    final = events[-1]["response"]
    assert [event["item"] for event in events if event["type"].endswith("item.done")] == final["output"]
    assert final["usage"]["output_tokens"] == 7


async def test_stream_helper_gets_what_one_piece_has(openai_client: openai.AsyncOpenAI, scripted: Scripted) -> None:
    scripted.say([*thought("hm"), *text("é", "\u2028")[:-1], *call(0, "weather", "{", "}"), *CALLED])
    whole = await create(openai_client, tools=[WEATHER])
    async with openai_client.responses.stream(model="tiny", input="hi", tools=[WEATHER]) as stream:  # type: ignore[list-item]
        seen = [event async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == whole.output_text == "é\u2028"
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    assert [event.delta for event in seen if event.type == "response.output_text.delta"] == ["é", "\u2028"]


async def test_parse(openai_client: openai.AsyncOpenAI, scripted: Scripted) -> None:
    class City(pydantic.BaseModel):
        name: str

    scripted.say(text('{"name":', '"Rome"}'))
    answer = await openai_client.responses.parse(model="tiny", input="city?", text_format=City)
    assert answer.output_parsed == City(name="Rome")
    constraint = scripted.turns[0].request.params.structured_outputs
    assert constraint.json["properties"]["name"]["type"] == "string"
    assert answer.text.format.type == "json_schema"  # type: ignore[union-attr]


async def test_include_names_what_there_is(openai_client: openai.AsyncOpenAI, scripted: Scripted) -> None:
    scripted.say(text("c"))
    assert (await create(openai_client, include=["file_search_call.results"])).output_text == "c"
    with pytest.raises(openai.BadRequestError, match=r"include can't name 'reasoning\.all'") as caught:
        await create(openai_client, include=["reasoning.all"])
    assert caught.value.param == "include"


async def test_logprobs(openai_client: openai.AsyncOpenAI, scripted: Scripted) -> None:
    rows = [(2, [(66, -1.5), (65, -0.5)])]
    scripted.say([ContentDelta(0, "c", rows, [66]), TurnEnd(0, "stop")])
    answer = await create(openai_client, include=["message.output_text.logprobs"], top_logprobs=1)
    assert scripted.turns[0].request.params.logprobs == 1
    entry = answer.output[0].content[0].logprobs[0]
    assert (entry.token, entry.logprob, entry.top_logprobs[0].token) == ("c", -1.5, "b")


@pytest.mark.parametrize(
    ("choice", "expected", "names"),
    [
        ("auto", "auto", ["weather", "other"]),
        ("none", "none", ["weather", "other"]),
        ("required", "required", ["weather", "other"]),
        ({"type": "function", "name": "weather"}, ToolName("weather"), ["weather", "other"]),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "other"}]},
            "required",
            ["other"],
        ),
    ],
)
async def test_tool_choice(
    openai_client: openai.AsyncOpenAI, scripted: Scripted, choice: Any, expected: Any, names: list[str]
) -> None:
    scripted.say(text("a"))
    await create(openai_client, tools=[WEATHER, {**WEATHER, "name": "other", "strict": True}], tool_choice=choice)
    request = scripted.turns[0].request
    assert request.tool_choice == expected
    assert [tool["function"]["name"] for tool in request.tools] == names


async def test_truncation_drops_the_oldest_turns(openai_client: openai.AsyncOpenAI, llm: FakeLLM) -> None:
    turns: list[Any] = []
    for letter in "abcdefgh":
        turns += [{"role": "user", "content": letter * 20}, {"role": "assistant", "content": letter}]
    turns.append({"role": "user", "content": "end"})
    with pytest.raises(openai.BadRequestError, match="too long") as long:
        await create(openai_client, input=turns, max_output_tokens=2)
    assert long.value.param == "input"
    await create(openai_client, input=turns, max_output_tokens=2, instructions="stay", truncation="auto")
    assert llm.tokenizer is not None
    submitted = llm.submitted[-1].token_ids
    prompt = llm.tokenizer.decode(submitted, False)
    assert prompt.startswith("<|im_start|>system\nstay")
    assert "h" * 20 in prompt
    assert "a" * 20 not in prompt
    assert len(submitted) + 2 <= 128 < len(submitted) + 2 + 50  # one turn more would not fit


async def test_a_schema_that_the_engine_refuses(openai_client: openai.AsyncOpenAI, llm: FakeLLM) -> None:
    llm.script = lambda request: [RequestError("structured_outputs uses 'not'", "structured_outputs")]
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=r"text\.format uses") as refused:
            await create(openai_client, text=form, stream=stream)
        assert refused.value.param == "text.format"


async def test_errors(openai_client: openai.AsyncOpenAI, llm: FakeLLM) -> None:
    with pytest.raises(openai.NotFoundError):
        await create(openai_client, model="other")
    llm.script = lambda request: [OverloadError("the queue is full", 3)]
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError):
            await create(openai_client, stream=stream)
    llm.script = lambda request: [[FakeDelta(text="a", token_ids=[1])], EngineDeadError("the engine ended")]
    with pytest.raises(openai.InternalServerError):
        await create(openai_client)


async def test_a_stream_that_fails(openai_client: openai.AsyncOpenAI, llm: FakeLLM) -> None:
    for end in (EngineDeadError("the engine ended"), [FakeDelta(finish_reason="abort")]):

        def script(request: Submitted, end: Any = end) -> list[Item]:
            return [[FakeDelta(text="a", token_ids=[1])], end]

        llm.script = script
        events = [event async for event in await create(openai_client, stream=True)]
        assert events[-1].type == "response.failed"
        assert events[-1].response.status == "failed"
        assert events[-1].response.error.code == "server_error"
        assert events[-1].response.output[0].status == "incomplete"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": None}, "input is required"),
        ({"input": ""}, "input must not be empty"),
        ({"input": []}, "input must not be empty"),
        ({"input": [{"type": "computer_call_output"}]}, "'computer_call_output' are not taken"),
        ({"input": [{"id": "msg_1"}]}, "item references"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]}, "text only"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]}, "no call with the id"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f"}]}, "arguments must be a string"),
        ({"input": [{"type": "reasoning", "content": [{"type": "image"}]}]}, "text only"),
        ({"tools": [WEATHER, WEATHER]}, "comes twice"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{**WEATHER, "parameters": []}]}, "JSON schema object"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tool_choice": "all"}, "tool_choice must be"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "g"}}, "no tool"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "not known here"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tools a list"),
        ({"reasoning": {"effort": "zeal"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema is required"),
        ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}, "give one"),
        ({"structured_outputs": {"shape": "x"}}, "no field 'shape'"),
        ({"truncation": "some"}, "truncation"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"n": 2}, "n is not part"),
        ({"max_tokens": 3}, "max_output_tokens in this API"),
        ({"conversation": "conv_1"}, "previous_response_id"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt templates"),
        ({"background": True, "store": False}, "background needs store"),
        ({"background": True}, "--responses-store"),
        ({"store": True}, "--responses-store"),
        ({"previous_response_id": "resp_1"}, "--responses-store"),
        ({"priority": 2**31}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
async def test_bad_bodies(client: httpx.AsyncClient, body: Any, message: str) -> None:
    answer = await client.post("/v1/responses", json={"input": "hi", **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert message in answer.json()["error"]["message"]


async def test_nothing_is_kept_by_default(openai_client: openai.AsyncOpenAI) -> None:
    answer = await create(openai_client)
    with pytest.raises(openai.NotFoundError, match="--responses-store"):
        await openai_client.responses.retrieve(answer.id)
