"""`LLM` with a model: text in, text out, on a tiny random Llama on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import RequestError

from .test_llm import tokens


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    with LLM(str(tiny_llama), dtype="float32", device="cpu", cpu_threads=1) as llm:
        yield llm


def test_text(llm: LLM) -> None:
    one, two = llm.generate(["Hello", "Wörld"], SamplingParams(temperature=0, max_tokens=8))
    assert one.prompt == "Hello"
    assert one.prompt_token_ids == list(b"Hello")
    assert llm.tokenizer is not None
    for output in (one, two):
        assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids, True)
    again = llm.generate([list("Wörld".encode())], SamplingParams(temperature=0, max_tokens=8))
    assert tokens(again) == tokens([two])


def test_chat_takes_one_conversation_or_many(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    hello = [{"role": "user", "content": "Hi"}]
    (one,) = llm.chat(hello, params)
    assert one.prompt == "<|user|>Hi<|a|>"
    many = llm.chat([hello, [*hello, {"role": "assistant", "content": "!"}]], params)
    assert tokens(many)[0] == tokens([one])[0]
    assert many[1].prompt == "<|user|>Hi<|assistant|>!<|a|>"
    assert llm.chat([], params) == []
    (other,) = llm.chat(hello, params, chat_template="{{ messages[0].content }}", add_generation_prompt=False)
    assert other.prompt_token_ids == list(b"Hi")
    with pytest.raises(RequestError, match="messages"):
        llm.chat([[]], params)


def test_what_a_template_does_not_ask_for_is_named(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(temperature=0, max_tokens=2)
    hello = [{"role": "user", "content": "Hi"}]
    tool = {"type": "function", "function": {"name": "now"}}
    with pytest.raises(RequestError, match="chat template does not show tools"):
        llm.chat(hello, params, tools=[tool])
    with pytest.raises(RequestError, match="documents"):
        llm.chat(hello, params, documents=[{"text": "x"}])
    shows = "{{ tools[0].function.name }}{{ documents[0].text }}{{ mood }}"
    options = {"tools": [tool], "documents": [{"text": "x"}], "mood": "y", "add_generation_prompt": False}
    (output,) = llm.chat(hello, params, chat_template=shows, **options)
    assert output.prompt == "nowxy"
    assert caplog.text == ""
    llm.chat(hello, params, tools=None, add_generation_promt=False)
    assert "no variable 'add_generation_promt'" in caplog.text


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    (whole,) = llm.generate("abc", params)
    text = whole.outputs[0].text
    stop = text[5:7]
    (stopped,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, stop=[stop]))
    assert stopped.outputs[0].text == text[: text.index(stop)]
    assert stopped.outputs[0].finish_reason == "stop"
    assert stopped.outputs[0].stop_reason == stop
    stats = llm.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"]


def test_a_stop_string_counts_after_min_tokens(llm: LLM) -> None:
    def say(**more: Any) -> tuple[int, str]:
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, **more)
        completion = llm.generate("abc", params)[0].outputs[0]
        return len(completion.token_ids), completion.text

    _, text = say()
    num_tokens, before = say(stop=[text[3]])
    assert before == text[: text.index(text[3])]
    assert say(stop=[text[3]], min_tokens=num_tokens)[1] == before
    later, longer = say(stop=[text[3]], min_tokens=num_tokens + 1)
    assert later > num_tokens
    assert longer.startswith(before + text[3])


def test_seeds_decide(llm: LLM) -> None:
    def sample(seed: int | None) -> list[list[int]]:
        return tokens(llm.generate(["x"], SamplingParams(temperature=1.0, max_tokens=16, seed=seed)))

    assert sample(1) == sample(1)
    assert len({str(sample(None)) for _ in range(3)}) == 3


def test_bad_words_are_not_said(llm: LLM) -> None:
    def say(prompt: str, **more: Any) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, **more)
        return llm.generate(prompt, params)[0].outputs[0].token_ids

    letter = range(97, 123)
    prompt, said = next((p, ids) for p in "abcdefghijklmnop" if (ids := say(p))[0] in letter)
    assert said[0] not in say(prompt, bad_words=[chr(said[0])])


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_how_work_is_cut_changes_no_token(llm: LLM, tiny_llama: Path, depth: int) -> None:
    """Small chunks, preemption and steps in flight, against one prompt at a time; greedy and sampled."""
    prompts = ["shared beginning of a prompt, " * 2 + "x" * i for i in range(12)]
    params = [SamplingParams(temperature=i % 2, max_tokens=20, seed=i, ignore_eos=True) for i in range(12)]
    expected = [tokens(llm.generate(prompt, one))[0] for prompt, one in zip(prompts, params, strict=True)]
    config = {"dtype": "float32", "device": "cpu", "cpu_threads": 1, "overlap_depth": depth}
    tight = {"num_gpu_blocks_override": 16, "max_model_len": 128, "max_num_seqs": 6, "max_num_batched_tokens": 40}
    with LLM(str(tiny_llama), **config, **tight) as cut:
        assert tokens(cut.generate(prompts, params)) == expected
        stats = cut.stats()
    assert stats["num_preemptions"] > 0
    assert stats["num_free_blocks"] == stats["num_blocks"]


FEATURES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05, "n": 2},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2},
    {"temperature": 0.8, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    {"temperature": 0.7, "logit_bias": {97: 3.0, 98: -5.0}},
    {"temperature": 0.9, "min_tokens": 5, "prompt_logprobs": 1},
    {"temperature": 0.6, "structured_outputs": {"regex": "[a-z]{4,9}[0-9]+"}},
)


def tell(llm: LLM, params: list[SamplingParams]) -> list[tuple[Any, ...]]:
    """What two rounds of requests, of which some are over early, gave."""
    outputs = [llm.generate([f"round {turn}: {'x' * i}" for i in range(len(params))], params) for turn in range(2)]
    ones = [one for each in outputs for output in each for one in output.outputs]
    return [(one.token_ids, one.text, one.finish_reason, one.stop_reason) for one in ones]


@pytest.mark.parametrize("runner", ["torch", "embedded"])
def test_steps_in_flight_change_nothing_of_what_features_do(tiny_llama: Path, runner: str) -> None:
    """Every way of sampling beside requests that a stop string ends while steps with their rows are in flight."""
    lengths = (6, 40, 17)
    params = [
        SamplingParams(seed=i, max_tokens=lengths[i % 3], ignore_eos=i % 2 == 0, **each)
        for i, each in enumerate(FEATURES)
    ]
    told = {}
    for depth in (1, 2, 3):
        config = {"dtype": "float32", "device": "cpu", "cpu_threads": 1, "runner": runner, "overlap_depth": depth}
        with LLM(str(tiny_llama), **config) as llm:
            texts = [text for _, text, _, _ in tell(llm, params) if len(text) > 8]
            stops = [
                SamplingParams(seed=i, temperature=0.0, max_tokens=60, stop=[texts[i % len(texts)][4:6]])
                for i in range(4)
            ]
            told[depth] = tell(llm, [*params, *stops])
            stats = llm.stats()
        assert stats["num_free_blocks"] == stats["num_blocks"]
    assert told[1] == told[2] == told[3]
    assert {"stop", "length"} <= {reason for _, _, reason, _ in told[1]}
