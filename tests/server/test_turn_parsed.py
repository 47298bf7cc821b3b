"""Turns whose text is parsed: calls, reasoning, stop strings, budgets; the engine is scripted, text comes in pieces."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fake_engine import FakeDelta, FakeLLM, Item, Submitted, one_after_another, says

from octavo._core import Tokenizer
from octavo.config import ServerConfig
from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams
from octavo.server.context import ServerContext
from octavo.server.events import ContentDelta, ToolCall, ToolName, TurnEvent, TurnMessage, TurnRequest
from octavo.server.tenants.caller import Caller, calling
from octavo.server.tenants.tenant import Tenant
from octavo.server.turn import Turn, collect

HI = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"type": "function", "function": {"name": "now"}},
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    },
]
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture
def context(llm: FakeLLM) -> ServerContext:
    config = ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3")
    return ServerContext(llm, config)  # type: ignore[arg-type]


def wants(**fields: object) -> TurnRequest:
    params = fields.pop("params", SamplingParams(max_tokens=90))
    return TurnRequest(messages=HI, **{"params": params, "tools": TOOLS, **fields})  # type: ignore[arg-type]


async def turn_of(context: ServerContext, request: TurnRequest) -> tuple[Turn, list[TurnMessage]]:
    turn = await Turn.start(context, request, size_bytes=10)
    messages = await collect(turn)
    turn.close()
    return turn, messages


@pytest.mark.parametrize("piece", [1, 2, 7, 1000])
async def test_reasoning_content_and_calls(context: ServerContext, llm: FakeLLM, piece: int) -> None:
    llm.script = says(f"<think>\nhm\n</think>\n\nI look. {ADD}\n{NOW}", piece=piece)
    turn, [message] = await turn_of(context, wants())
    assert (message.reasoning, message.content, message.finish_reason) == ("hm", "I look.", "tool_calls")
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("add", '{"a": 1}'), ("now", "{}")]
    assert len({call.id for call in message.tool_calls}) == 2
    assert (turn.usage()["completion_tokens_details"]["reasoning_tokens"] > 0) is (piece < 10)


async def test_no_tools_no_calls(context: ServerContext, llm: FakeLLM) -> None:
    llm.script = says(NOW)
    _, [message] = await turn_of(context, wants(tool_choice="none"))
    assert (message.content, message.tool_calls, message.finish_reason) == (NOW, [], "stop")
    assert llm.tokenizer is not None
    assert "tools" not in llm.tokenizer.decode(llm.submitted[0].token_ids)


async def test_a_cut_call(context: ServerContext, llm: FakeLLM) -> None:
    llm.script = says('Hi <tool_call>{"name": "add", "arguments": {"a": 1}', finish="length")
    _, [message] = await turn_of(context, wants())
    assert (message.content, message.finish_reason) == ("Hi", "length")
    assert [call.arguments for call in message.tool_calls] == ['{"a": 1']


async def test_at_most_one_call(context: ServerContext, llm: FakeLLM) -> None:
    llm.script = says(f"{ADD}{NOW} and on")
    _, messages = await turn_of(context, wants(parallel_tool_calls=False, params=SamplingParams(n=2)))
    assert len(llm.streams) == 2
    assert all(stream.closed for stream in llm.streams)
    for message in messages:
        assert [call.name for call in message.tool_calls] == ["add"]
        assert (message.content, message.finish_reason) == ("", "tool_calls")


async def test_reasoning_may_be_left_out(context: ServerContext, llm: FakeLLM) -> None:
    llm.script = says("<think>hm</think>yes")
    turn, [message] = await turn_of(context, wants(include_reasoning=False))
    assert (message.reasoning, message.content) == ("", "yes")
    assert turn.usage()["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize("piece", [1, 4, 100])
@pytest.mark.parametrize(("keep", "content"), [(False, "The larger is "), (True, "The larger is 7.5")])
async def test_stop_strings_count_in_content_only(
    context: ServerContext, llm: FakeLLM, piece: int, keep: bool, content: str
) -> None:
    llm.script = says("<think>is 7.25 or 7.5 more, clear</think>The larger is 7.50 END tail", piece=piece)
    params = SamplingParams(stop=("END", "7.5"), include_stop_str_in_output=keep)
    _, [message] = await turn_of(context, wants(params=params))
    assert (message.reasoning, message.content) == ("is 7.25 or 7.5 more, clear", content)
    assert (message.finish_reason, message.stop_reason) == ("stop", "7.5")
    assert llm.streams[0].closed
    assert llm.submitted[0].params.stop == ()


async def test_each_choice_stops_alone(context: ServerContext, llm: FakeLLM) -> None:
    llm.script = one_after_another(says("a END b"), says("c d"))
    _, messages = await turn_of(context, wants(params=SamplingParams(n=2, stop=("END",))))
    assert [message.content for message in messages] == ["a ", "c d"]
    assert [(submitted.params.n, submitted.first_choice) for submitted in llm.submitted] == [(1, 0), (1, 1)]


async def test_a_thinking_budget(context: ServerContext, llm: FakeLLM) -> None:
    llm.script = one_after_another(says("<think>" + "x" * 30, piece=1), says("yes", piece=1))
    request = wants(thinking_budget=10, params=SamplingParams(max_tokens=60, min_tokens=2))
    turn, [message] = await turn_of(context, request)
    assert (message.reasoning, message.content, message.finish_reason) == ("x" * 10, "yes", "stop")
    first, second = llm.submitted
    assert llm.tokenizer is not None
    assert second.token_ids == [*first.token_ids, *[97] * 17, *llm.tokenizer.encode("\n</think>\n\n", False)]
    assert second.params.max_tokens == 60 - 17 - 11
    assert turn.usage()["completion_tokens"] == 17 + 11 + 3
    assert turn.usage()["prompt_tokens"] == len(first.token_ids)
    assert turn.usage()["completion_tokens_details"]["reasoning_tokens"] == 10


def writes(llm: FakeLLM, text: str, num_tokens: int) -> list[Item]:
    """The tokens of a text, so many a delta, each with its log probabilities."""
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(text, False)
    items: list[Item] = []
    shown = 0
    for start in range(0, len(ids), num_tokens):
        part = ids[start : start + num_tokens]
        whole = llm.tokenizer.decode(ids[: start + len(part)]).rstrip("\ufffd")
        finish = "stop" if start + len(part) == len(ids) else None
        rows = [(1, [(token_id, -0.5)]) for token_id in part]
        items.append([FakeDelta(text=whole[shown:], token_ids=part, logprobs=rows, finish_reason=finish)])
        shown = len(whole)
    return items


async def test_what_ends_a_text_does_not_depend_on_how_tokens_come_together(
    context: ServerContext, llm: FakeLLM
) -> None:
    """Drafts bring several at once: a budget is kept to the token, and a stop string leaves none behind it."""
    found = []
    for num_tokens in (1, 2, 5, 100):
        llm.submitted.clear()
        llm.script = one_after_another(
            lambda _, size=num_tokens: writes(llm, "<think>hm é日本 " + "x" * 30, size),
            lambda _, size=num_tokens: writes(llm, "yes é END and more", size),
        )
        params = SamplingParams(max_tokens=100, logprobs=0, stop=("END",))
        turn, [message] = await turn_of(context, wants(thinking_budget=12, params=params))
        assert (message.content, message.finish_reason, message.stop_reason) == ("yes é ", "stop", "END")
        assert message.reasoning.startswith("hm é")
        found.append((message.reasoning, message.rows, turn.usage(), llm.submitted[1].token_ids))
    assert found[1:] == found[:1] * 3


async def test_a_budget_that_is_not_reached(context: ServerContext, llm: FakeLLM) -> None:
    llm.script = says("<think>short</think>yes", piece=1)
    _, [message] = await turn_of(context, wants(thinking_budget=20))
    assert (message.reasoning, message.content, len(llm.submitted)) == ("short", "yes", 1)


async def test_a_budget_of_nothing(context: ServerContext, llm: FakeLLM) -> None:
    llm.script = one_after_another(says("<think>hm", piece=7), says("yes"))
    _, [message] = await turn_of(context, wants(thinking_budget=0))
    assert (message.reasoning, message.content) == ("", "yes")


async def test_budgets_of_several_choices(context: ServerContext, llm: FakeLLM) -> None:
    thinks, answers = says("<think>" + "x" * 9, piece=1), says("yes", piece=1)
    llm.script = lambda request: (answers if 97 in request.token_ids else thinks)(request)
    request = wants(thinking_budget=4, params=SamplingParams(n=3, max_tokens=60), tools=())
    _, messages = await turn_of(context, request)
    assert [(message.reasoning, message.content) for message in messages] == [("xxxx", "yes")] * 3
    assert sorted(submitted.first_choice for submitted in llm.submitted) == [0, 0, 1, 1, 2, 2]


async def test_prompts_count_once(context: ServerContext, llm: FakeLLM) -> None:
    """However often they are submitted: for each choice, and once more after a budget."""

    def script(request: Submitted) -> list[Item]:
        text = "yes" if 97 in request.token_ids else "<think>" + "x" * 9
        items = says(text, piece=1)(request)
        assert isinstance(items[0], list)
        items[0][0].num_cached_tokens = 16
        return items

    llm.script = script
    tenant = Tenant("t")
    with calling(Caller(tenant)):
        turn, _ = await turn_of(context, wants(thinking_budget=4, params=SamplingParams(n=2, max_tokens=60), tools=()))
    assert len(llm.submitted) == 4
    assert turn.generation.num_prompt_tokens == tenant.usage.num_prompt_tokens == turn.usage()["prompt_tokens"]
    assert turn.generation.num_cached_tokens == tenant.usage.num_cached_tokens == 16


async def test_no_room_after_the_budget(context: ServerContext, llm: FakeLLM) -> None:
    llm.script = says("<think>" + "x" * 30, piece=1)
    _, [message] = await turn_of(context, wants(thinking_budget=5, params=SamplingParams(max_tokens=14)))
    assert (message.reasoning, message.content, message.finish_reason) == ("xxxxx", "", "length")


async def test_ids_and_log_probabilities_cover_every_token(context: ServerContext, llm: FakeLLM) -> None:
    llm.script = says(f"<think>hm</think>I {NOW}", piece=5)
    turn = await Turn.start(context, wants(return_token_ids=True), size_bytes=10)
    events: list[TurnEvent] = []
    async for batch in turn.events():
        events += batch
    ids = [i for event in events if isinstance(event, ContentDelta) for i in event.token_ids]
    assert len(ids) == turn.generation.num_output_tokens
    assert "".join(event.text for event in events if isinstance(event, ContentDelta)) == "I"


def with_specials(model_folder: Path, folder: Path, *names: str) -> FakeLLM:
    """An engine whose tokenizer has these special tokens, too."""
    body = json.loads((model_folder / "tokenizer.json").read_text())
    first = max(token["id"] for token in body["added_tokens"]) + 1
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    body["added_tokens"] += [{"id": first + i, "content": name, **plain} for i, name in enumerate(names)]
    (folder / "tokenizer.json").write_text(json.dumps(body))
    config = (model_folder / "tokenizer_config.json").read_text()
    (folder / "tokenizer_config.json").write_text(config)
    return FakeLLM(Tokenizer.from_file(str(folder / "tokenizer.json")), str(folder))


async def test_marks_that_are_special_tokens(model_folder: Path, tmp_path: Path) -> None:
    """The engine shows all special tokens, so that the parsers see their marks; the other ones are taken out here."""
    llm = with_specials(model_folder, tmp_path, "[TOOL_CALLS]", "[THINK]", "[/THINK]", "[ARGS]", "[REST]")
    config = ServerConfig(reasoning_parser="mistral")
    context = ServerContext(llm, config)  # type: ignore[arg-type]
    assert context.dialect.tools is not None
    assert context.dialect.tools.make_id("x", 0).isalnum()  # known by its token, as the template shows none
    rest = 263
    llm.script = lambda request: [
        [FakeDelta(text="[THINK]", token_ids=[260]), FakeDelta(text="hm", token_ids=[1])],
        [FakeDelta(text="[/THINK]", token_ids=[261]), FakeDelta(text="a[REST][REST] b", token_ids=[rest, rest, 2])],
        [FakeDelta(text="[TOOL_CALLS]now", token_ids=[259, 3]), FakeDelta(text="[ARGS]", token_ids=[262])],
        [FakeDelta(text="{}", token_ids=[4], finish_reason="stop")],
    ]
    assert llm.tokenizer is not None
    assert llm.tokenizer.token_to_id("[REST]") == rest
    _, [message] = await turn_of(context, wants())
    assert (message.reasoning, message.content) == ("hm", "a b")
    assert [call.name for call in message.tool_calls] == ["now"]
    assert llm.submitted[0].params.skip_special_tokens is False


async def test_special_tokens_on_request(model_folder: Path, tmp_path: Path) -> None:
    llm = with_specials(model_folder, tmp_path, "[THINK]", "[/THINK]", "[REST]")
    context = ServerContext(llm, ServerConfig(reasoning_parser="mistral"))  # type: ignore[arg-type]
    llm.script = lambda request: [[FakeDelta(text="a[REST]", token_ids=[261], finish_reason="stop")]]
    params = SamplingParams(skip_special_tokens=False)
    _, [message] = await turn_of(context, wants(params=params, tools=()))
    assert message.content == "a[REST]"


async def test_what_templates_are_told_of_tools(model_folder: Path, tmp_path: Path, llm: FakeLLM) -> None:
    source = "{% for tool in tools %}{{ tool | tojson }}{{ tool.function.parameters.properties | length }}{% endfor %}"
    context = ServerContext(llm, ServerConfig(chat_template=source))  # type: ignore[arg-type]
    assert llm.facts is not None
    llm.facts = replace(llm.facts, max_model_len=4096)
    tool = {"type": "function", "function": {"name": "now", "strict": True, "parameters": None}}
    await turn_of(context, wants(tools=[tool]))
    assert llm.tokenizer is not None
    told = {"name": "now", "parameters": {"type": "object", "properties": {}}, "description": ""}
    prompt = llm.tokenizer.decode(llm.submitted[0].token_ids, False)
    assert json.loads(prompt[:-1])["function"] == told


@pytest.mark.parametrize(
    ("effort", "told"), [(None, ""), ("none", "low False"), ("minimal", "low True"), ("high", "high True")]
)
async def test_effort_reaches_the_template(llm: FakeLLM, effort: str | None, told: str) -> None:
    source = "x{% if reasoning_effort %}{{ reasoning_effort }} {{ enable_thinking and thinking }}{% endif %}{# tools #}"
    context = ServerContext(llm, ServerConfig(chat_template=source))  # type: ignore[arg-type]
    await turn_of(context, wants(reasoning_effort=effort))
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(llm.submitted[0].token_ids, False) == f"x{told}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required", "tools": ()}, "tool_choice"),
        ({"tool_choice": ToolName("nope")}, "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "a", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": [{"function": {"name": "a", "parameters": {"type": "string"}}}]}, "tools[0].function.parameters"),
        ({"tools": [{"function": {"name": "a", "parameters": {"type": ["null"]}}}]}, "tools[0].function.parameters"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"thinking_budget": -1}, "thinking_token_budget"),
    ],
)
async def test_refusals(context: ServerContext, llm: FakeLLM, fields: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        await Turn.start(context, wants(**fields), size_bytes=10)
    assert caught.value.param == param
    assert not llm.submitted


async def test_a_server_that_parses_no_calls(llm: FakeLLM) -> None:
    context = ServerContext(llm, ServerConfig(tool_call_parser="none"))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="--tool-call-parser"):
        await Turn.start(context, wants(), size_bytes=10)


async def test_ids_of_calls(context: ServerContext, llm: FakeLLM) -> None:
    context = ServerContext(llm, ServerConfig(tool_call_parser="mistral"))  # type: ignore[arg-type]
    llm.script = says('[TOOL_CALLS][{"name": "now", "arguments": {}}]')
    _, [message] = await turn_of(context, wants())
    [call] = message.tool_calls
    assert call == ToolCall(call.id, "now", "{}")
    assert call.id.isalnum()
    assert len(call.id) == 9
