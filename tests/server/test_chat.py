"""/v1/chat/completions in one piece: fields in, fields out."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import httpx
from fake_engine import FakeDelta, FakeLLM, Item, Submitted

from octavo.config import ServerConfig
from octavo.errors import EngineDeadError, OverloadError
from octavo.server.app import make_app

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


async def post(client: httpx.AsyncClient, **body: Any) -> Any:
    answer = await client.post(CHAT, json={"messages": HI, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_answer(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    answer = await post(client, max_tokens=3, model="tiny")
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "tiny"
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "abc", "refusal": None}
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    num_prompt = len(llm.submitted[0].token_ids)
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 3,
        "total_tokens": num_prompt + 3,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    assert "token_ids" not in choice
    assert llm.streams[0].closed


async def test_prompt_is_the_rendered_template(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    await post(client)
    assert llm.tokenizer is not None
    text = llm.tokenizer.decode(llm.submitted[0].token_ids, False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_every_sampling_field_arrives(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    fields = {
        "n": 2,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "seed": 5,
        "stop": ["x"],
        "stop_token_ids": [3],
        "bad_words": ["b"],
        "ignore_eos": True,
        "max_tokens": 4,
        "min_tokens": 1,
        "prompt_logprobs": 1,
        "allowed_token_ids": [1, 2],
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    await post(client, **fields, logit_bias={"5": 1}, logprobs=True, top_logprobs=2, priority=-3, cache_salt="s")
    got = llm.submitted[0]
    for name, value in fields.items():
        assert getattr(got.params, name) == value, name
    assert got.params.logit_bias == {5: 1.0}
    assert got.params.logprobs == 2
    assert (got.terms.priority, got.terms.cache_salt) == (-3, "s")


async def test_defaults(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    assert llm.facts is not None
    llm.facts.default_sampling_params.update({"temperature": 0.6, "top_k": 20})
    await post(client, top_k=3)
    params = llm.submitted[0].params
    assert params.max_tokens is None
    assert params.temperature == 0.6
    assert params.top_k == 3
    llm.facts.default_sampling_params.clear()


async def test_either_name_of_the_limit(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    await post(client, max_completion_tokens=2)
    await post(client, max_completion_tokens=2, max_tokens=2)
    assert [request.params.max_tokens for request in llm.submitted] == [2, 2]


async def test_n_choices(client: httpx.AsyncClient) -> None:
    answer = await post(client, n=3, max_tokens=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"ab"}
    assert answer["usage"]["completion_tokens"] == 6


def scored(request: Submitted) -> list[Item]:
    """Two tokens with logprobs: half a character, and a token whose rival is impossible."""
    rows = [(2, [(128, -1.5), (65, -0.5)]), (1, [(66, -0.25), (66, -0.25), (67, -math.inf)])]
    return [
        [FakeDelta(token_ids=[128], logprobs=rows[:1])],
        [FakeDelta(text="c", token_ids=[66], logprobs=rows[1:], finish_reason="stop", stop_reason=66)],
    ]


async def test_logprobs(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    llm.script = scored
    assert llm.tokenizer is not None
    choice = (await post(client, logprobs=True, top_logprobs=2))["choices"][0]
    assert choice["stop_reason"] == 66
    first, second = choice["logprobs"]["content"]
    raw = llm.tokenizer.token_bytes(128)
    assert first == {
        "token": raw.decode("utf-8", "replace"),
        "logprob": -1.5,
        "bytes": list(raw),
        "top_logprobs": [{"token": "b", "logprob": -0.5, "bytes": [98]}],
    }
    assert [top["logprob"] for top in second["top_logprobs"]] == [-0.25, -9999.0]


async def test_prompt_logprobs_and_ids(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    def script(request: Submitted) -> list[Item]:
        rows = [(3, [(i, -1.0), (5, -0.5)]) for i in request.token_ids[1:]]
        return [[FakeDelta(text="a", token_ids=[9], prompt_logprobs=rows, finish_reason="stop")]]

    llm.script = script
    answer = await post(client, prompt_logprobs=1, return_token_ids=True)
    prompt = llm.submitted[0].token_ids
    assert answer["prompt_token_ids"] == prompt
    assert answer["choices"][0]["token_ids"] == [9]
    assert len(answer["prompt_logprobs"]) == len(prompt)
    assert answer["prompt_logprobs"][0] is None
    entry = answer["prompt_logprobs"][1]
    assert entry[str(prompt[1])]["rank"] == 3
    assert entry["5"] == {"logprob": -0.5, "rank": 1, "decoded_token": "&"}


async def test_echo_goes_on_with_the_last_message(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    messages = [*HI, {"role": "assistant", "content": "Sure"}]
    answer = await post(client, messages=messages, continue_final_message=True, echo=True, max_tokens=2)
    assert answer["choices"][0]["message"]["content"] == "Sureab"
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(llm.submitted[0].token_ids, False).endswith("assistant\nSure")


async def test_overload_is_429_with_retry_after(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    llm.script = lambda request: [OverloadError("the queue is full", 3.2)]
    for stream in (False, True):
        answer = await client.post(CHAT, json={"messages": HI, "stream": stream})
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "3"
        assert answer.json()["error"]["message"] == "the queue is full"


async def test_a_dead_engine_is_503(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    llm.script = lambda request: [[FakeDelta(text="a", token_ids=[1])], EngineDeadError("the engine ended")]
    answer = await client.post(CHAT, json={"messages": HI})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_dead"


async def test_a_failed_sequence_is_an_error(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    llm.script = lambda request: [[FakeDelta(finish_reason="error")]]
    answer = await client.post(CHAT, json={"messages": HI})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "internal_error"


async def test_a_slow_template_is_rendered_beside_other_calls(llm: FakeLLM, config: ServerConfig) -> None:
    context = make_app(llm, config).state.context  # type: ignore[arg-type]
    threads = [await context.run_text(threading.get_ident, size_bytes=10) for _ in range(2)]
    assert threads[0] != threads[1] == threading.get_ident()

    def slow() -> int:
        end_s = time.thread_time() + 0.03
        while time.thread_time() < end_s:
            pass
        return threading.get_ident()

    assert await context.run_text(slow, size_bytes=10) == threading.get_ident()  # it was quick so far
    assert await context.run_text(slow, size_bytes=10) != threading.get_ident()
    assert await context.run_text(threading.get_ident, size_bytes=10) != threading.get_ident()
    assert await context.run_text(threading.get_ident, size_bytes=10) == threading.get_ident()
    assert await context.run_text(threading.get_ident, size_bytes=10**6) != threading.get_ident()
