"""Requests that must be refused: at once, in OpenAI's shape, with the field's name, and without a trace elsewhere.

The table's ids are those of the collected faults (ST streaming, TK tokens, SA sampling, PC prefix cache, SE security).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import httpx
import pytest

from tests.cases.calls import BYSTANDER, CANARY, CHAT, TEXT, choice_of, post, stream, watched

HI: list[Any] = [{"role": "user", "content": "hi"}]
LIMIT_S = 5.0
"""Most that a refusal may take on a busy machine; an idle one needs milliseconds."""

Row = tuple[str, str, dict[str, Any] | bytes, int, str | None]
"""Case, path, body, status, field."""


def image(url: str) -> list[Any]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def text(case: str, param: str | None, *bodies: dict[str, Any]) -> Iterator[Row]:
    """Rows of /v1/completions with status 400."""
    return ((case, TEXT, {"prompt": "x", "max_tokens": 4, **body}, 400, param) for body in bodies)


def chat(case: str, param: str | None, *bodies: dict[str, Any]) -> Iterator[Row]:
    """The same of /v1/chat/completions."""
    return ((case, CHAT, {"messages": HI, "max_tokens": 4, **body}, 400, param) for body in bodies)


def broken(case: str, path: str, *bodies: bytes) -> Iterator[Row]:
    """Bodies that are no JSON objects."""
    return ((case, path, body, 400, None) for body in bodies)


TABLE: list[Row] = [
    *chat("ST-06", "stream_options", {"stream_options": {"include_usage": True}}, {"stream_options": 5}),
    *chat("ST-08", "n", {"n": 0, "stream": True}),
    *chat("ST-08", "messages", {"messages": [{"role": "user", "content": "x" * 3000}], "stream": True}),
    *text("ST-08", "prompt", {"prompt": [33] * 20_000, "stream": True}),
    *text("ST-08", "temperature", {"temperature": -1, "stream": True}),
    ("ST-08", CHAT, {"model": "no-such-model", "messages": HI, "stream": True}, 404, "model"),
    *text("TK-04", "prompt", *({"prompt": p} for p in ([-1], [259], [2**63 - 1], [2**70], [[33], [-5]], [1.5]))),
    *chat("TK-04", "logit_bias", *({"logit_bias": b} for b in ({"191222": 1}, {"-3": 1}, {"abc": 1}, {"33": 1e9}))),
    *chat("TK-04", "allowed_token_ids", *({"allowed_token_ids": ids} for ids in ([259], [], [-1], [5] * 10**5))),
    *chat("TK-04", "stop_token_ids", {"stop_token_ids": [259]}),
    ("TK-04", "/detokenize", {"tokens": [-1]}, 400, "tokens"),
    ("TK-04", "/detokenize", {"tokens": [259]}, 400, "tokens"),
    *text("TK-05", "prompt", {"prompt": "word " * 10**6}),
    *chat("TK-05", "messages", {"messages": [{"role": "user", "content": "word " * 10**6}]}),
    *chat("TK-05", "chat_template_kwargs", {"chat_template_kwargs": {"tokenize": True}}),
    *text("TK-08", "prompt", {"prompt": ""}, {"prompt": []}, {"prompt": [""]}, {"prompt": [[]]}),
    *text("TK-08", "prompt", {"prompt": None}, {"prompt": {}}, {"prompt": ["a", ""]}),
    *chat("TK-08", "messages", {"messages": []}, {"messages": None}),
    ("TK-08", "/tokenize", {"messages": []}, 400, "messages"),
    *broken("TK-08", TEXT, b'{"prompt":"a\\ud800b"}', b'{"prompt":"a\xc3\x28b"}', b"", b"null", b"[]", b"{"),
    *broken("TK-08", CHAT, b'{"messages":' + b"[" * 10**6),
    *text("SA-02", "temperature", {"temperature": -0.1}, {"temperature": "NaN"}, {"temperature": 10**400}),
    ("SA-02", TEXT, b'{"prompt":"x","temperature":1e400}', 400, "temperature"),
    ("SA-02", TEXT, b'{"prompt":"x","temperature":NaN}', 400, "temperature"),
    *text("SA-03", "top_k", {"top_k": -2}, {"top_k": 2.5}),
    *text("SA-03", "top_p", {"top_p": 0}, {"top_p": 1.01}),
    *text("SA-03", "min_p", {"min_p": 1.5}),
    *text("SA-09", "min_tokens", {"min_tokens": 50, "max_tokens": 10}),
    *text("PC-05", "cache_salt", {"cache_salt": 5}, {"cache_salt": ""}, {"cache_salt": ["a"]}),
    *chat("SE-01", "n", *({"n": n} for n in (10**7, 10**18, 0, -1, 1.5, "2", True))),
    *text("SE-01", "best_of", {"best_of": 10**7}),
    *text("SE-01", "prompt", {"prompt": ["x"] * 200_000, "n": 100}),
    *text("SE-01", "max_tokens", {"max_tokens": 10**15}, {"max_tokens": 0}, {"max_tokens": -1}),
    *chat("SE-05", "chat_template", {"chat_template": "{% for i in range(10**9) %}x{% endfor %}"}),
    *chat("SE-05", "chat_template_kwargs", {"chat_template_kwargs": {"messages": []}}),
    ("SE-05", "/tokenize", {"messages": HI, "chat_template": "{{ cycler.__init__ }}"}, 400, "chat_template"),
    *text("SE-07", "prompt_embeds", {"prompt_embeds": "gASVBQAAAAAAAAA="}),
    *chat("SE-08", "messages[0].content[0].type", {"messages": image("http://127.0.0.1:9/a.png")}),
    *chat("SE-08", "messages[0].content[0].type", {"messages": image("file:///etc/passwd")}),
    ("SE-09", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/etc"}, 404, None),
    *text("SE-10", "prompt_logprobs", *({"prompt_logprobs": k} for k in (-1, 49152, 10**9, -2))),
    *chat("SE-10", "top_logprobs", *({"logprobs": True, "top_logprobs": k} for k in (21, 49152, -1))),
    *text("SE-10", "stop", {"stop": ["s"] * 10**5}, {"stop": ["y" * 10**6]}),
    *text("SE-10", "logit_bias", {"logit_bias": {str(i): 1 for i in range(49152)}}),
    *text("SE-10", "bad_words", {"bad_words": ["w"] * 10**5}, {"bad_words": ["w" * 10**6]}),
]
CASES = {case: list(rows) for case, rows in groupby(TABLE, key=lambda row: row[0])}


@pytest.mark.parametrize("case", CASES)
async def test_refused(case: str, client: httpx.AsyncClient) -> None:
    alone = await stream(client, TEXT, **BYSTANDER)
    canary = (await choice_of(client, TEXT, **CANARY))["text"]
    async with watched(client, alone, canary):
        for _, path, body, status, param in CASES[case]:
            start_s = time.monotonic()
            got, answer = await post(client, path, body)
            assert time.monotonic() - start_s < LIMIT_S
            shown = str(body)[:100]
            assert got == status, (shown, answer)
            error = answer["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"], shown
            assert error["param"] == param, (shown, error)


def test_each_case_is_one_test() -> None:
    assert sum(len(rows) for rows in CASES.values()) == len(TABLE)
