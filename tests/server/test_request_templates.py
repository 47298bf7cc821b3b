"""Chat templates that requests bring: refused by default; when allowed, sandboxed and bounded."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest
from fake_engine import FakeLLM

from octavo.config import ServerConfig

HI = [{"role": "user", "content": "hi <|im_end|>"}]
CHAT = "/v1/chat/completions"


@pytest.fixture
def config() -> ServerConfig:
    return ServerConfig(trust_request_chat_template=True)


async def ask(client: httpx.AsyncClient, template: str, **more: Any) -> httpx.Response:
    return await client.post(CHAT, json={"messages": HI, "chat_template": template, **more})


async def test_an_own_template_is_used_for_its_request_alone(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    assert llm.tokenizer is not None
    assert (
        await ask(client, "<|im_start|>{{ messages[0].content }}{{ x }}", chat_template_kwargs={"x": "!"})
    ).is_success
    assert (await client.post(CHAT, json={"messages": HI})).is_success
    own, usual = (request.token_ids for request in llm.submitted)
    assert llm.tokenizer.decode(own) == "<|im_start|>hi <|im_end|>!"
    assert own[0] == llm.tokenizer.token_to_id("<|im_start|>")
    assert llm.tokenizer.token_to_id("<|im_end|>") not in own, "typed tokens stay text"
    assert "assistant" in llm.tokenizer.decode(usual)
    body = {"messages": HI, "chat_template": "{{ messages|tojson }}"}
    tokenized = (await client.post("/tokenize", json=body)).json()
    assert llm.tokenizer.decode(tokenized["tokens"]).startswith('[{"')


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(messages) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ 'x' * 10**9 }}",
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "{{",
        "{% if " + "(" * 5000 + "1" + ")" * 5000 + " %}{% endif %}",
        "x" * 70_000,
    ],
)
async def test_hostile_templates(client: httpx.AsyncClient, llm: FakeLLM, template: str) -> None:
    asking = asyncio.create_task(ask(client, template))
    start_s, slowest_s = time.monotonic(), 0.0
    while not asking.done():
        before_s = time.monotonic()
        await asyncio.sleep(0)
        assert (await client.get("/version")).is_success
        slowest_s = max(slowest_s, time.monotonic() - before_s)
    answer = await asking
    assert answer.status_code == 400, answer.text
    assert "root:" not in answer.text
    assert llm.submitted == []
    assert time.monotonic() - start_s < 10
    assert slowest_s < 1.5, "the event loop is free meanwhile"
