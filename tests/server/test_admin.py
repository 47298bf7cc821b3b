"""The operator's routes: on a key of their own, apart from the API; what each of them does, and says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from asgi_call import AsgiCall, events
from fake_engine import FakeDelta, FakeLLM
from starlette.applications import Starlette

from octavo.config import ServerConfig, make_server_config
from octavo.errors import ConfigError
from octavo.server.app import beside, make_admin_app, make_app
from octavo.server.context import ServerContext

KEY = {"authorization": "Bearer admin-key"}


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys.toml"
    file.write_text('[tenants.one]\nkeys = ["key-of-one"]\n')
    return file


@pytest.fixture
def config(keys_file: Path, tmp_path: Path) -> ServerConfig:
    return ServerConfig(
        api_key=["public-key"],
        api_keys_file=str(keys_file),
        admin_key="admin-key",
        profile_dir=str(tmp_path / "traces"),
        otlp_traces_endpoint=None,
    )


@pytest.fixture
def context(app: Starlette) -> ServerContext:
    context = app.state.context
    assert isinstance(context, ServerContext)
    return context


@pytest.fixture
async def admin(app: Starlette, context: ServerContext) -> AsyncIterator[httpx.AsyncClient]:
    private = make_admin_app(context)
    assert private is not None
    both = beside(app, private)
    transport = httpx.ASGITransport(app=both, raise_app_exceptions=False)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo", headers=KEY) as made:
        yield made


async def test_only_the_admin_key_opens_them(admin: httpx.AsyncClient) -> None:
    for key in ("", "Bearer public-key", "Bearer key-of-one", "Bearer x"):
        for path in ("/admin/info", "/admin/nothing", "/admin/"):
            assert (await admin.get(path, headers={"authorization": key})).status_code == 401
    assert (await admin.get("/admin/info")).status_code == 200
    assert (await admin.get("/v1/models")).status_code == 401, "it opens nothing else"


async def test_other_spellings_do_not_exist(admin: httpx.AsyncClient) -> None:
    public = {"x-api-key": "public-key", "authorization": ""}
    for path in ("/Admin/info", "//admin/info", "/v1/../admin/info", "/admin%2Finfo/x", "/admin"):
        answer = await admin.get(path, headers=public)
        assert answer.status_code in (401, 404), path
        assert "engine" not in answer.text


async def test_without_a_key_they_do_not_exist(llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app(llm, ServerConfig())  # type: ignore[arg-type]
    assert make_admin_app(app.state.context) is None
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://octavo") as client:
        assert (await client.get("/admin/info")).status_code == 404
    monkeypatch.setenv("OCTAVO_ADMIN_KEY", "from the environment")
    assert make_admin_app(app.state.context) is not None


async def test_info_has_no_secrets(admin: httpx.AsyncClient) -> None:
    answer = await admin.get("/admin/info")
    for secret in ("public-key", "key-of-one", "admin-key"):
        assert secret not in answer.text
    told = answer.json()
    assert told["server"]["admin_key"] is True
    assert told["model"]["model"] == "tiny"
    assert told["state"] == "ready"


async def test_stats_and_dashboard(admin: httpx.AsyncClient) -> None:
    assert (await admin.get("/admin/stats")).json()["prefix_hit_tokens"] == 16
    assert (await admin.get("/admin/dashboard")).json()["title"] == "Octavo"


def hold(llm: FakeLLM) -> asyncio.Event:
    """Calls get one token, and the rest after the event."""
    gate = asyncio.Event()
    llm.script = lambda request: [
        [FakeDelta(text="a", token_ids=[97])],
        gate,
        [FakeDelta(text="b", token_ids=[98], finish_reason="stop")],
    ]
    return gate


def start(app: Starlette, request_id: str, **body: Any) -> AsgiCall:
    headers = [(b"x-api-key", b"key-of-one"), (b"x-request-id", request_id.encode())]
    return AsgiCall(app, "/v1/completions", {"prompt": "x", **body}, headers)


@pytest.mark.parametrize("given", ["one-call", "cmpl-one-call"])
async def test_abort(admin: httpx.AsyncClient, app: Starlette, llm: FakeLLM, given: str) -> None:
    gate = hold(llm)
    victim = start(app, "one-call", stream=True)
    other = start(app, "another-one", stream=True)
    for call in (victim, other):
        await call.next()
    listed = (await admin.get("/admin/calls")).json()["calls"]
    assert {call["request_id"] for call in listed} == {"one-call", "another-one"}
    assert {call["tenant"] for call in listed} == {"one"}
    answer = await admin.post("/admin/abort", json={"request_id": given})
    assert answer.json() == {"ended": 1}
    assert events(await victim.rest())[-1]["error"]["code"] == "aborted"
    gate.set()
    assert events(await other.rest())[-1] == "[DONE]"
    missing = await admin.post("/admin/abort", json={"request_id": "one-call"})
    assert missing.status_code == 404
    assert (await admin.get("/admin/calls")).json()["calls"] == []


async def test_drain_and_resume(admin: httpx.AsyncClient, app: Starlette, llm: FakeLLM, context: ServerContext) -> None:
    gate = hold(llm)
    call = start(app, "running", stream=True)
    await call.next()
    for body in ({}, {"json": {}}, {"json": {"exit": False}}):
        answer = await admin.post("/admin/drain", **body)  # type: ignore[arg-type]
        assert answer.json() == {"state": "draining", "calls_running": 1}
    assert (await admin.get("/ready")).status_code == 503
    public = {"x-api-key": "public-key", "authorization": ""}
    refused = await admin.post("/v1/completions", json={"prompt": "x"}, headers=public)
    assert refused.status_code == 503
    gate.set()
    assert events(await call.rest())[-1] == "[DONE]"
    assert (await admin.post("/admin/resume")).json() == {"state": "ready"}
    assert (await admin.post("/v1/completions", json={"prompt": "x"}, headers=public)).status_code == 200
    await context.drain(0)
    assert (await admin.post("/admin/resume")).status_code == 409


async def test_settings(admin: httpx.AsyncClient, context: ServerContext, llm: FakeLLM) -> None:
    level = logging.getLogger().level
    try:
        assert (await admin.get("/admin/settings")).json()["log_requests"] is False
        changed = await admin.patch("/admin/settings", json={"log_level": "debug", "log_requests": True})
        assert changed.json()["log_level"] == "debug"
        assert logging.getLogger().level == logging.DEBUG
        assert context.settings.log_requests
        assert llm.calls[-1] == ("set_log_level", {"level": "debug"})
    finally:
        logging.getLogger().setLevel(level)
    for body in ({"port": 1}, {"log_level": "loud"}, {"log_requests": "yes"}, {"drain_timeout_s": -1}):
        refused = await admin.patch("/admin/settings", json=body)
        assert refused.status_code == 400, body
        error = refused.json()["error"]
        assert error["param"] in body
        assert error["message"].startswith(error["param"])
    assert context.settings.drain_timeout_s == 30


async def test_a_folder_that_can_not_be(llm: FakeLLM, tmp_path: Path) -> None:
    """It is told when the profile starts, not when there is one to write."""
    (tmp_path / "file").write_text("x")
    config = ServerConfig(admin_key="root", profile_dir=str(tmp_path / "file" / "traces"))
    app = make_admin_app(make_app(llm, config).state.context)  # type: ignore[arg-type]
    assert app is not None
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://octavo") as client:
        answer = await client.post("/admin/profile/start", headers={"x-api-key": "root"})
    assert answer.status_code == 400
    assert "--profile-dir" in answer.json()["error"]["message"]
    assert llm.calls == []


async def test_prefix_cache_and_profiles(admin: httpx.AsyncClient, llm: FakeLLM, config: ServerConfig) -> None:
    assert (await admin.post("/admin/prefix_cache/reset")).json() == {"complete": True}
    assert (await admin.post("/admin/profile/start")).status_code == 200
    assert (await admin.post("/admin/profile/stop")).status_code == 200
    assert [name for name, _ in llm.calls] == ["reset_prefix_cache", "start_profile", "stop_profile"]
    assert llm.calls[-1][1] == {"folder": config.profile_dir}, "the client has no say in where"
    llm.refuses = "a profile is being recorded already"
    assert (await admin.post("/admin/profile/start")).status_code == 409
    llm.state = "restarting"
    assert (await admin.post("/admin/prefix_cache/reset")).status_code == 503


async def test_tenants_and_reloading(admin: httpx.AsyncClient, keys_file: Path) -> None:
    answer = await admin.get("/admin/tenants")
    assert [tenant["name"] for tenant in answer.json()["tenants"]] == ["default", "one"]
    assert "key-of-one" not in answer.text
    keys_file.write_text('[tenants.one]\nkeys = ["k"]\n[tenants.two]\nkeys = ["l"]\nmax_tokens = 3\n')
    assert (await admin.post("/admin/keys/reload")).json() == {"tenants": 2}
    assert (await admin.get("/admin/tenants")).json()["tenants"][-1]["max_tokens"] == 3
    keys_file.write_text("?")
    assert (await admin.post("/admin/keys/reload")).status_code == 400


@pytest.mark.parametrize("values", [{"log_prompts": True}, {"admin_port": 8000}])
def test_contradictions_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make_server_config(values)
