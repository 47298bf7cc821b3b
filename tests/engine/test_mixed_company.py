"""Everything at once in a cache too small for it: each answer is the one that the request gets alone, nothing stays.

Requests of all kinds (grammars, several choices, stop strings, penalties, log probabilities, seeds) share prefixes,
have priorities, push each other out, and leave at random. With the fake runner: test_random_requests.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import pytest

from octavo import LLM, AsyncLLM, RequestOutput, SamplingParams
from tests.cases.tiny_chat_model import write_model

BASE: dict[str, Any] = {"dtype": "float32", "block_size": 16, "cpu_threads": 1, "max_model_len": 192, "device": "cpu"}
ALONE: dict[str, Any] = {"max_num_seqs": 1, "enable_prefix_caching": False, "speculative_config": "off"}
STARVED: dict[str, Any] = {
    "num_gpu_blocks_override": 14,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "scheduling_policy": "priority",
}
GUESSES = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
WORDS = ("the", "a", "an", "of", "in", "on", "it", "was", "and", "to", "big", "red", "dog", "cat", "sun", "moon", "sea")
FORMS: list[dict[str, Any]] = [
    {"regex": "[a-f]{3,30}"},
    {"choice": ["red green", "blue", "yellow"]},
    {"json": {"type": "array", "items": {"type": "boolean"}, "maxItems": 9}},
    {"json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
    {"grammar": 'root ::= "ab" root | "c"'},
]
# Field -> (how often, values): what a request may have beside its length.
FIELDS: dict[str, tuple[float, list[Any]]] = {
    "temperature": (1.0, [0, 0, 0.7, 1.0, 1.5]),
    "n": (1.0, [1, 1, 1, 2, 3]),
    "top_k": (0.3, [1, 5, 50]),
    "top_p": (0.3, [0.1, 0.5, 0.9]),
    "min_p": (0.2, [0.01, 0.2]),
    "repetition_penalty": (0.3, [0.8, 1.1, 1.5]),
    "presence_penalty": (0.2, [-1.0, 1.0]),
    "logprobs": (0.2, [0, 5]),
    "prompt_logprobs": (0.1, [0, 2]),
    "stop": (0.2, [["e"], ["th"], [" a", "zz"]]),
    "min_tokens": (0.2, [1]),
    "bad_words": (0.1, [["the"], ["dog"]]),
    "logit_bias": (0.1, [{101: 5.0}, {32: -5.0}]),
    "ignore_eos": (0.3, [True]),
    "structured_outputs": (0.35, FORMS),
}
NUM_CASES, NUM_CLIENTS = 50, 14


def cases(seed: int) -> list[tuple[str, SamplingParams]]:
    """(prompt, parameters); prompts begin alike, and some repeat themselves, so that guesses are right."""
    r = random.Random(seed)
    prefixes = [" ".join(r.choices(WORDS, k=22)) for _ in range(3)]
    made = []
    for _ in range(NUM_CASES):
        start = r.choice([*prefixes, "one two three " * 5])
        prompt = start[: r.randrange(len(start))] + " " + " ".join(r.choices(WORDS, k=r.randint(1, 12)))
        fields = {name: r.choice(values) for name, (share, values) in FIELDS.items() if r.random() < share}
        made.append((prompt, SamplingParams(max_tokens=r.choice([1, 3, 8, 20, 40]), seed=r.getrandbits(31), **fields)))
    return made


def said(output: RequestOutput) -> list[Any]:
    return [
        (choice.text, list(choice.token_ids), choice.finish_reason, choice.stop_reason) for choice in output.outputs
    ]


@dataclass
class Crowd:
    """Clients that ask until `num_calls` have been made; a third of the calls leave before their end."""

    llm: AsyncLLM
    alone: list[tuple[str, SamplingParams, list[Any]]]
    num_calls: int
    num_left: int = 0
    wrong: list[Any] = field(default_factory=list)

    async def _first(self, stream: AsyncGenerator[RequestOutput, None], *, leaves: bool) -> RequestOutput | None:
        """The first output; None when the client leaves before it."""
        first = asyncio.ensure_future(anext(stream))
        if leaves:
            for _ in range(3):  # it is under way then
                await asyncio.sleep(0)
            first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            return await first
        return None

    async def client(self, number: int) -> None:
        r = random.Random(number)
        while self.num_calls > 0:
            self.num_calls -= 1
            prompt, params, expected = r.choice(self.alone)
            patience = r.choice([-1, 0, r.randint(1, 20), 10**6, 10**6])
            stream = self.llm.generate(prompt, params, stream="cumulative", priority=r.randrange(3))
            output = await self._first(stream, leaves=patience < 0)
            while output is not None and not output.finished and patience > 0:
                output = await anext(stream)
                patience -= 1
            await stream.aclose()
            if output is None or not output.finished:
                self.num_left += 1
            elif said(output) != expected:
                self.wrong.append((prompt, params, expected, said(output)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize(
    ("options", "num_calls"),
    [
        ({"runner": "embedded", "speculative_config": GUESSES}, 1500),
        ({"runner": "embedded", "speculative_config": "auto", "overlap_depth": 2}, 1500),
        ({"runner": "torch", "overlap_depth": 2}, 80),
    ],
    ids=["guesses", "overlapped", "torch"],
)
async def test_each_answer_is_its_own(options: dict[str, Any], num_calls: int, model: str) -> None:
    asked = cases(seed=num_calls)
    with LLM(model, **BASE, **ALONE, runner=options["runner"]) as llm:
        alone = [(prompt, params, said(llm.generate(prompt, params)[0])) for prompt, params in asked]
    async with AsyncLLM(model, **BASE, **{**STARVED, **options}) as llm:
        crowd = Crowd(llm, alone, num_calls)
        await asyncio.gather(*(crowd.client(number) for number in range(NUM_CLIENTS)))
        assert crowd.wrong == []
        assert crowd.num_left > num_calls / 10
        await llm.call("reset_prefix_cache")
        stats = await llm.call("stats")
    assert stats["num_preemptions"] > num_calls / 20
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
    assert stats["num_free_blocks"] == stats["num_blocks"]
    if options.get("speculative_config") is GUESSES:
        assert stats["num_accepted_tokens"] > 0
