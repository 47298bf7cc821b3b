"""What the server prints: progress in logs, addresses, a curl line that a shell reads as meant."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys

import httpx
import pytest

from octavo import logs
from octavo.server.console import LoadProgress, base_url, curl_line


def test_logs_get_one_line_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    progress = LoadProgress()
    for stage, fraction in (("weights", 0.0), ("weights", 0.5), ("plan\n8 blocks", 1.0), ("memory", 0.0)):
        progress(stage, fraction)
    progress.close()
    assert capsys.readouterr().err == "loading: weights\nplan\n8 blocks\nloading: memory\n"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("octavo.example", "http://octavo.example:8000"),
    ],
)
def test_addresses(host: str, url: str) -> None:
    assert base_url(host, 8000) == url


@pytest.mark.parametrize(
    ("route", "path", "field"),
    [
        ("chat", "/v1/chat/completions", "messages"),
        ("generate", "/v1/completions", "prompt"),
        ("embed", "/v1/embeddings", "input"),
        ("score", "/rerank", "documents"),
        ("classify", "/classify", "input"),
    ],
)
def test_curl_line(route: str, path: str, field: str) -> None:
    words = shlex.split(curl_line("http://h:1", "it's", route=route, needs_key=True))
    assert words[0] == "curl"
    assert words[1] == f"http://h:1{path}"
    assert "Authorization: Bearer $OCTAVO_API_KEY" in words
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "it's"
    assert field in body


@pytest.mark.parametrize("kind", logs.FORMATS)
def test_a_log_that_can_not_be_written_ends_nothing(kind: str) -> None:
    """Every line fails: of the console, and of the log."""
    code = f"""
import logging
from octavo import logs
from octavo import logs
from octavo.server.console import say
logs.configure("INFO", {kind!r})
say("one\\ntwo")
logging.getLogger("octavo").info("three")
print("still here")
"""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=full, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "still here\n")


async def test_a_server_without_standard_streams(free_tcp_port: int) -> None:
    words = [sys.executable, "-m", "octavo", "serve", "--model", "fake", "--runner", "fake", "--max-model-len", "256"]
    command = shlex.join([*words, "--port", str(free_tcp_port)])
    server = subprocess.Popen(f"exec {command} 0<&- 1>&- 2>&-", shell=True)
    url = f"http://127.0.0.1:{free_tcp_port}/v1/completions"
    try:
        async with httpx.AsyncClient() as client:
            answer = None
            while answer is None or answer.status_code == 503:
                assert server.poll() is None
                with contextlib.suppress(httpx.ConnectError):
                    answer = await client.post(url, json={"prompt": [1], "max_tokens": 3})
        assert answer.status_code == 200
        server.terminate()
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.wait()
