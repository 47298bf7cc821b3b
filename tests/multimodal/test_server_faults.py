"""What goes wrong around images costs the request that it happens to: a processor's process that hangs or is killed, a
client that leaves, an engine that is killed. Other requests are answered meanwhile.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_server_images import ask, data_url, image_url
from tiny_images import picture, saved

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
from serving import ServerProcess

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, int]]:
    """(client, the server's process)."""
    folder = tmp_path_factory.mktemp("llava")
    saved("llava", folder)
    options = ("--dtype", "float32", "--device", "cpu", "--cpu-threads", "1", "--block-size", "8")
    with ServerProcess(str(folder), *options) as server, httpx.Client(timeout=90) as client:
        client.base_url = httpx.URL(server.wait_ready())
        yield client, server.process.pid


def children(pid: int) -> dict[int, str]:
    """Processes below one, and their command lines."""
    found: dict[int, str] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found[int(child)] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            found |= children(int(child))
    return found


def processor_of(pid: int) -> int:
    return next(child for child, line in children(pid).items() if "octavo.multimodal.process" in line)


def text(words: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": words}], "max_tokens": 4, "temperature": 0.0}


def test_a_killed_processor_costs_its_request_only(served: tuple[httpx.Client, int]) -> None:
    client, pid = served
    known = client.post(CHAT, json=ask(image_url(data_url(picture(1))))).json()
    processor = processor_of(pid)
    os.kill(processor, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(client.post, CHAT, json=ask(image_url(data_url(picture(2)))))
        assert client.post(CHAT, json=text("others go on")).status_code == 200
        os.kill(processor, signal.SIGKILL)
        reply = waiting.result()
    assert reply.status_code == 400
    assert "can't be processed" in reply.json()["error"]["message"]
    again = client.post(CHAT, json=ask(image_url(data_url(picture(1))))).json()
    assert again["choices"] == known["choices"]
    assert processor_of(pid) != processor


def test_a_client_that_leaves_takes_its_images_along(served: tuple[httpx.Client, int]) -> None:
    client, _ = served
    for seed in range(4):
        body = ask(*[image_url(data_url(picture(20 + seed)))] * 3) | {"max_tokens": 200, "stream": True}
        with client.stream("POST", CHAT, json=body) as reply:
            next(reply.iter_lines())
    assert client.post(CHAT, json=ask(image_url(data_url(picture(30))))).status_code == 200
    lines = client.get("/metrics").text.splitlines()
    running = next(line for line in lines if line.startswith("octavo:num_requests_running"))
    assert float(running.split()[-1]) == 0.0


def test_a_killed_engine_is_replaced_and_reads_images_again(served: tuple[httpx.Client, int]) -> None:
    client, pid = served
    known = client.post(CHAT, json=ask(image_url(data_url(picture(1))))).json()
    engine = next(child for child, line in children(pid).items() if "octavo.engine.process" in line)
    os.kill(engine, signal.SIGKILL)
    question = ask(image_url(data_url(picture(1))))
    while (reply := client.post(CHAT, json=question)).status_code != 200:
        assert reply.status_code == 503, reply.text
    assert reply.json()["choices"] == known["choices"]
