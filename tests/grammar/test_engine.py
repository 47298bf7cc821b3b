"""The whole path with a model: SamplingParams to text, at both depths, in crowded and cut-up steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import RequestError
from octavo.protocol import CompletionOutput
from tests.grammar.driver import Driver, wander

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CONSTRAINTS: list[dict[str, Any] | None] = [
    {"json": SCHEMA},
    None,
    {"regex": "[a-f]{3,9}"},
    {"choice": ["yes", "yes, sir", "日本語"]},
    {"json_object": True},
    {"grammar": 'root ::= "(" root ")" | [0-9]+'},
]
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "cpu_threads": 1, "block_size": 16}


def make(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    with make(tiny_llama) as made:
        yield made


def run(llm: LLM) -> list[CompletionOutput]:
    """Twelve requests at once: every constraint, greedy and drawn, some with several samples, penalties or logprobs."""
    params = []
    for i in range(12):
        params.append(
            SamplingParams(
                max_tokens=60,
                temperature=0 if i % 2 else 0.9,
                seed=i,
                n=2 if i % 5 == 0 else 1,
                logprobs=1 if i % 3 == 0 else None,
                presence_penalty=0.5 if i % 4 == 0 else 0.0,
                structured_outputs=CONSTRAINTS[i % len(CONSTRAINTS)],
            )
        )
    outputs = llm.generate([f"Prompt number {i % 7}: {'x' * 3 * i}" for i in range(12)], params)
    return [one for output in outputs for one in output.outputs]


@pytest.mark.parametrize(
    "options",
    [
        {"overlap_depth": 2},
        {"overlap_depth": 3},
        {"overlap_depth": 2, "max_num_batched_tokens": 16, "max_num_seqs": 4},
        {"num_gpu_blocks_override": 14, "max_num_seqs": 6, "max_model_len": 192, "overlap_depth": 2},
        {"runner": "embedded"},
    ],
    ids=["depth 2", "depth 3", "chunked", "preempted", "embedded"],
)
def test_tokens_are_the_same_whatever_the_schedule(tiny_llama: Path, llm: LLM, options: dict[str, Any]) -> None:
    with make(tiny_llama, **options) as other:
        found = run(other)
        if "num_gpu_blocks_override" in options:
            assert other.stats()["num_preemptions"] > 0
    expected = run(llm)
    assert [one.finish_reason for one in found] == [one.finish_reason for one in expected]
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]


def test_outputs_are_what_was_asked_for(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=120, seed=i, structured_outputs={"json": SCHEMA}) for i in range(12)]
    for output in llm.generate(["x"] * 12, params):
        one = output.outputs[0]
        if one.finish_reason == "stop":
            value = json.loads(one.text)
            assert set(value) == {"name", "age"}
            assert value["age"] <= 120
        else:
            assert one.finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_min_tokens_do_not_add_to_a_complete_value(llm: LLM, stream: bool) -> None:
    outputs = {"json": {"enum": ["a"]}} if stream else {"json": {"type": "boolean"}}
    params = SamplingParams(max_tokens=96, min_tokens=64, temperature=0, structured_outputs=outputs)
    one = llm.generate("x", params)[0].outputs[0]
    assert one.finish_reason == "stop"
    assert one.text in ('"a"', "true", "false")


def test_ignore_eos_does_not_go_past_the_grammar(llm: LLM) -> None:
    params = SamplingParams(max_tokens=50, ignore_eos=True, structured_outputs={"regex": "[0-9]{3}"})
    one = llm.generate("x", params)[0].outputs[0]
    assert (len(one.text), one.finish_reason) == (3, "stop")


def test_nothing_allowed_ends_one_request_with_the_reason(llm: LLM) -> None:
    impossible = SamplingParams(max_tokens=8, allowed_token_ids=[ord("x")], structured_outputs={"regex": "[0-9]{3}"})
    fine = SamplingParams(max_tokens=8, structured_outputs={"regex": "[0-9]{3}"})
    bad, good = (output.outputs[0] for output in llm.generate(["x", "x"], [impossible, fine]))
    assert bad.finish_reason == "error"
    assert str(bad.stop_reason).startswith("structured_outputs: the grammar can't go on")
    assert (len(good.text), good.finish_reason) == (3, "stop")


def test_bad_constraints_raise_before_anything_runs(llm: LLM) -> None:
    steps = llm.stats()["num_output_tokens"]
    with pytest.raises(RequestError, match='at #/items: keyword "contains"') as caught:
        llm.generate("x", SamplingParams(structured_outputs={"json": {"items": {"contains": 1}}}))
    assert caught.value.param == "structured_outputs"
    assert llm.stats()["num_output_tokens"] == steps


def test_fake_runner_obeys_masks(tiny_llama: Path) -> None:
    with LLM(str(tiny_llama), runner="fake", max_model_len=128, overlap_depth=2) as fake:
        params = SamplingParams(max_tokens=30, structured_outputs={"regex": "[a-c]{4,6}"})
        texts = [output.outputs[0].text for output in fake.generate([f"p{i}" for i in range(9)], params)]
    assert all(4 <= len(text) <= 6 and set(text) <= set("abc") for text in texts), texts
    assert len(set(texts)) > 1


def test_an_idle_engine_reads_the_vocabulary(tmp_path: Path) -> None:
    """Before any request: afterwards the file is not needed any more."""
    driver = Driver(tmp_path)
    assert driver.core.wait(60.0), "it is woken when that is done"
    (tmp_path / "tokenizer.json").unlink()
    [row] = driver.run([({"regex": "[0-9]{3}"}, wander(1))])
    assert (row.finish, len(row.text)) == ("stop", 3)
