"""Random bodies of POST /v1/batches and forms of POST /v1/files: a 4xx in OpenAI's words, never a 5xx."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeLLM
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.config import ServerConfig
from octavo.server.app import make_app

SETTINGS = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
WORDS = st.sampled_from(["24h", "0h", "file-1", "/v1/completions", "/v1/files", "created_at", "anchor", "seconds", "é"])
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), WORDS, st.text(max_size=6))
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=6
)
FIELDS = ("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after")
BODIES = st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, WORDS | VALUES))
FORMS = st.dictionaries(
    st.sampled_from(["purpose", "expires_after[anchor]", "expires_after[seconds]", "other"]),
    st.sampled_from(["batch", "created_at", "3600", "-1", "1" * 30, ""]) | st.text(max_size=5),
)


@pytest.fixture
async def batching(llm: FakeLLM, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = make_app(llm, ServerConfig(batch_dir=str(tmp_path)))  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
        yield client
    app.state.batches.close()
    app.state.context.close()


@SETTINGS
@given(body=BODIES)
async def test_batches(batching: httpx.AsyncClient, body: dict[str, Any]) -> None:
    headers = {"content-type": "application/json"}
    answer = await batching.post("/v1/batches", content=json.dumps(body), headers=headers)
    assert answer.status_code == 400, (answer.text, body)
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@SETTINGS
@given(form=FORMS, raw=st.none() | st.binary(max_size=60))
async def test_uploads(batching: httpx.AsyncClient, form: dict[str, str], raw: bytes | None) -> None:
    if raw is None:
        answer = await batching.post("/v1/files", data=form, files={"file": ("a", b"x")})
    else:
        headers = {"content-type": "multipart/form-data; boundary=x"}
        answer = await batching.post("/v1/files", content=b"--x\r\n" + raw, headers=headers)
    assert answer.status_code in (200, 400), answer.text
