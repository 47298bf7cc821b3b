"""POST /classify: labels of texts, or a reward model's number."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.pooling.answers import Rows, activate
from octavo.server.body import read_json
from octavo.server.context import ServerContext
from octavo.server.pooling_call import Usage, answer, id_of
from octavo.server.schema.pooling import ClassifyRequest, input_list
from octavo.server.schema.unknown import parse_body


async def classify(request: Request) -> Response:
    """The probabilities of the model's labels for each text; `use_activation: false` gives the logits."""
    context = ServerContext.of(request)
    context.check_task("classify", "score")
    body, size_bytes = await read_json(request)
    wanted = parse_body(ClassifyRequest, body)
    model = context.check_model(wanted.model)
    work = partial(context.input_encoder.encode, truncate=wanted.truncate_prompt_tokens)
    inputs = await context.admit_text(work, input_list(wanted.input), size_bytes=size_bytes)
    pooling = context.pooling

    def write(rows: Rows, usage: Usage) -> dict[str, Any]:
        shown = activate(rows, pooling.activation) if wanted.use_activation else rows
        data = [
            {"index": i, "label": pooling.labels[int(row.argmax())], "probs": row.tolist(), "num_classes": len(row)}
            for i, row in enumerate(shown)
        ]
        answer_id = id_of(request, "classify")
        head = {"id": answer_id, "object": "list", "created": int(time.time()), "model": model}
        return {**head, "data": data, "usage": usage}

    return await answer(request, context, inputs, write)


ROUTES = [Route("/classify", classify, methods=["POST"]), Route("/v1/classify", classify, methods=["POST"])]
