"""Whatever goes wrong on the Messages routes is said in Anthropic's words, by whoever finds it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fake_engine import FakeLLM

from octavo.config import ServerConfig
from octavo.errors import OverloadError
from octavo.server.app import make_app
from octavo.server.errors import ApiError, UnavailableError, error_response, to_api_error

MESSAGES = "/v1/messages"


def client_of(llm: FakeLLM, **config: Any) -> httpx.AsyncClient:
    app = make_app(llm, ServerConfig(**config))  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://octavo")


def check(answer: httpx.Response, status: int, kind: str) -> str:
    """The body is Anthropic's; its message."""
    assert answer.status_code == status
    body = answer.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == kind
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == body["request_id"]
    message = body["error"]["message"]
    assert isinstance(message, str)
    return message


async def test_keys_by_either_header(llm: FakeLLM) -> None:
    client = client_of(llm, api_key=["one", "two"])
    for headers in ({}, {"x-api-key": "three"}, {"x-api-key": ""}, {"authorization": "Basic one"}):
        assert "x-api-key" in check(await client.post(MESSAGES, headers=headers), 401, "authentication_error")
        assert (await client.get("/v1/models", headers=headers)).status_code == 401
    for headers in ({"x-api-key": "one"}, {"authorization": "Bearer two"}, {"x-api-key": "two", "authorization": "x"}):
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


async def test_errors_of_the_router_and_the_gate(llm: FakeLLM) -> None:
    client = client_of(llm, max_body_bytes=1024)
    assert MESSAGES in check(await client.get(MESSAGES + "/nothing"), 404, "not_found_error")
    check(await client.post(MESSAGES + "/count_tokens", content=b"x" * 1025), 413, "request_too_large")


async def test_clients_that_say_their_version_get_the_shape_elsewhere(llm: FakeLLM) -> None:
    client = client_of(llm)
    answer = await client.get("/v1/models/other", headers={"anthropic-version": "2023-06-01"})
    assert "other" in check(answer, 404, "not_found_error")
    assert (await client.get("/v1/models/other")).json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ApiError(400, "m"), 400, "invalid_request_error"),
        (ApiError(415, "m"), 415, "invalid_request_error"),
        (ApiError(403, "m"), 403, "permission_error"),
        (ApiError(429, "m", code="rate_limit_exceeded"), 429, "rate_limit_error"),
        (OverloadError("m", 3), 529, "overloaded_error"),
        (UnavailableError("m"), 503, "overloaded_error"),
        (ZeroDivisionError("m"), 500, "api_error"),
    ],
)
def test_every_status_has_its_type(error: Exception, status: int, kind: str) -> None:
    scope = {"type": "http", "path": MESSAGES, "headers": [], "state": {"request_id": "r"}}
    answer = error_response(to_api_error(error), scope)
    assert answer.status_code == status
    assert b'"type": "%s"' % kind.encode() in answer.body
    assert (b"retry-after" in dict(answer.raw_headers)) == (kind == "overloaded_error")
