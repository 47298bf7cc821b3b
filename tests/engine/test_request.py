"""Requests before they are sent: what is refused and how it says so, and what the defaults become."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from octavo._core import Tokenizer
from octavo.engine.inputs import prompt_list, split_prompt
from octavo.engine.request import EngineRequest, RequestFactory, Terms, recommended_params
from octavo.errors import RequestError
from octavo.protocol import ModelFacts
from octavo.sampling_params import SamplingParams

from .conftest import tokenizer_json

FACTS = ModelFacts(
    model="m",
    vocab_size=260,
    max_model_len=100,
    block_size=16,
    num_blocks=10,
    max_num_seqs=4,
    eos_token_ids=(259, 7),
    dtype="float32",
    device="cpu",
    max_logprobs=5,
    tokenizer_path=None,
    default_sampling_params={"temperature": 0.5, "top_k": 20.0},
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_json(json.dumps(tokenizer_json()).encode())


@pytest.fixture
def factory(tokenizer: Tokenizer) -> RequestFactory:
    return RequestFactory(FACTS, tokenizer, seed=0)


def wire(request: EngineRequest) -> dict[str, Any]:
    values = json.loads(request.wire)
    assert isinstance(values, dict)
    return values


def test_max_tokens_defaults_to_the_rest_of_the_context(factory: RequestFactory) -> None:
    assert factory.prepare([1] * 30, SamplingParams(max_tokens=None)).max_tokens == 70
    assert factory.prepare([1] * 99, SamplingParams(max_tokens=None)).max_tokens == 1
    assert factory.prepare([1] * 30, SamplingParams(max_tokens=70)).max_tokens == 70


def test_eos_ids_stop_unless_ignored(factory: RequestFactory) -> None:
    request = factory.prepare([1], SamplingParams(stop_token_ids=[3, 7]))
    assert request.stop_token_ids == [259, 7, 3]
    assert wire(request)["eos_token_ids"] == [259, 7]
    assert wire(request)["stop_token_ids"] == [259, 7, 3]
    ignoring = factory.prepare([1], SamplingParams(stop_token_ids=[3], ignore_eos=True))
    assert ignoring.stop_token_ids == [3]
    assert wire(ignoring)["eos_token_ids"] == []


def test_seeds(tokenizer: Tokenizer) -> None:
    def seeds(engine_seed: int) -> list[int]:
        factory = RequestFactory(FACTS, tokenizer, engine_seed)
        return [wire(factory.prepare([1], SamplingParams()))["seed"] for _ in range(3)]

    assert len(set(seeds(0))) == 3
    assert seeds(0) == seeds(0)
    assert seeds(0) != seeds(1)
    assert all(0 <= seed < 2**63 for seed in seeds(0))
    given = RequestFactory(FACTS, tokenizer, 0).prepare([1], SamplingParams(seed=-5))
    assert wire(given)["seed"] == -5


def test_bad_words_are_ids_with_and_without_a_blank(factory: RequestFactory, tokenizer: Tokenizer) -> None:
    found = wire(factory.prepare([1], SamplingParams(bad_words=["stop", " x"])))["bad_words_ids"]
    assert found == [[258], [tokenizer.encode(" ")[0], 258], tokenizer.encode("x"), tokenizer.encode(" x")]


PROMPT_MISTAKES: dict[str, tuple[list[Any], str]] = {
    "empty": ([], "the prompt is empty"),
    "too long": ([1] * 103, "103 tokens; the context length is 100, output included: shorten the prompt by 4 tokens"),
    "no room": ([1] * 100, "shorten the prompt by 1 tokens"),
    "id too large": ([5, 260], "token id 260 at position 1; the vocabulary is 0 to 259"),
    "negative id": ([-1], "token id -1 at position 0"),
    "huge id": ([2**70], "integer token ids"),
    "float": ([1.0], "integer token ids"),
    "text": (["a"], "integer token ids"),
}


@pytest.mark.parametrize("name", PROMPT_MISTAKES)
def test_prompt_mistakes(name: str, factory: RequestFactory) -> None:
    prompt, message = PROMPT_MISTAKES[name]
    with pytest.raises(RequestError, match=message) as caught:
        factory.prepare(prompt, SamplingParams())
    assert caught.value.param == "prompt"


PARAM_MISTAKES: dict[str, tuple[dict[str, Any], str, str]] = {
    "huge max_tokens": ({"max_tokens": 2**31 - 1}, "max_tokens", "together 2147483557 more than the context length"),
    "one too many": ({"max_tokens": 91}, "max_tokens", "together 1 more .* max_tokens may be 90 here"),
    "min_tokens": ({"max_tokens": None, "min_tokens": 91}, "min_tokens", "leaves 90"),
    "logprobs": ({"logprobs": 6}, "logprobs", "at most 5 here, got 6"),
    "prompt_logprobs": ({"prompt_logprobs": 6}, "prompt_logprobs", "at most 5"),
    "stop id": ({"stop_token_ids": [260]}, "stop_token_ids", "the vocabulary ends at 259"),
    "bias": ({"logit_bias": {300: 1.0}}, "logit_bias", "has token id 300"),
    "allowed": ({"allowed_token_ids": [1, 999]}, "allowed_token_ids", "has token id 999"),
    "stop without text": ({"stop": ["x"], "detokenize": False}, "stop", "need detokenize"),
}


@pytest.mark.parametrize("name", PARAM_MISTAKES)
def test_param_mistakes(name: str, factory: RequestFactory) -> None:
    values, param, message = PARAM_MISTAKES[name]
    with pytest.raises(RequestError, match=message) as caught:
        factory.prepare([1] * 10, SamplingParams(**values))
    assert caught.value.param == param


@pytest.mark.parametrize("param", ["stop", "bad_words"])
def test_text_parameters_need_a_tokenizer(param: str) -> None:
    factory = RequestFactory(FACTS, None, seed=0)
    values: dict[str, Any] = {param: ["x"]}
    with pytest.raises(RequestError, match="needs a tokenizer") as caught:
        factory.prepare([1], SamplingParams(**values))
    assert caught.value.param == param


def test_priority_must_fit_the_frame(factory: RequestFactory) -> None:
    with pytest.raises(RequestError, match="priority"):
        factory.prepare([1], SamplingParams(), terms=Terms(priority=2**31))


def test_recommended_params() -> None:
    params = recommended_params(FACTS)
    assert (params.temperature, params.top_k) == (0.5, 20)
    assert recommended_params(replace(FACTS, default_sampling_params={})) == SamplingParams()


def test_prompt_forms() -> None:
    assert prompt_list("ab") == ["ab"]
    assert prompt_list([1, 2]) == [[1, 2]]
    assert prompt_list([[1], "x"]) == [[1], "x"]
    assert prompt_list([]) == []
    assert prompt_list({"prompt": "x"}) == [{"prompt": "x"}]
    assert split_prompt("ab") == ("ab", None)
    assert split_prompt((1, 2)) == (None, (1, 2))
    assert split_prompt({"prompt": "ab"}) == ("ab", None)
    assert split_prompt({"prompt_token_ids": [1], "prompt": "shown"}) == ("shown", [1])


@pytest.mark.parametrize("prompt", [{}, {"text": "x"}, {"prompt": 3}, 3, None, {"prompt": "x", "image": 1}])
def test_other_forms_are_refused(prompt: Any) -> None:
    with pytest.raises(RequestError):
        split_prompt(prompt)


@pytest.mark.parametrize(
    "wrong",
    [
        {"stop": 5},
        {"stop": None},
        {"bad_words": 5},
        {"stop_token_ids": 5},
        {"stop_token_ids": "12"},
        {"allowed_token_ids": "12"},
        {"allowed_token_ids": {5: 1}},
        {"logit_bias": [5]},
        {"ignore_eos": 1},
        {"skip_special_tokens": "no"},
        {"detokenize": None},
        {"include_stop_str_in_output": 0},
    ],
)
def test_a_value_of_another_type_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="must be ") as caught:
        SamplingParams(**wrong)
    assert caught.value.param == next(iter(wrong))


def test_numbers_of_numpy_are_pythons_afterwards() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        max_tokens=np.int64(5),  # type: ignore[arg-type]
        seed=np.int64(3),  # type: ignore[arg-type]
        stop_token_ids=np.array([1, 2]),  # type: ignore[arg-type]
        logit_bias={np.int64(3): np.float32(2)},  # type: ignore[dict-item]
    )
    plain = {"temperature": 0.5, "max_tokens": 5, "seed": 3, "stop_token_ids": (1, 2), "logit_bias": {3: 2.0}}
    assert params == SamplingParams(**plain)
    assert params.to_wire() == SamplingParams(**plain).to_wire()
    for wrong in ({"max_tokens": np.float32(3)}, {"temperature": np.bool_(True)}, {"stop_token_ids": np.array([0.5])}):
        with pytest.raises(RequestError, match="must be a"):
            SamplingParams(**wrong)  # type: ignore[arg-type]


def test_one_string_sets_and_ranges_are_lists() -> None:
    params = SamplingParams(stop="ab", bad_words="cd", stop_token_ids={7}, allowed_token_ids=range(3))  # type: ignore[arg-type]
    assert (params.stop, params.bad_words) == (("ab",), ("cd",))
    found = json.loads(params.to_wire())
    assert (found["stop_token_ids"], found["allowed_token_ids"]) == ([7], [0, 1, 2])
