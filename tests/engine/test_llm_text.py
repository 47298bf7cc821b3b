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
