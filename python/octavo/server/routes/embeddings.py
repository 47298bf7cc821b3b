"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.pooling.answers import Rows
from octavo.pooling.work import shortened
from octavo.server.body import read_json
from octavo.server.context import ServerContext
from octavo.server.pooling_call import Usage, answer
from octavo.server.schema.pooling import EmbeddingRequest, input_list, parse_embedding


async def embeddings(request: Request) -> Response:
    """A vector for each text.

    `input` is text, token ids, or a list of either. `dimensions` keeps the first numbers of each vector and makes it of
    length 1 again.
    """
    context = ServerContext.of(request)
    context.check_task("embed")
    body, size_bytes = await read_json(request)
    wanted = parse_embedding(body, context.pooling.num_outputs)
    model = context.check_model(wanted.model)
    work = partial(context.input_encoder.encode, truncate=wanted.truncate_prompt_tokens)
    inputs = await context.admit_text(work, input_list(wanted.input), size_bytes=size_bytes)

    def write(rows: Rows, usage: Usage) -> dict[str, Any]:
        return {"object": "list", "data": _data(wanted, rows), "model": model, "usage": usage}

    return await answer(request, context, inputs, write)


def _data(wanted: EmbeddingRequest, rows_nd: Rows) -> list[dict[str, Any]]:
    rows_nd = shortened(rows_nd, wanted.dimensions)
    if wanted.encoding_format == "base64":
        little = np.ascontiguousarray(rows_nd, "<f4")
        vectors: list[Any] = [base64.b64encode(row.tobytes()).decode() for row in little]
    else:
        vectors = rows_nd.tolist()
    return [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]


ROUTES = [Route("/v1/embeddings", embeddings, methods=["POST"])]
