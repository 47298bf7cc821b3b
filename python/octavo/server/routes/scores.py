"""POST /rerank and /score: how well texts go together.

By the model's task: a cross-encoder or a yes/no reranker reads both texts at once; an embedding model's score is the
cosine of the two vectors.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.pooling.answers import Rows
from octavo.pooling.work import Work, score_work
from octavo.server.body import read_json
from octavo.server.context import ServerContext
from octavo.server.pooling_call import Usage, answer, id_of
from octavo.server.schema.pooling import RerankRequest, ScoreRequest, parse_rerank, parse_score


async def score(request: Request) -> Response:
    """A score for each pair of texts: text_1 and text_2, or queries and documents."""
    context = ServerContext.of(request)
    context.check_task("score", "embed")
    body, size_bytes = await read_json(request)
    wanted, pairs = parse_score(body)
    model = context.check_model(wanted.model)
    work = partial(_work, context, wanted, pairs)
    inputs, scores_of = await context.admit_text(work, size_bytes=size_bytes)

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
    work = partial(_work, context, wanted, pairs)
    inputs, scores_of = await context.admit_text(work, size_bytes=size_bytes)

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


def _work(context: ServerContext, wanted: ScoreRequest | RerankRequest, pairs: list[tuple[str, str]]) -> Work[Rows]:
    return score_work(
        context.facts,
        context.input_encoder,
        pairs,
        truncate=wanted.truncate_prompt_tokens,
        instruction=wanted.instruction,
    )


ROUTES = [
    Route("/score", score, methods=["POST"]),
    Route("/v1/score", score, methods=["POST"]),
    Route("/rerank", rerank, methods=["POST"]),
    Route("/v1/rerank", rerank, methods=["POST"]),
    Route("/v2/rerank", rerank, methods=["POST"]),
]
