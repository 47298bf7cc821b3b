"""No way around the keys of a real server: every spelling of a path, every method, Host or header; and reloading."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from serving import ServerProcess, fake_model

FILE = '[tenants.one]\nkeys = ["{key}"]\n'


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text(FILE.format(key="first"))
    return file


@pytest.fixture(scope="module")
def server(model_folder: Path, keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    model = fake_model(model_folder, tmp_path_factory.mktemp("model"))
    flags = ("--served-model-name", "tiny", "--api-keys-file", str(keys))
    with ServerProcess("--model", str(model), "--runner", "fake", *flags) as server:
        server.wait_ready()
        yield server


def raw(url: str, head: str, body: bytes = b"") -> bytes:
    """The answer to a request that is sent as it is."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), 10) as connection:
        length = f"Content-Length: {len(body)}\r\n" if body else ""
        connection.sendall(f"{head}\r\n{length}Connection: close\r\n\r\n".encode("latin-1") + body)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


PATHS = (
    *("/v1/models", "//v1/models", "/v1//models", "/v1/models/", "/V1/MODELS", "/v1/models?x=/health", "/v1%2fmodels"),
    *("/%76%31/models", "/health/../v1/models", "/health/%2e%2e/v1/models", "/health%2f..%2fv1%2fmodels", "/health;/x"),
    *("/./v1/models", "/v1/models%00", "/v1/models%20", "/v1/models#/health", "http://x/v1/models", "/health//"),
    *(
        "/healthz",
        "/HEALTH",
        "/metrics",
        "/version",
        "/ready/",
        "/health/",
        "/openapi.json",
        "/tokenize",
        "/",
        "/admin",
    ),
)


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE", "PATCH", "TRACE"])
def test_no_spelling_gets_around_the_keys(server: ServerProcess, method: str) -> None:
    for path in PATHS:
        answer = raw(server.url, f"{method} {path} HTTP/1.1\r\nHost: localhost")
        assert answer.split(b" ", 2)[1] in (b"401", b"400"), (path, answer[:200])
        assert b'"tiny"' not in answer


@pytest.mark.parametrize(
    "header",
    [
        *("Host: health", "X-Forwarded-For: 127.0.0.1", "X-Original-URL: /health", "X-Rewrite-URL: /health"),
        *("X-HTTP-Method-Override: GET", "Authorization: Bearer", "Authorization: Basic first", "Authorization: first"),
        *("X-Api-Key: First", "Authorization: Bearer first,first", "Api-Key: first", "Cookie: key=first"),
        *("Authorization: Bearer wrong\r\nX-Api-Key: wrong", "X-Forwarded-Prefix: /health"),
    ],
)
def test_no_header_gets_around_the_keys(server: ServerProcess, header: str) -> None:
    host = "" if header.startswith("Host") else "Host: x\r\n"
    for line in ("GET /v1/models HTTP/1.1", "POST /v1/completions HTTP/1.1"):
        answer = raw(server.url, f"{line}\r\n{host}{header}", b'{"prompt": "x"}')
        assert answer.split(b" ", 2)[1] == b"401", answer[:200]


def test_what_is_open(server: ServerProcess) -> None:
    for path in ("/health", "/ready"):
        assert raw(server.url, f"GET {path} HTTP/1.1\r\nHost: x").split(b" ", 2)[1] == b"200"


def test_a_key_opens(server: ServerProcess) -> None:
    for header in ("Authorization: Bearer first", "authorization: bearer first", "X-API-Key: first"):
        answer = raw(server.url, f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{header}", b'{"prompt": "x"}')
        assert answer.split(b" ", 2)[1] == b"200", answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["model"] == "tiny"


def test_sighup_reads_the_keys_again(server: ServerProcess, keys: Path) -> None:
    assert server.process.stderr is not None

    def hang_up(text: str, said: str) -> None:
        keys.write_text(text)
        server.process.send_signal(signal.SIGHUP)
        assert server.process.stderr is not None
        while said not in (line := server.process.stderr.readline()):
            assert line

    def status(key: str) -> int:
        return httpx.get(f"{server.url}/v1/models", headers={"x-api-key": key}).status_code

    hang_up("nonsense", "stay as they were")
    assert status("first") == 200
    hang_up(FILE.format(key="second"), "keys of 1 tenants were read")
    assert (status("first"), status("second")) == (401, 200)
    hang_up(FILE.format(key="first"), "keys of 1 tenants were read")
