"""TK-03 and SA-05: one begin token on every way to the model; penalties know where the prompt ends."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo import LLM, SamplingParams
from tests.cases.calls import CHAT, TEXT, choice_of, post
from tests.cases.conftest import FLAGS
from tests.cases.tiny_chat_model import TURN_START, write_model
from tests.server.serving import ServerProcess

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def eager(tmp_path: Path) -> Path:
    """A model whose tokenizer puts the begin token before every text, as its template does."""
    folder = write_model(tmp_path)
    body = json.loads((folder / "tokenizer.json").read_text())
    begin = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    body["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [TURN_START], "tokens": ["<|im_start|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(body))
    return folder


async def test_tk03_one_begin_token(eager: Path) -> None:
    params = SamplingParams(max_tokens=1)
    with LLM(str(eager), dtype="float32", cpu_threads=1, num_gpu_blocks_override=80) as llm:
        chat = llm.chat(HI, params)[0].prompt_token_ids
        plain = llm.generate(["Hi"], params)[0].prompt_token_ids
    assert chat[0] == TURN_START != chat[1]
    assert plain[0] == TURN_START != plain[1]
    with ServerProcess("--model", str(eager), *FLAGS, "--num-gpu-blocks-override", "80") as server:
        async with httpx.AsyncClient(base_url=server.wait_ready(), timeout=60) as client:
            for body, ids in (
                ({"messages": HI}, chat),
                ({"messages": HI, "add_special_tokens": True}, chat),
                ({"prompt": "Hi"}, plain),
                ({"prompt": "<|im_start|>Hi"}, plain),
                ({"prompt": "Hi", "add_special_tokens": False}, plain[1:]),
            ):
                assert (await post(client, "/tokenize", body))[1]["tokens"] == ids, body
            _, chatted = await post(client, CHAT, {"messages": HI, "max_tokens": 1})
            _, messaged = await post(client, "/v1/messages", {"model": "tiny", "messages": HI, "max_tokens": 1})
            _, responded = await post(client, "/v1/responses", {"input": "Hi", "max_output_tokens": 1})
            text = await choice_of(client, TEXT, prompt="Hi", max_tokens=1)
    assert chatted["usage"]["prompt_tokens"] == responded["usage"]["input_tokens"] == len(chat)
    counted = messaged["usage"]
    assert counted["input_tokens"] + counted["cache_read_input_tokens"] == len(chat)
    assert text["usage"]["prompt_tokens"] == len(plain)


PRESENCE, FREQUENCY = 1.0, 0.5
ALLOWED = list(range(30, 46))
PROMPT = ALLOWED[:5] * 12
"""Ids that penalties would push down, if they counted the prompt's."""


async def _step_by_step(client: httpx.AsyncClient, num_tokens: int) -> list[int]:
    """The rule, with one call a token: a bias that falls with what the output holds so far."""
    out: list[int] = []
    while len(out) < num_tokens:
        bias = {str(token): -PRESENCE - FREQUENCY * count for token, count in Counter(out).items()}
        body = {"prompt": PROMPT + out, "max_tokens": 1, "logit_bias": bias}
        out += (await choice_of(client, TEXT, **_greedy(body)))["token_ids"]
    return out


def _greedy(body: dict[str, Any]) -> dict[str, Any]:
    fixed = {"temperature": 0, "allowed_token_ids": ALLOWED, "ignore_eos": True, "return_token_ids": True}
    return {**fixed, **body}


async def test_sa05_penalties_count_the_output_alone(client: httpx.AsyncClient, cramped: httpx.AsyncClient) -> None:
    """In one step and in chunks of 24 tokens, with the prompt cached, and beside calls without penalties."""
    wanted = await _step_by_step(client, 30)
    plain = _greedy({"prompt": PROMPT, "max_tokens": 30})
    penalized = {**plain, "presence_penalty": PRESENCE, "frequency_penalty": FREQUENCY}
    for server in (client, cramped):
        for salt in ("a", "a", "b"):
            answers = await asyncio.gather(
                *(choice_of(server, TEXT, **body, cache_salt=salt) for body in (penalized, plain, penalized))
            )
            assert answers[0]["token_ids"] == answers[2]["token_ids"] == wanted
    assert answers[1]["token_ids"] != wanted
