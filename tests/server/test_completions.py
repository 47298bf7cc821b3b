"""/v1/completions in one piece: prompts in all forms, echo, logprobs in parallel lists."""

from __future__ import annotations

from typing import Any

import httpx
from fake_engine import FakeDelta, FakeLLM, Item, Submitted

TEXT = "/v1/completions"


async def post(client: httpx.AsyncClient, **body: Any) -> Any:
    answer = await client.post(TEXT, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_answer(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    answer = await post(client, prompt="hey", max_tokens=2)
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": "ab", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"]["prompt_tokens"] == 3
    assert llm.tokenizer is not None
    assert llm.submitted[0].token_ids == llm.tokenizer.encode("hey")


async def test_sixteen_tokens_unless_said_otherwise_but_never_past_the_context(
    client: httpx.AsyncClient, llm: FakeLLM
) -> None:
    await post(client, prompt="x")
    await post(client, prompt=[5] * 120)
    assert [request.params.max_tokens for request in llm.submitted] == [16, 8]


async def test_many_prompts_in_order(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    answer = await post(client, prompt=["A", [34, 35], "C"], n=2, echo=True, max_tokens=2)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["text"][0] for choice in answer["choices"]] == ["A", "A", "C", "C", "C", "C"]
    assert answer["choices"][2]["text"] == "CDab"
    assert answer["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 12,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 48},
    }


def with_rows(request: Submitted) -> list[Item]:
    prompt_rows = [(4, [(i, -2.0), (7, -0.1)]) for i in request.token_ids[1:]]
    rows = [(1, [(64, -0.5), (64, -0.5)]), (1, [(65, -0.25), (66, -1.0)])]
    wanted = prompt_rows if request.params.prompt_logprobs is not None else None
    return [
        [FakeDelta(text="a", token_ids=[64], logprobs=rows[:1], prompt_logprobs=wanted)],
        [FakeDelta(text="b", token_ids=[65], logprobs=rows[1:], finish_reason="length")],
    ]


async def test_logprobs(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    llm.script = with_rows
    logprobs = (await post(client, prompt="hey", logprobs=1))["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.25],
        "top_logprobs": [{"a": -0.5}, {"c": -1.0, "b": -0.25}],
        "text_offset": [0, 1],
    }


async def test_echo_with_logprobs_scores_the_prompt(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    llm.script = with_rows
    choice = (await post(client, prompt="hé", echo=True, logprobs=1))["choices"][0]
    assert choice["text"] == "héab"
    assert "prompt_logprobs" not in choice
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "a", "b"]
    assert logprobs["token_logprobs"] == [None, -2.0, -2.0, -0.5, -0.25]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3]
    assert logprobs["top_logprobs"][0] is None


async def test_scoring_without_new_tokens(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    llm.script = with_rows
    answer = await post(client, prompt="hey", echo=True, logprobs=1, max_tokens=0)
    choice = answer["choices"][0]
    assert choice["text"] == "hey"
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -2.0]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


async def test_token_ids_in_and_out(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    answer = await post(client, prompt=[1, 2, 3], max_tokens=2, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == [97, 98]
    assert answer["choices"][0]["prompt_token_ids"] == [1, 2, 3]


async def test_special_tokens_flag(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    await post(client, prompt="<|im_start|>", max_tokens=1)
    assert llm.submitted[0].token_ids == [257]


async def test_one_bad_prompt_of_many_aborts_the_others(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    answer = await client.post(TEXT, json={"prompt": [[1], [2], [99999]]})
    assert answer.status_code == 400
    assert len(llm.streams) == 2
    assert all(stream.closed for stream in llm.streams)


async def test_a_long_prompt_is_tokenized_in_a_thread(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    assert llm.facts is not None
    object.__setattr__(llm.facts, "max_model_len", 10_000)
    answer = await post(client, prompt="word " * 1500, max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == 7500
