"""POST /rerank and /score: how well texts go together.

By the model's task: a cross-encoder or a yes/no reranker reads both texts at once; an embedding model's score is the
cosine of the two vectors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.errors import RequestError
from octavo.pooling.answers import Rows, activate, similarities
from octavo.pooling.inputs import PoolingInput
from octavo.server.body import read_json
from octavo.server.context import ServerContext
from octavo.server.pooling_call import Usage, answer, id_of
from octavo.server.schema.pooling import parse_rerank, parse_score

Pair = tuple[str, str]


async def score(request: Request) -> Response:
    """A score for each pair of texts: text_1 and text_2, or queries and documents."""
    context = ServerContext.of(request)
    context.check_task("score", "embed")
    body, size_bytes = await read_json(request)
    wanted, pairs = parse_score(body)
    model = context.check_model(wanted.model)
    work = partial(_encode, context, pairs, wanted.truncate_prompt_tokens, wanted.instruction)
    inputs, scores_of = await context.run_text(work, size_bytes=size_bytes)

    def write(rows: Rows, usage: Usage) -> dict[str, Any]:
        scores = scores_of(rows).tolist()
        return {
            "id": id_of(request, "score"),
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [{"index": i, "object": "score", "score": value} for i, value in enumerate(scores)],
            "usage": usage,
        }

    return await answer(request, context, inputs, write)


async def rerank(request: Request) -> Response:
    """Documents by how well they answer a query, the best first.

    A document is text or an object with `text`; `top_n` keeps the best, `return_documents` (on) repeats their texts.
    """
    context = ServerContext.of(request)
    context.check_task("score", "embed")
    body, size_bytes = await read_json(request)
    wanted, documents = parse_rerank(body)
    model = context.check_model(wanted.model)
    pairs = [(wanted.query, document) for document in documents]
    work = partial(_encode, context, pairs, wanted.truncate_prompt_tokens, wanted.instruction)
    inputs, scores_of = await context.run_text(work, size_bytes=size_bytes)

    def write(rows: Rows, usage: Usage) -> dict[str, Any]:
        scores = scores_of(rows)
        results = []
        for index in np.argsort(-scores, kind="stable")[: wanted.top_n].tolist():
            result: dict[str, Any] = {"index": index, "relevance_score": float(scores[index])}
            if wanted.return_documents:
                result["document"] = {"text": documents[index]}
            results.append(result)
        return {"id": id_of(request, "rerank"), "model": model, "results": results, "usage": usage}

    return await answer(request, context, inputs, write)


def _encode(
    context: ServerContext, pairs: list[Pair], truncate: int | None, instruction: str | None
) -> tuple[list[PoolingInput], Callable[[Rows], Rows]]:
    """(inputs, from their rows to a score a pair). An embedding model reads each different text once."""
    encoder = context.input_encoder
    if context.facts.task == "score":
        activation = context.pooling.activation
        inputs = encoder.encode_pairs(pairs, truncate=truncate, instruction=instruction)
        return inputs, lambda rows: activate(rows, activation)[:, 0]
    if instruction is not None:
        raise RequestError("instruction: this model takes none", "instruction")
    numbers: dict[str, int] = {}
    for pair in pairs:
        for text in pair:
            numbers.setdefault(text, len(numbers))
    first, second = ([numbers[pair[side]] for pair in pairs] for side in (0, 1))
    inputs = encoder.encode(list(numbers), truncate=truncate, param="documents")
    return inputs, lambda rows: similarities(rows[first], rows[second])


ROUTES = [
    Route("/score", score, methods=["POST"]),
    Route("/v1/score", score, methods=["POST"]),
    Route("/rerank", rerank, methods=["POST"]),
    Route("/v1/rerank", rerank, methods=["POST"]),
    Route("/v2/rerank", rerank, methods=["POST"]),
]
