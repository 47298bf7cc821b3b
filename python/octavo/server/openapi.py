"""The OpenAPI document, made from what handlers read: route tables, dataclasses of bodies, docstrings.

`BODIES` has one line for every route that reads a body; a test walks the routes and probes the handlers with it.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.routing import Route

import octavo
from octavo.sampling_params import SamplingParams
from octavo.server.schema import messages, responses
from octavo.server.schema.admin import AbortRequest, DrainRequest, NoRequest, SettingsRequest
from octavo.server.schema.batches import BatchRequest, UploadForm
from octavo.server.schema.chat import ChatRequest
from octavo.server.schema.completions import CompletionRequest
from octavo.server.schema.pooling import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from octavo.server.schema.sampling import FIELDS
from octavo.server.schema.tokenize import DetokenizeRequest, TokenizeRequest

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Body:
    """What a route reads: a dataclass, and perhaps the sampling fields but for some."""

    cls: type[Any]
    has_sampling: bool = False
    without: Collection[str] = ()
    media_type: str = "application/json"


# (method, path) -> body.
BODIES: Mapping[tuple[str, str], Body] = {
    ("POST", "/v1/chat/completions"): Body(ChatRequest, True),
    ("POST", "/v1/completions"): Body(CompletionRequest, True),
    ("POST", "/v1/messages"): Body(messages.MessagesRequest, True, messages.REFUSED),
    ("POST", "/v1/messages/count_tokens"): Body(messages.CountRequest),
    ("POST", "/v1/responses"): Body(responses.ResponsesRequest, True, responses.REFUSED),
    ("POST", "/v1/responses/input_tokens"): Body(responses.ResponsesRequest, True, responses.REFUSED),
    ("POST", "/v1/responses/{id}/cancel"): Body(NoRequest),
    ("POST", "/v1/files"): Body(UploadForm, media_type="multipart/form-data"),
    ("POST", "/v1/batches"): Body(BatchRequest),
    ("POST", "/v1/batches/{id}/cancel"): Body(NoRequest),
    ("POST", "/v1/embeddings"): Body(EmbeddingRequest),
    **{("POST", path): Body(RerankRequest) for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
    **{("POST", path): Body(ScoreRequest) for path in ("/score", "/v1/score")},
    **{("POST", path): Body(ClassifyRequest) for path in ("/classify", "/v1/classify")},
    ("POST", "/tokenize"): Body(TokenizeRequest),
    ("POST", "/detokenize"): Body(DetokenizeRequest),
    ("POST", "/admin/abort"): Body(AbortRequest),
    ("POST", "/admin/drain"): Body(DrainRequest),
    ("POST", "/admin/keys/reload"): Body(NoRequest),
    ("POST", "/admin/resume"): Body(NoRequest),
    ("POST", "/admin/prefix_cache/reset"): Body(NoRequest),
    ("POST", "/admin/profile/start"): Body(NoRequest),
    ("POST", "/admin/profile/stop"): Body(NoRequest),
    ("PATCH", "/admin/settings"): Body(SettingsRequest),
}
ERRORS = {
    "400": "The request is invalid; `error.param` names the field.",
    "401": "The key is wrong or missing.",
    "404": "There is no such model, route or object.",
    "413": "The body is too large.",
    "429": "The queue or a limit of the tenant is full; see Retry-After.",
    "503": "The server loads, drains or restarts its engine; see Retry-After.",
}
_SCALARS = {bool: "boolean", int: "integer", float: "number", str: "string"}


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """The document of these routes."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(route, path, method)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": octavo.__version__},
        "paths": paths,
        "components": {
            "schemas": {"Error": _error_schema()},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"bearer": []}, {"key": []}, {}],
    }


def _operation(route: Route, path: str, method: str) -> dict[str, Any]:
    text = inspect.getdoc(route.endpoint) or ""
    summary, _, more = text.partition("\n\n")
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    answers: dict[str, Any] = {"200": {"description": "The answer."}}
    answers |= {status: {"description": meaning, "content": error} for status, meaning in ERRORS.items()}
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}_{re.sub(r'[^a-zA-Z0-9]+', '_', path).strip('_')}",
        "summary": " ".join(summary.split()),
        "responses": answers,
    }
    if more:
        operation["description"] = more
    names = re.findall(r"\{(\w+)\}", path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    body = BODIES.get((method, route.path))
    if body is not None:
        content = {body.media_type: {"schema": body_schema(body)}}
        operation["requestBody"] = {"required": body.cls is not NoRequest, "content": content}
    return operation


def body_schema(body: Body) -> Schema:
    """The JSON schema of a body."""
    schema = _object(body.cls)
    if body.has_sampling:
        hints = {**typing.get_type_hints(SamplingParams), "stop": str | list[str]}
        for name in FIELDS:
            if name not in body.without:
                schema["properties"].setdefault(name, _nullable(_schema(hints[name])))
    return schema


def _object(cls: type[Any]) -> Schema:
    hints = typing.get_type_hints(cls)
    required = []
    properties: dict[str, Schema] = {}
    for field in dataclasses.fields(cls):
        is_required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        schema = _schema(hints[field.name])
        properties[field.name] = schema if is_required else _nullable(schema)
        if is_required:
            required.append(field.name)
    schema = {"type": "object", "properties": properties}
    return {**schema, "required": required} if required else schema


def _nullable(schema: Schema) -> Schema:
    """null means "not given"."""
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return {**schema, "type": [kinds, "null"]}
    return {"anyOf": [*schema["anyOf"], {"type": "null"}]} if "anyOf" in schema else schema


def _schema(hint: Any) -> Schema:
    """The schema of a type hint; the same kinds as schema/parse.py reads."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    if origin in (types.UnionType, typing.Union):
        members = [_schema(member) for member in arguments if member is not type(None)]
        return members[0] if len(members) == 1 else {"anyOf": members}
    if origin in (list, Sequence):
        return {"type": "array", "items": _schema(arguments[0])}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _schema(arguments[1]) or True}
    assert isinstance(hint, type), hint
    assert dataclasses.is_dataclass(hint), hint
    return _object(hint)


def _error_schema() -> Schema:
    text = {"type": ["string", "null"]}
    error = {"message": {"type": "string"}, "type": {"type": "string"}, "param": text, "code": text}
    return {"type": "object", "properties": {"error": {"type": "object", "properties": error}}}
