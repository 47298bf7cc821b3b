"""Speculation on the embedded runner: whatever is drafted, outputs are those of an engine without drafts.

A random model repeats itself when it is greedy, so drafts are long and often right; at higher temperatures they are
mostly wrong. Numbers are the same to the last bit.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from same_logprobs import assert_same_logprobs
from tests.cases.tiny_chat_model import write_model

from octavo import LLM, RequestOutput, SamplingParams
from octavo.config import make_engine_config
from octavo.errors import ConfigError
from octavo.speculation import METHODS, Speculation, read_speculation
from octavo.worker.base import make_runner

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "runner": "embedded",
    "dtype": "float32",
    "block_size": 4,
    "num_gpu_blocks_override": 400,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 64,
    "max_model_len": 160,
    "cpu_threads": 1,
}
ALWAYS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
MANY = {"type": "array", "items": {"const": "nope"}, "minItems": 4, "maxItems": 6}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["nope", None]}, "b": MANY},
    "required": ["a", "b"],
    "additionalProperties": False,
}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "cool": {"temperature": 0.1},
    "sampled": {"temperature": 1.0},
    "nucleus": {"temperature": 0.6, "top_k": 30, "top_p": 0.9},
    "penalties": {"temperature": 0.0, "presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    "bad-words": {"temperature": 0.0, "bad_words": ["a", "qu", "th", "ee"]},
    "min-tokens": {"temperature": 0.0, "min_tokens": 30, "stop_token_ids": list(range(0, 256, 3))},
    "stop-ids": {"temperature": 0.2, "stop_token_ids": list(range(0, 256, 40))},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
    "prompt-logprobs": {"temperature": 0.0, "prompt_logprobs": 2, "logprobs": 0},
    "several": {"n": 3, "temperature": 0.3},
    "short": {"temperature": 0.0, "max_tokens": 3},
    "grammar": {"temperature": 0.0, "structured_outputs": {"json": SCHEMA}},
    "hot-grammar": {"temperature": 1.0, "structured_outputs": {"json": SCHEMA}},
    "pattern": {"temperature": 0.5, "structured_outputs": {"regex": "(ab|cd){4,12}[xyz]+"}},
}


def prompts(seed: int) -> list[str]:
    """Random texts, some of which repeat themselves."""
    rng = random.Random(seed)
    texts = ["".join(rng.choices("abcdeqrst ,.", k=rng.randrange(1, 40))) for _ in range(5)]
    texts += [(text[:7] + " ") * 5 for text in texts[:3]]
    return [*texts, "{'a': nope, 'b': nope} {'a': nope, 'b': nope} {'a': nope, "]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def plain(chat_model: Path) -> Iterator[LLM]:
    with LLM(str(chat_model), speculative_config="off", **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module", params=["roomy", "starved", "overlapped", "measured"])
def speculating(chat_model: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    changes: dict[str, dict[str, Any]] = {
        "roomy": {},
        "starved": {"num_gpu_blocks_override": 45},
        "overlapped": {"overlap_depth": 2},
        "measured": {"speculative_config": "auto"},
    }
    with LLM(str(chat_model), **{**OPTIONS, "speculative_config": ALWAYS, **changes[request.param]}) as llm:
        yield llm
        counted = llm.stats()
        assert request.param == "measured" or counted["num_accepted_tokens"] > 100
        assert request.param != "starved" or counted["num_preemptions"] > 10


@pytest.mark.parametrize("case", CASES)
def test_outputs_are_those_without_drafts(plain: LLM, speculating: LLM, case: str) -> None:
    params = SamplingParams(**{"max_tokens": 60, "seed": 5, "ignore_eos": "ids" in case, **CASES[case]})
    for expected, found in zip(*(llm.generate(prompts(3), params) for llm in (plain, speculating)), strict=True):
        assert_same(found, expected)


def assert_same(found: RequestOutput, expected: RequestOutput) -> None:
    assert [o.token_ids for o in found.outputs] == [o.token_ids for o in expected.outputs]
    for ours, theirs in zip(found.outputs, expected.outputs, strict=True):
        assert (ours.text, ours.finish_reason, ours.stop_reason) == (
            theirs.text,
            theirs.finish_reason,
            theirs.stop_reason,
        )
        assert_same_logprobs(ours.logprobs, theirs.logprobs)
    assert_same_logprobs(found.prompt_logprobs, expected.prompt_logprobs)


def test_stop_strings_cut_within_a_draft(plain: LLM, speculating: LLM) -> None:
    """Every stop string of two characters that the text has."""
    greedy = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    text = plain.generate([prompts(3)[5]], greedy)[0].outputs[0].text
    stops = sorted({text[i : i + 2] for i in range(len(text) - 1)})[:40]
    params = [SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, stop=[stop]) for stop in stops]
    for expected, found in zip(
        *(llm.generate([prompts(3)[5]] * len(params), params) for llm in (plain, speculating)), strict=True
    ):
        assert expected.outputs[0].finish_reason == "stop"
        assert_same(found, expected)


def test_drafts_are_made_and_right(chat_model: Path, plain: LLM) -> None:
    with LLM(str(chat_model), speculative_config=ALWAYS, **OPTIONS) as llm:
        params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True, detokenize=False)
        found = llm.generate([prompts(3)[5]], params)
        counted = llm.stats()
        assert_same(found[0], plain.generate([prompts(3)[5]], params)[0])
        assert counted["num_accepted_tokens"] > 25
        assert counted["num_steps"] + counted["num_accepted_tokens"] == 100
        assert counted["num_accepted_tokens"] <= counted["num_draft_tokens"] <= 4 * counted["num_drafts"]
        # What follows finds the prefix, verified tokens only, and goes on as if nothing had been guessed.
        longer = [*found[0].prompt_token_ids, *found[0].outputs[0].token_ids[:50]]
        again = llm.generate([longer], SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True))[0]
        assert again.num_cached_tokens >= len(longer) - 4
        assert again.outputs[0].token_ids == found[0].outputs[0].token_ids[50:]
        assert plain.stats()["num_drafts"] == 0


def test_a_grammar_bounds_drafts(chat_model: Path) -> None:
    with LLM(str(chat_model), speculative_config=ALWAYS, **OPTIONS) as llm:
        params = SamplingParams(max_tokens=80, temperature=0.0, structured_outputs={"json": SCHEMA})
        answers = llm.generate([prompts(seed)[-1] for seed in range(5)], params)
        assert all(json.loads(answer.outputs[0].text)["b"][0] == "nope" for answer in answers)
        counted = llm.stats()
        # Within "nope", "nope", … all that is drafted is allowed, and nearly all of it forced.
        assert counted["num_accepted_tokens"] > 0.7 * counted["num_draft_tokens"] > 20


READ: list[tuple[Any, Speculation | None]] = [
    ("off", None),
    *((name, METHODS[name]) for name in ("auto", "ngram")),
    ('{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}', Speculation(3, 2, 4, False)),
    ({"method": "ngram", "prompt_lookup_max": 1}, Speculation(5, 1, 1, False)),
    ({"prompt_lookup_min": 7}, Speculation(5, 7, 7, False)),
    ({"method": "auto", "num_speculative_tokens": 12}, Speculation(12, 2, 8, True)),
]


@pytest.mark.parametrize(("value", "expected"), READ)
def test_values(value: Any, expected: Speculation | None) -> None:
    assert read_speculation(value) == expected
    assert make_engine_config({"speculative_config": value}).scheduler.speculative_config == value


BAD: list[tuple[Any, str]] = [
    ("eagle", "method 'eagle' is none of auto, ngram, off"),
    ({"method": "ngram", "model": "x"}, "'model' is none of"),
    ('{"method": ', "no JSON object"),
    ({"num_speculative_tokens": 0}, "num_speculative_tokens 0 is no number from 1 to 64"),
    ({"prompt_lookup_min": 5, "prompt_lookup_max": 4}, "prompt_lookup_min 5 is above prompt_lookup_max 4"),
    (7, "not a valid value"),
]


@pytest.mark.parametrize(("value", "message"), BAD)
def test_bad_values_are_refused(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        make_engine_config({"speculative_config": value})
    assert str(raised.value).startswith("--speculative-config")


def test_runners_that_take_no_drafts_say_so(chat_model: Path) -> None:
    options = {**OPTIONS, "model": str(chat_model), "runner": "torch"}
    with pytest.raises(ConfigError, match="--speculative-config: --runner torch verifies no drafts"):
        make_runner(make_engine_config({**options, "speculative_config": "ngram"}), lambda stage, fraction: None)
    runner = make_runner(make_engine_config(options), lambda stage, fraction: None)
    assert runner.config.scheduler.speculative_config == "off"
    runner.close()
