"""--allowed-origins: which web pages' scripts may call the API, as browsers ask (CORS, of the Fetch standard)."""

from __future__ import annotations

from collections.abc import Mapping

import httpx
import pytest
from fake_engine import FakeLLM

from octavo.config import ServerConfig, make_server_config
from octavo.errors import ConfigError
from octavo.server.app import make_app

PAGE = "https://chat.example.com"
ASKS = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}
CALL = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


async def answer(
    llm: FakeLLM, config: ServerConfig, method: str, headers: Mapping[str, str], body: object = None
) -> httpx.Response:
    app = make_app(llm, config)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
        return await client.request(method, CALL, headers=headers, json=body)


@pytest.mark.parametrize("origins", [[PAGE, "http://localhost:3000"], ["*"]])
async def test_a_page_may_call(llm: FakeLLM, origins: list[str]) -> None:
    """Asked without a key, called with one; what the gate refuses can be read by the page too."""
    config = ServerConfig(allowed_origins=origins, api_key=["k"])
    asked = await answer(llm, config, "OPTIONS", ASKS)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-headers"] == ASKS["Access-Control-Request-Headers"]
    assert "POST" in asked.headers["access-control-allow-methods"]
    key = {"Authorization": "Bearer k"}
    called = await answer(llm, config, "POST", {"Origin": PAGE, **key}, {**BODY, "stream": True})
    refused = await answer(llm, config, "POST", {"Origin": PAGE}, BODY)
    assert (called.status_code, refused.status_code) == (200, 401)
    assert called.text.endswith("data: [DONE]\n\n")
    for got in (asked, called, refused):
        assert got.headers["access-control-allow-origin"] == ("*" if origins == ["*"] else PAGE)
        assert "access-control-allow-credentials" not in got.headers


async def test_others_may_not(llm: FakeLLM) -> None:
    for origins in ([], ["https://other.example.com"]):
        config = ServerConfig(allowed_origins=origins)
        asked = await answer(llm, config, "OPTIONS", ASKS)
        assert asked.status_code >= 400
        called = await answer(llm, config, "POST", {"Origin": PAGE}, BODY)
        for got in (asked, called):
            assert "access-control-allow-origin" not in got.headers


@pytest.mark.parametrize("origin", ["chat.example.com", f"{PAGE}/", "https://*.example.com", "https://a b", ""])
def test_what_is_no_origin_is_named(origin: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-origins"):
        make_server_config({"allowed_origins": [origin]})


def test_origins() -> None:
    given = [
        "*",
        PAGE,
        "http://127.0.0.1:3000",
        "http://[::1]:80",
        "null",
        "chrome-extension://abc",
        "app://obsidian.md",
    ]
    assert make_server_config({"allowed_origins": given}).allowed_origins == given
