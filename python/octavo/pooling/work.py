"""What `embed`, `score` and `classify` ask of a model, and what they make of its numbers: the same for `LLM`,
`AsyncLLM` and the server. Each returns the inputs to run and a function from their rows to the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from octavo.errors import RequestError
from octavo.pooling.answers import Rows, activate, shorten, similarities
from octavo.pooling.inputs import InputEncoder, PoolingInput
from octavo.pooling.remote import check_pools
from octavo.protocol import (
    ClassificationOutput,
    EmbeddingOutput,
    ModelFacts,
    PoolingFacts,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
)

T = TypeVar("T")
Prompts = str | Sequence[int] | Sequence[str | list[int]]
Texts = str | Sequence[str]


class Work(NamedTuple, Generic[T]):
    """Inputs, and what to do with their rows."""

    inputs: list[PoolingInput]
    finish: Callable[[Rows], T]


def score_work(
    facts: ModelFacts,
    encoder: InputEncoder,
    pairs: Sequence[tuple[str, str]],
    *,
    truncate: int | None = None,
    instruction: str | None = None,
) -> Work[Rows]:
    """A score a pair, [pairs]: the model's own, or the cosine of two embeddings (each different text is read once)."""
    pooling = pooling_of(facts, "score", "embed")
    if facts.task == "score":
        inputs = encoder.encode_pairs(pairs, truncate=truncate, instruction=instruction)
        return Work(inputs, lambda rows: activate(rows, pooling.activation)[:, 0])
    if instruction is not None:
        raise RequestError("instruction: this model takes none", "instruction")
    numbers: dict[str, int] = {}
    for pair in pairs:
        for text in pair:
            numbers.setdefault(text, len(numbers))
    first, second = ([numbers[pair[side]] for pair in pairs] for side in (0, 1))
    inputs = encoder.encode(list(numbers), truncate=truncate, param="documents")
    return Work(inputs, lambda rows: similarities(rows[first], rows[second]))


def pair_up(first: Sequence[str], second: Sequence[str], names: tuple[str, str]) -> list[tuple[str, str]]:
    """One first text for all second ones, or as many of both. RequestError otherwise."""
    if len(first) == 1:
        first = list(first) * len(second)
    if len(first) != len(second):
        raise RequestError(
            f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}: give one first text, or as many of both",
            names[0],
        )
    return list(zip(first, second, strict=True))


def shortened(rows_nd: Rows, dimensions: int | None) -> Rows:
    """Embeddings with at most so many numbers. RequestError for a number that the model has not."""
    if dimensions is None or dimensions == rows_nd.shape[1]:
        return rows_nd
    check_dimensions(dimensions, rows_nd.shape[1])
    return shorten(rows_nd, dimensions)


def check_dimensions(dimensions: int, most: int) -> None:
    if not 1 <= dimensions <= most:
        raise RequestError(f"dimensions must be within 1 and {most} for this model", "dimensions")


def pooling_of(facts: ModelFacts, *tasks: str) -> PoolingFacts:
    """RequestError unless the model does one of the tasks."""
    check_pools(facts)
    assert facts.pooling is not None
    if facts.task not in tasks:
        raise RequestError(f"this needs a model for {' or '.join(tasks)}, this one's task is {facts.task}", "model")
    return facts.pooling


def embeddings(
    facts: ModelFacts, encoder: InputEncoder, prompts: Prompts, dimensions: int | None, truncate: int | None
) -> Work[list[PoolingRequestOutput[EmbeddingOutput]]]:
    """For `LLM.embed`."""
    most = pooling_of(facts, "embed").num_outputs
    check_dimensions(most if dimensions is None else dimensions, most)
    inputs = encoder.encode(_prompt_list(prompts), truncate=truncate, param="prompts")

    def finish(rows: Rows) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        return _outputs(inputs, [EmbeddingOutput(row) for row in shortened(rows, dimensions).tolist()])

    return Work(inputs, finish)


def scores(
    facts: ModelFacts,
    encoder: InputEncoder,
    text_1: Texts,
    text_2: Texts,
    truncate: int | None,
    instruction: str | None,
) -> Work[list[ScoringOutput]]:
    """For `LLM.score`."""
    first, second = ([each] if isinstance(each, str) else list(each) for each in (text_1, text_2))
    pairs = pair_up(first, second, ("text_1", "text_2"))
    inputs, finish = score_work(facts, encoder, pairs, truncate=truncate, instruction=instruction)
    return Work(inputs, lambda rows: [ScoringOutput(value) for value in finish(rows).tolist()])


def classes(
    facts: ModelFacts, encoder: InputEncoder, prompts: Prompts, truncate: int | None
) -> Work[list[PoolingRequestOutput[ClassificationOutput]]]:
    """For `LLM.classify`."""
    pooling = pooling_of(facts, "classify", "score")
    inputs = encoder.encode(_prompt_list(prompts), truncate=truncate, param="prompts")

    def finish(rows: Rows) -> list[PoolingRequestOutput[ClassificationOutput]]:
        probs = activate(rows, pooling.activation)
        made = [ClassificationOutput(row.tolist(), pooling.labels[int(row.argmax())]) for row in probs]
        return _outputs(inputs, made)

    return Work(inputs, finish)


# Task of `LLM.encode` -> tasks of models that do it.
ENCODE_TASKS = {"embed": ("embed",), "classify": ("classify", "score"), "score": ("score",)}


def encoded(
    facts: ModelFacts, encoder: InputEncoder, prompts: Prompts, pooling_task: str | None, truncate: int | None
) -> Work[list[PoolingRequestOutput[PoolingOutput]]]:
    """For `LLM.encode`."""
    task = facts.task if pooling_task is None else pooling_task
    if task not in ENCODE_TASKS:
        raise RequestError(f"pooling_task must be one of {', '.join(ENCODE_TASKS)}, got {task!r}", "pooling_task")
    pooling = pooling_of(facts, *ENCODE_TASKS[task])
    inputs = encoder.encode(_prompt_list(prompts), truncate=truncate, param="prompts")

    def finish(rows: Rows) -> list[PoolingRequestOutput[PoolingOutput]]:
        numbers = rows if task == "embed" else activate(rows, pooling.activation)
        return _outputs(inputs, [PoolingOutput(row) for row in numbers.tolist()])

    return Work(inputs, finish)


def _outputs(inputs: Sequence[PoolingInput], made: Sequence[T]) -> list[PoolingRequestOutput[T]]:
    return [PoolingRequestOutput(one.token_ids, each) for one, each in zip(inputs, made, strict=True)]


def _prompt_list(prompts: Prompts) -> list[str | list[int]]:
    """One prompt or many, as a list. A list of integers is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and isinstance(items[0], int):
        return [items]  # type: ignore[list-item]
    if not items or not all(isinstance(each, str | list) for each in items):
        raise RequestError("prompts must be a text, token ids, or a list of these that is not empty", "prompts")
    return items  # type: ignore[return-value]
