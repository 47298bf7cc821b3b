"""The OpenAPI document says what handlers do: every route is in it, and every typed field is checked as it says."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fake_engine import FakeLLM
from starlette.applications import Starlette
from starlette.routing import Route

from octavo.config import ServerConfig
from octavo.server.app import ROUTES, make_admin_app
from octavo.server.openapi import BODIES, body_schema
from octavo.server.routes import admin as admin_routes

HI = [{"role": "user", "content": "hi"}]
# A body that each route takes.
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "x"},
    "/v1/messages": {"messages": HI, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/responses": {"input": "x"},
    "/v1/responses/input_tokens": {"input": "x"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/admin/abort": {"request_id": "x"},
}
WRONG = {"boolean": "yes", "integer": "one", "number": "one", "string": 5, "array": "x", "object": "x"}


@pytest.fixture
def config() -> ServerConfig:
    return ServerConfig(admin_key="root")


async def fetch(app: Starlette, path: str) -> dict[str, Any]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://octavo") as client:
        answer = await client.get(path, headers={"x-api-key": "root"})
    assert answer.status_code == 200
    document: dict[str, Any] = answer.json()
    return document


async def test_every_route_is_in_it(app: Starlette) -> None:
    private = make_admin_app(app.state.context)
    assert private is not None
    public = await fetch(app, "/openapi.json")
    for document, routes in ((public, ROUTES), (await fetch(private, "/admin/openapi.json"), admin_routes.ROUTES)):
        told = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
        for route in routes:
            assert isinstance(route, Route)
            for method in (route.methods or set()) - {"HEAD"}:
                assert (method, route.path.replace(":path", "")) in told
                if method in ("POST", "PATCH", "PUT"):
                    assert (method, route.path) in BODIES, "a line in BODIES says what it reads"
        for item in document["paths"].values():
            for operation in item.values():
                assert operation["summary"], "a handler's docstring is its summary"
    assert not [path for path in public["paths"] if path.startswith("/admin")]


def probes() -> list[tuple[str, str, str, Any]]:
    """(method, path, field, wrong value) of every field with a type."""
    found = []
    for (method, path), body in BODIES.items():
        for name, schema in body_schema(body)["properties"].items():
            kinds = {kind for each in schema.get("anyOf", [schema]) for kind in _kinds(each)} - {"null"}
            value = next((value for kind, value in WRONG.items() if kinds and _is_wrong(value, kinds)), None)
            if value is not None and path in GOOD:
                found.append((method, path, name, value))
    return found


def _kinds(schema: dict[str, Any]) -> list[str]:
    kinds = schema.get("type", [])
    return [kinds] if isinstance(kinds, str) else kinds


def _is_wrong(value: Any, kinds: set[str]) -> bool:
    return not (
        ("string" in kinds and isinstance(value, str))
        or ("number" in kinds and isinstance(value, int))
        or ("integer" in kinds and isinstance(value, int))
    )


async def test_fields_have_the_types_that_it_says(app: Starlette) -> None:
    private = make_admin_app(app.state.context)
    assert private is not None
    assert len(probes()) > 80
    for method, path, name, value in probes():
        target = private if path.startswith("/admin") else app
        transport = httpx.ASGITransport(app=target)
        async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
            body = {**GOOD[path], name: value}
            answer = await client.request(method, path, json=body, headers={"x-api-key": "root"})
        assert answer.status_code == 400, (path, name, value, answer.text)
        error = answer.json()["error"]
        assert error.get("param", name) == name or name in error["message"], (path, name, error)


async def test_required_fields_are_required(client: httpx.AsyncClient) -> None:
    for (method, path), body in BODIES.items():
        is_here = path in GOOD and not path.startswith("/admin")
        for name in body_schema(body).get("required", []) if is_here else []:
            rest = {key: value for key, value in GOOD[path].items() if key != name}
            answer = await client.request(method, path, json=rest)
            assert answer.status_code == 400
            assert name in answer.json()["error"]["message"]


async def test_good_bodies_are_good(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    for path, body in GOOD.items():
        if not path.startswith("/admin"):
            assert (await client.post(path, json=body)).status_code == 200, path
