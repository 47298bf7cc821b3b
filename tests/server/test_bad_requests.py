"""A client's mistake is a clear 4xx in OpenAI's shape, names the field, and never reaches the engine."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fake_engine import FakeLLM

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]

# (path, body, status, param)
TABLE: list[tuple[str, dict[str, Any], int, str | None]] = [
    (CHAT, {}, 400, "messages"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": "hi"}, 400, "messages"),
    (CHAT, {"messages": [{"role": "x", "content": "y"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, 400, "messages[0].content"),
    (CHAT, {"messages": HI, "model": "nope"}, 404, "model"),
    (CHAT, {"messages": HI, "model": 5}, 400, "model"),
    (CHAT, {"messages": HI, "max_tokens": 0}, 400, "max_tokens"),
    (CHAT, {"messages": HI, "max_tokens": -1}, 400, "max_tokens"),
    (CHAT, {"messages": HI, "max_tokens": 10**15}, 400, "max_tokens"),
    (CHAT, {"messages": HI, "max_tokens": "5"}, 400, "max_tokens"),
    (CHAT, {"messages": HI, "max_tokens": 5, "max_completion_tokens": 6}, 400, "max_tokens"),
    (CHAT, {"messages": HI, "max_completion_tokens": 0}, 400, "max_completion_tokens"),
    (CHAT, {"messages": HI, "n": 0}, 400, "n"),
    (CHAT, {"messages": HI, "n": 10**6}, 400, "n"),
    (CHAT, {"messages": HI, "n": 10**18}, 400, "n"),
    (CHAT, {"messages": HI, "n": True}, 400, "n"),
    (CHAT, {"messages": HI, "n": 1.5}, 400, "n"),
    (CHAT, {"messages": HI, "n": "2"}, 400, "n"),
    (CHAT, {"messages": HI, "temperature": -0.1}, 400, "temperature"),
    (CHAT, {"messages": HI, "temperature": "NaN"}, 400, "temperature"),
    (CHAT, {"messages": HI, "temperature": 10**400}, 400, "temperature"),
    (CHAT, {"messages": HI, "top_k": -2}, 400, "top_k"),
    (CHAT, {"messages": HI, "top_k": 2.5}, 400, "top_k"),
    (CHAT, {"messages": HI, "top_p": 0}, 400, "top_p"),
    (CHAT, {"messages": HI, "top_p": 1.01}, 400, "top_p"),
    (CHAT, {"messages": HI, "min_p": 1.5}, 400, "min_p"),
    (CHAT, {"messages": HI, "stop": ["s"] * 100_000}, 400, "stop"),
    (CHAT, {"messages": HI, "stop": ["y" * 1_000_00]}, 400, "stop"),
    (CHAT, {"messages": HI, "stop": [""]}, 400, "stop"),
    (CHAT, {"messages": HI, "stop": 5}, 400, "stop"),
    (CHAT, {"messages": HI, "seed": 2**70}, 400, "seed"),
    (CHAT, {"messages": HI, "min_tokens": 50, "max_tokens": 10}, 400, "min_tokens"),
    (CHAT, {"messages": HI, "logit_bias": {"191222": 1}}, 400, "logit_bias"),
    (CHAT, {"messages": HI, "logit_bias": {"-3": 1}}, 400, "logit_bias"),
    (CHAT, {"messages": HI, "logit_bias": {"abc": 1}}, 400, "logit_bias"),
    (CHAT, {"messages": HI, "logit_bias": {"33": 1e9}}, 400, "logit_bias"),
    (CHAT, {"messages": HI, "logit_bias": {str(i): 1 for i in range(5000)}}, 400, "logit_bias"),
    (CHAT, {"messages": HI, "allowed_token_ids": [49152]}, 400, "allowed_token_ids"),
    (CHAT, {"messages": HI, "allowed_token_ids": []}, 400, "allowed_token_ids"),
    (CHAT, {"messages": HI, "bad_words": ["w"] * 1000}, 400, "bad_words"),
    (CHAT, {"messages": HI, "bad_words": ["w" * 1000]}, 400, "bad_words"),
    (CHAT, {"messages": HI, "allowed_token_ids": [5] * 100_000}, 400, "allowed_token_ids"),
    (CHAT, {"messages": HI, "top_logprobs": 2}, 400, "top_logprobs"),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": -1}, 400, "top_logprobs"),
    (CHAT, {"messages": HI, "logprobs": 5}, 400, "logprobs"),
    (CHAT, {"messages": HI, "prompt_logprobs": -1}, 400, "prompt_logprobs"),
    (CHAT, {"messages": HI, "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
    (CHAT, {"messages": HI, "stream_options": {"include_usage": True}}, 400, "stream_options"),
    (
        CHAT,
        {"messages": HI, "stream": True, "stream_options": {"include_usage": 1}},
        400,
        "stream_options.include_usage",
    ),
    (CHAT, {"messages": HI, "stream": "yes"}, 400, "stream"),
    (CHAT, {"messages": HI, "priority": 2**40}, 400, "priority"),
    (CHAT, {"messages": HI, "cache_salt": ""}, 400, "cache_salt"),
    (CHAT, {"messages": HI, "cache_salt": 5}, 400, "cache_salt"),
    (CHAT, {"messages": HI, "cache_salt": ["a"]}, 400, "cache_salt"),
    (CHAT, {"messages": HI, "chat_template": "{{ 1 }}"}, 400, "chat_template"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"chat_template": "A"}}, 400, "chat_template_kwargs"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"tokenize": True}}, 400, "chat_template_kwargs"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"add_special_tokens": True}}, 400, "chat_template_kwargs"),
    (CHAT, {"messages": HI, "chat_template_kwargs": [1]}, 400, "chat_template_kwargs"),
    (
        CHAT,
        {"messages": HI, "continue_final_message": True, "add_generation_prompt": True},
        400,
        "continue_final_message",
    ),
    (CHAT, {"messages": HI, "response_format": {"type": "yaml"}}, 400, "response_format"),
    (CHAT, {"messages": HI, "response_format": {"type": "json_schema"}}, 400, "response_format"),
    (CHAT, {"messages": HI, "guided_json": {"type": "object"}}, 400, "guided_json"),
    (CHAT, {"messages": HI, "grammar": 'root ::= "a"'}, 400, "grammar"),
    (TEXT, {"prompt": "x", "n_predict": 5}, 400, "n_predict"),
    (TEXT, {"prompt": "x", "repeat_penalty": 1.1}, 400, "repeat_penalty"),
    (CHAT, {"messages": HI, "dry_multiplier": 0.8}, 400, "dry_multiplier"),
    (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, 400, "tools[0].function"),
    (CHAT, {"messages": HI, "tool_choice": "required"}, 400, "tool_choice"),
    (CHAT, {"messages": HI, "structured_outputs": {"choice": []}}, 400, "structured_outputs"),
    (CHAT, {"messages": HI, "n": 0, "stream": True}, 400, "n"),
    (CHAT, {"messages": [{"role": "user", "content": "x " * 400}]}, 400, "messages"),
    (TEXT, {}, 400, "prompt"),
    (TEXT, {"prompt": None}, 400, "prompt"),
    (TEXT, {"prompt": ""}, 400, "prompt"),
    (TEXT, {"prompt": []}, 400, "prompt"),
    (TEXT, {"prompt": [""]}, 400, "prompt"),
    (TEXT, {"prompt": [[]]}, 400, "prompt"),
    (TEXT, {"prompt": {"a": 1}}, 400, "prompt"),
    (TEXT, {"prompt": [1.5]}, 400, "prompt"),
    (TEXT, {"prompt": [True]}, 400, "prompt"),
    (TEXT, {"prompt": [-1]}, 400, "prompt"),
    (TEXT, {"prompt": [49152]}, 400, "prompt"),
    (TEXT, {"prompt": [2**63 - 1]}, 400, "prompt"),
    (TEXT, {"prompt": [[33], [-5]]}, 400, "prompt"),
    (TEXT, {"prompt": [33] * 20_000}, 400, "prompt"),
    (TEXT, {"prompt": [33] * 20_000, "stream": True}, 400, "prompt"),
    (TEXT, {"prompt": "word " * 20_000}, 400, "prompt"),
    (TEXT, {"prompt": ["x"] * 20_000, "n": 100}, 400, "prompt"),
    (TEXT, {"prompt": "x", "best_of": 10**7}, 400, "best_of"),
    (TEXT, {"prompt": "x", "suffix": "y"}, 400, "suffix"),
    (TEXT, {"prompt": "x", "logprobs": 21}, 400, "logprobs"),
    (TEXT, {"prompt": "x", "logprobs": True}, 400, "logprobs"),
    (TEXT, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    (TEXT, {"prompt": "x", "prompt_logprobs": 10**9}, 400, "prompt_logprobs"),
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"messages": []}, 400, "messages"),
    ("/tokenize", {"prompt": "x", "messages": HI}, 400, "prompt"),
    ("/tokenize", {"messages": HI, "chat_template": "{{ cycler }}"}, 400, "chat_template"),
    ("/detokenize", {}, 400, "tokens"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
    ("/detokenize", {"tokens": [49152]}, 400, "tokens"),
    ("/detokenize", {"tokens": "abc"}, 400, "tokens"),
]


def error_of(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(error["message"]) < 2000
    return error


@pytest.mark.parametrize(("path", "body", "status", "param"), TABLE, ids=lambda value: str(value)[:60])
async def test_table(
    client: httpx.AsyncClient, llm: FakeLLM, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert error_of(answer)["param"] == param
    assert all(stream.closed for stream in llm.streams)
    canary = await client.post(TEXT, json={"prompt": "x", "max_tokens": 2})
    assert canary.json()["choices"][0]["text"] == "ab"


async def test_sliders_in_their_rest_position_are_taken(client: httpx.AsyncClient) -> None:
    """Clients with a slider for every sampler there is send all of them."""
    rest = {
        "typical_p": 1,
        "tfs_z": 1.0,
        "repeat_penalty": 1,
        "mirostat": 0,
        "dry_multiplier": 0.0,
        "xtc_probability": 0,
    }
    answer = await client.post(TEXT, json={"prompt": "x", "max_tokens": 2, **rest})
    assert answer.status_code == 200


RAW: list[tuple[bytes, str]] = [
    (b"", "JSON"),
    (b"{", "JSON"),
    (b"[]", "object"),
    (b'"x"', "object"),
    (b"null", "object"),
    (b'{"prompt": "a\\ud800b"}', "surrogate"),
    (b'{"prompt": "\xc3\x28"}', "UTF-8"),
    (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "JSON"),
    (b'{"messages": ' + b"[" * 200_000, "nested"),
    (b'{"messages": ' + b'{"a":' * 200_000, "nested"),
    (b'{"prompt": "x", "temperature": NaN}', "temperature"),
    (b'{"prompt": "x", "temperature": Infinity}', "temperature"),
    (b'{"prompt": "x", "temperature": 1e400}', "temperature"),
    (b"\xef\xbb\xbf\xef\xbb\xbf{}", "JSON"),
    (b"\xff\xfe{\x00}\x00", "UTF-8"),
    (b'{"prompt": "x"} trailing', "JSON"),
]


async def test_a_file_of_windows_as_body(client: httpx.AsyncClient) -> None:
    """`curl -d @body.json`: its editors begin files with U+FEFF."""
    body = b'\xef\xbb\xbf{"prompt": "x", "max_tokens": 2}'
    answer = await client.post(TEXT, content=body, headers={"content-type": "application/json"})
    assert answer.json()["choices"][0]["text"] == "ab"


@pytest.mark.parametrize(("body", "word"), RAW, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_raw_bodies(client: httpx.AsyncClient, path: str, body: bytes, word: str) -> None:
    answer = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    message = error_of(answer)["message"]
    assert word in message or path == CHAT


async def test_deeply_nested_but_legal_content(client: httpx.AsyncClient) -> None:
    content: Any = "x"
    for _ in range(300):
        content = [content]
    answer = await client.post(CHAT, json={"messages": [{"role": "user", "content": content}]})
    assert answer.status_code == 400


async def test_duplicate_keys_and_unknown_fields_are_harmless(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    body = b'{"prompt": "a", "prompt": "b", "max_tokens": 1, "user": "me", "store": true, "nothing_known": [NaN]}'
    answer = await client.post(TEXT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200
    assert llm.submitted[0].token_ids == llm.tokenizer.encode("b")  # type: ignore[union-attr]


async def test_null_means_not_given(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    body = {"messages": HI, "temperature": None, "stop": None, "stream_options": None, "tools": None, "n": None}
    assert (await client.post(CHAT, json=body)).status_code == 200
    assert llm.submitted[0].params.temperature == 1.0


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
async def test_other_content_types(client: httpx.AsyncClient, kind: str) -> None:
    answer = await client.post(TEXT, content=json.dumps({"prompt": "x"}), headers={"content-type": kind})
    assert answer.status_code == 415
    assert "application/json" in error_of(answer)["message"]


async def test_compressed_bodies_are_not_read(client: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    assert (await client.post(TEXT, content=b"\x1f\x8b", headers=headers)).status_code == 415


@pytest.mark.parametrize("declared", [True, False])
async def test_too_large_bodies(client: httpx.AsyncClient, declared: bool) -> None:
    body = b'{"prompt": "' + b"x" * (2 << 20) + b'"}'

    async def pieces() -> Any:
        for at in range(0, len(body), 1 << 16):
            yield body[at : at + (1 << 16)]

    answer = await client.post(
        TEXT, content=body if declared else pieces(), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 413
    assert error_of(answer)["code"] == "body_too_large"


async def test_routes_and_methods(client: httpx.AsyncClient) -> None:
    missing = await client.get("/v1/nothing")
    assert missing.status_code == 404
    assert error_of(missing)["code"] == "unknown_url"
    wrong = await client.get(CHAT)
    assert wrong.status_code == 405
    assert error_of(wrong)["code"] == "method_not_allowed"
    assert wrong.headers["allow"] == "POST"


@pytest.mark.parametrize(("depth", "status"), [(256, 200), (257, 400), (900, 400), (100_000, 400)])
async def test_nesting_is_limited(client: httpx.AsyncClient, depth: int, status: int) -> None:
    inner = depth - 1
    body = b'{"prompt": "x", "max_tokens": 1, "unknown": ' + b'{"a":' * inner + b"1" + b"}" * inner + b"}"
    answer = await client.post(TEXT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
