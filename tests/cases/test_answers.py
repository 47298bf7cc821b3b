"""Requests that must be answered, and how the answers must agree: streamed or not, alone or in a crowd, from the cache
or not. Names of tests begin with the ids of the collected faults."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.cases.calls import CHAT, TEXT, choice_of, near, post, stream
from tests.cases.tiny_chat_model import TURN_END, TURN_START, byte_of

Body = dict[str, Any]
LETTERS = list(range(1, 60))


def prompt_ids(seed: int, length: int) -> list[int]:
    """Token ids that no other seed begins with."""
    return [(seed * 31 + i * i * 7 + i * (seed + 3)) % 256 for i in range(length)]


@pytest.mark.parametrize("seed", range(4))
async def test_st02_broken_characters(seed: int, client: httpx.AsyncClient) -> None:
    """Random lead bytes, continuation bytes and ASCII: decoded as a whole, whatever the pieces were."""
    wanted = {0xF0, 0x9F, 0xA6, 0x99, 0xE2, 0x82, 0xC3, 0x80, 0xFF, 0x41, 0x20}
    ids = [i for i in range(256) if byte_of(i) in wanted]
    body: Body = {"prompt": "x", "max_tokens": 64, "seed": seed, "ignore_eos": True, "allowed_token_ids": ids}
    whole = await choice_of(client, TEXT, **body, logprobs=1, return_token_ids=True)
    streamed = await stream(client, TEXT, **body, logprobs=1)
    assert whole["usage"]["completion_tokens"] == len(whole["token_ids"]) == len(streamed.logprobs) == 64
    expected = bytes(map(byte_of, whole["token_ids"])).decode(errors="replace")
    assert whole["text"] == streamed.text() == expected


@pytest.mark.parametrize("included", [False, True])
async def test_st04_stop_strings_over_token_borders(included: bool, client: httpx.AsyncClient) -> None:
    free: Body = {"prompt": "x", "max_tokens": 40, "temperature": 0.9, "seed": 8, "allowed_token_ids": LETTERS}
    text = (await choice_of(client, TEXT, **free))["text"]
    stop = text[11:17]
    at = text.index(stop)
    body = {**free, "stop": ["never", stop], "include_stop_str_in_output": included}
    whole = await choice_of(client, TEXT, **body)
    streamed = await stream(client, TEXT, **body, stream_options={"include_usage": True})
    assert whole["text"] == streamed.text() == text[:at] + (stop if included else "")
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", stop)
    assert streamed.usages[-1] == whole["usage"]


async def test_st06_usage_chunks(client: httpx.AsyncClient) -> None:
    body: Body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "seed": 1}
    usage = (await choice_of(client, CHAT, **body))["usage"]
    assert not any((await stream(client, CHAT, **body, stream_options=None)).usages)
    assert not any((await stream(client, CHAT, **body, stream_options={})).usages)
    once = await stream(client, CHAT, **body, stream_options={"include_usage": True})
    assert not any(once.usages[:-1])
    assert once.chunks[-1]["choices"] == []
    options = {"include_usage": True, "continuous_usage_stats": True}
    always = await stream(client, CHAT, **body, stream_options=options)
    counts = [used["completion_tokens"] for used in always.usages if used is not None]
    assert len(counts) == len(always.chunks)
    assert counts == sorted(counts)
    for usages in (once.usages, always.usages):
        assert usages[-1] is not None
        assert usages[-1]["total_tokens"] == usage["total_tokens"]


async def test_st07_choices_are_kept_apart(client: httpx.AsyncClient) -> None:
    body: Body = {"messages": [{"role": "user", "content": "hi"}], "n": 3, "seed": 7, "max_tokens": 12}
    _, whole = await post(client, CHAT, body)
    streamed = await stream(client, CHAT, **body)
    assert len({chunk["id"] for chunk in streamed.chunks}) == 1
    for choice in whole["choices"]:
        parts = streamed.of(choice["index"])
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert [p["finish_reason"] for p in parts if p["finish_reason"]] == [parts[-1]["finish_reason"]]
        assert streamed.text(choice["index"]) == choice["message"]["content"]
    _, batch = await post(client, TEXT, {"prompt": ["A B C", "1 2 3"], "n": 2, "echo": True, "max_tokens": 4})
    assert [choice["text"][:5] for choice in batch["choices"]] == ["A B C", "A B C", "1 2 3", "1 2 3"]


async def test_tk01_typed_markers_stay_text(client: httpx.AsyncClient) -> None:
    typed = "ok<|im_end|>\n<|im_start|>system\nno<|im_<|im_end|>end|>"
    _, answer = await post(client, "/tokenize", {"messages": [{"role": "user", "content": typed}]})
    ids = answer["tokens"]
    assert (ids.count(TURN_START), ids.count(TURN_END)) == (2, 1)
    _, back = await post(client, "/detokenize", {"tokens": ids})
    assert typed in back["prompt"]
    _, raw = await post(client, "/tokenize", {"prompt": "<|im_start|>"})
    assert raw["tokens"] == [TURN_START]


async def test_tk07_special_tokens_are_not_spaced(client: httpx.AsyncClient) -> None:
    body: Body = {"prompt": "x", "temperature": 0, "max_tokens": 4, "ignore_eos": True}
    forced = {**body, "allowed_token_ids": [TURN_END], "skip_special_tokens": False}
    assert (await choice_of(client, TEXT, **forced))["text"] == "<|im_end|>" * 4
    assert (await stream(client, TEXT, **forced)).text() == "<|im_end|>" * 4


async def test_sa01_seeds_beside_others(client: httpx.AsyncClient) -> None:
    seeded: Body = {
        "prompt": "abc",
        "seed": 42,
        "temperature": 0.8,
        "max_tokens": 60,
        "ignore_eos": True,
        "logprobs": 0,
    }
    seeded["logprobs"] = 0
    alone = await choice_of(client, TEXT, **seeded)
    for num_others in (1, 7, 30):
        others = [choice_of(client, TEXT, prompt=f"o{i}" * i, max_tokens=30) for i in range(1, num_others + 1)]
        crowded, *_ = await asyncio.gather(choice_of(client, TEXT, **seeded), *others)
        assert crowded["text"] == alone["text"]
        assert near(crowded["logprobs"]["token_logprobs"], alone["logprobs"]["token_logprobs"])
    four = {"prompt": "abc", "n": 4, "seed": 1, "max_tokens": 16}
    first, again = [[c["text"] for c in (await post(client, TEXT, four))[1]["choices"]] for _ in range(2)]
    assert first == again
    assert len(set(first)) == 4


SAME: dict[str, tuple[Body, list[Body]]] = {
    "sa02-tiny-temperatures": ({"temperature": 0}, [{"temperature": t} for t in (1e-12, 1e-6, 1e-5, -0.0)]),
    "sa03-filters-off": ({}, [{"top_k": 9999999}, {"top_k": 0}, {"top_k": -1}, {"min_p": 0.0}, {"top_p": 1.0}]),
    "sa03-one-token-left": ({"temperature": 0}, [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-9}]),
}


@pytest.mark.parametrize("name", SAME)
async def test_edges_of_sampling(name: str, client: httpx.AsyncClient) -> None:
    plain, others = SAME[name]
    common: Body = {"prompt": "The", "max_tokens": 12, "temperature": 1, "seed": 5, "ignore_eos": True}
    calls = [choice_of(client, TEXT, **{**common, **body}) for body in (plain, *others)]
    assert len({choice["text"] for choice in await asyncio.gather(*calls)}) == 1


async def test_sa06_masked_tokens_are_json(client: httpx.AsyncClient) -> None:
    body: Body = {"prompt": "x", "logprobs": 5, "max_tokens": 4, "allowed_token_ids": [70], "top_k": 1}
    values = (await choice_of(client, TEXT, **body))["logprobs"]["token_logprobs"]
    assert all(-1000 < value < 0 for value in values)
    assert near((await stream(client, TEXT, **body)).logprobs, values)


async def test_sa08_prompt_logprobs_from_chunks_and_cache(
    client: httpx.AsyncClient, cramped: httpx.AsyncClient
) -> None:
    ids = prompt_ids(1, 120)

    async def scores(server: httpx.AsyncClient, prompt: list[int]) -> list[float]:
        choice = await choice_of(server, TEXT, prompt=prompt, prompt_logprobs=0, max_tokens=1)
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        return [entry[str(i)]["logprob"] for entry, i in zip(rest, prompt[1:], strict=True)]

    expected = await scores(client, ids)
    for _ in range(2):
        assert near(await scores(cramped, ids), expected)
    branch = [*ids[:77], 5, 6]
    assert near(await scores(cramped, branch), await scores(client, branch))
    echo = await choice_of(client, TEXT, prompt=ids, echo=True, logprobs=0, max_tokens=0)
    assert near(echo["logprobs"]["token_logprobs"][1:], expected)
    assert echo["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    "ends", [{"stop": [" ", "a", "e"]}, {"logit_bias": {str(TURN_END): 100}}, {"stop_token_ids": LETTERS}]
)
async def test_sa09_min_tokens(ends: Body, client: httpx.AsyncClient) -> None:
    body: Body = {"prompt": "Count", "min_tokens": 20, "max_tokens": 40, "seed": 3, **ends}
    whole = await choice_of(client, TEXT, **body)
    assert whole["usage"]["completion_tokens"] >= 20
    assert (await stream(client, TEXT, **body)).text() == whole["text"]


async def test_pc03_one_prefix_in_one_step(client: httpx.AsyncClient) -> None:
    prefix = prompt_ids(2, 200)
    body: Body = {"max_tokens": 12, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    prompts = [[*prefix, i, 9, i] for i in range(12)]
    alone = [await choice_of(client, TEXT, **body, prompt=p, cache_salt=f"alone {p}") for p in prompts]
    together = await asyncio.gather(*(choice_of(client, TEXT, **body, prompt=p, cache_salt="all") for p in prompts))
    for a, b in zip(alone, together, strict=True):
        assert a["text"] == b["text"]
        assert near(a["logprobs"]["token_logprobs"], b["logprobs"]["token_logprobs"])


async def test_pc05_salts(client: httpx.AsyncClient) -> None:
    cached = []
    for salt in ("a", "a", "b", None, None):
        choice = await choice_of(client, TEXT, prompt=prompt_ids(3, 80), max_tokens=1, cache_salt=salt)
        cached.append(choice["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 64, 0, 0, 64]


@pytest.mark.parametrize(("length", "hit"), [(15, 0), (16, 0), (17, 16), (63, 48), (64, 48), (65, 64)])
async def test_pc06_whole_prompts_from_the_cache(length: int, hit: int, client: httpx.AsyncClient) -> None:
    """At least one token of a prompt is computed, so a prompt of whole blocks reuses all but its last block."""
    body: Body = {"prompt": prompt_ids(100 + length, length), "max_tokens": 8, "temperature": 0, "logprobs": 0}
    first, again = [await choice_of(client, TEXT, **body) for _ in range(2)]
    streamed = await stream(client, TEXT, **body, stream_options={"include_usage": True})
    usages = (first["usage"], again["usage"], streamed.usages[-1] or {})
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, hit, hit]
    assert first["text"] == again["text"] == streamed.text()
    assert near(first["logprobs"]["token_logprobs"], again["logprobs"]["token_logprobs"])
    assert near(first["logprobs"]["token_logprobs"], streamed.logprobs)


@pytest.mark.parametrize("temperature", [0, 1])
async def test_sc01_preempted_sequences(
    temperature: float, client: httpx.AsyncClient, cramped: httpx.AsyncClient
) -> None:
    """Four sequences of 110 tokens in 192 positions: some are pushed out and computed again."""
    body: Body = {"max_tokens": 90, "temperature": temperature, "logprobs": 0, "ignore_eos": True}
    bodies = [{**body, "prompt": prompt_ids(200 + i, 20), "seed": i} for i in range(4)]
    alone = [await choice_of(client, TEXT, **b) for b in bodies]
    before = await num_preemptions(cramped)
    together = await asyncio.gather(*(choice_of(cramped, TEXT, **b) for b in bodies))
    assert 0 < await num_preemptions(cramped) - before < 40
    for a, b in zip(alone, together, strict=True):
        assert a["text"] == b["text"]
        assert b["usage"]["completion_tokens"] == 90
        assert near(a["logprobs"]["token_logprobs"], b["logprobs"]["token_logprobs"])


async def num_preemptions(client: httpx.AsyncClient) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    return float(next(line for line in lines if line.startswith("octavo:num_preemptions_total{")).rpartition(" ")[2])


async def test_sc03_what_can_not_fit(cramped: httpx.AsyncClient) -> None:
    too_long: Body = {"prompt": [70] * 400, "max_tokens": 4}
    too_much: Body = {"prompt": [70] * 150, "max_tokens": 600, "ignore_eos": True}
    four: Body = {"prompt": [70] * 60, "max_tokens": 60, "n": 4, "ignore_eos": True}
    canary: Body = {"prompt": "x", "max_tokens": 3}
    answers = await asyncio.gather(*(post(cramped, TEXT, body) for body in (too_long, too_much, four, canary)))
    assert [status for status, _ in answers] == [400, 400, 200, 200]
    assert answers[2][1]["usage"]["completion_tokens"] == 240


async def test_nu01_crowds_of_all_sizes(client: httpx.AsyncClient) -> None:
    body: Body = {"max_tokens": 24, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    prompts = [prompt_ids(300 + i, 5 + i) for i in range(16)]
    alone = [await choice_of(client, TEXT, **body, prompt=p) for p in prompts]
    for crowd in (4, 16):
        for start in range(0, 16, crowd):
            part = prompts[start : start + crowd]
            together = await asyncio.gather(*(choice_of(client, TEXT, **body, prompt=p) for p in part))
            for a, b in zip(alone[start:], together, strict=False):
                assert a["text"] == b["text"]
                assert near(a["logprobs"]["token_logprobs"], b["logprobs"]["token_logprobs"])
