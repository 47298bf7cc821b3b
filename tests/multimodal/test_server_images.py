"""Images over HTTP, with a tiny LLaVA behind a real server: the three APIs, and every way to be refused."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from tiny_images import picture, saved

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
from serving import ServerProcess

NUM_NEW = 12
GREEDY = {"temperature": 0.0, "max_tokens": NUM_NEW, "ignore_eos": True}


def png(image: Image.Image) -> str:
    """As base64."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def data_url(image: Image.Image) -> str:
    return f"data:image/png;base64,{png(image)}"


def ask(*parts: dict[str, Any]) -> dict[str, Any]:
    """A chat body."""
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}], **GREEDY}


def image_url(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Any, Any]]:
    """(client, reference model, its processor)."""
    folder = tmp_path_factory.mktemp("llava")
    model, processor = saved("llava", folder)
    options = ("--dtype", "float32", "--device", "cpu", "--cpu-threads", "1", "--block-size", "8")
    limits = ("--limit-mm-per-prompt", '{"image": 2}', "--allowed-media-domains", "127.0.0.1")
    with ServerProcess(str(folder), *options, *limits) as server, httpx.Client(timeout=60) as client:
        client.base_url = httpx.URL(server.wait_ready())
        yield client, model, processor


def expected(model: Any, processor: Any, images: list[Image.Image]) -> str:
    """What Transformers answers to `ask` with these images."""
    messages = [{"role": "user", "content": [{"type": "image"}] * len(images) + [{"type": "text", "text": "What?"}]}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = processor(text=[text], images=images, return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None)
    answer: str = processor.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answer


def test_the_three_apis_answer_as_transformers_does(served: tuple[httpx.Client, Any, Any]) -> None:
    client, model, processor = served
    one, two = picture(1), picture(2, (30, 90))
    answers = [expected(model, processor, images) for images in ([one], [two], [one, two])]
    assert len(set(answers)) == 3
    for images, answer in zip(([one], [two], [one, two]), answers, strict=True):
        reply = client.post("/v1/chat/completions", json=ask(*(image_url(data_url(each)) for each in images))).json()
        assert reply["choices"][0]["message"]["content"] == answer
    again = client.post("/v1/chat/completions", json=ask(image_url(data_url(one)))).json()
    assert again["choices"][0]["message"]["content"] == answers[0]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16

    content = [{"type": "input_image", "image_url": data_url(one)}, {"type": "input_text", "text": "What?"}]
    body = {"input": [{"role": "user", "content": content}], "max_output_tokens": NUM_NEW, **GREEDY}
    reply = client.post("/v1/responses", json={key: body[key] for key in body if key != "max_tokens"}).json()
    assert reply["output"][-1]["content"][0]["text"] == answers[0]

    source = {"type": "base64", "media_type": "image/png", "data": png(one)}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
    body = {"model": "", "messages": [{"role": "user", "content": blocks}], **GREEDY}
    reply = client.post("/v1/messages", json=body).json()
    assert reply["content"][0]["text"] == answers[0]
    count = client.post("/v1/messages/count_tokens", json={"messages": body["messages"]}).json()
    assert count["input_tokens"] == again["usage"]["prompt_tokens"]


def bomb() -> str:
    """A small file of 400 million pixels."""
    return data_url(Image.new("1", (20_000, 20_000)))


CHAT = "messages[0].content[0]"
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "corrupt": (
        image_url("data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"x" * 60).decode()),
        "",
        "",
    ),
    "truncated": (image_url(data_url(picture(1))[:-400]), "can't be decoded", f"{CHAT}.image_url.url"),
    "no image": (image_url("data:image/png;base64,aGVsbG8="), "no image", f"{CHAT}.image_url.url"),
    "no base64": (image_url("data:image/png;base64,a*b"), "not base64", f"{CHAT}.image_url.url"),
    "text": (image_url("data:text/plain;base64,aGk="), "not an image", f"{CHAT}.image_url.url"),
    "a bomb": (image_url(bomb()), "--max-image-pixels", f"{CHAT}.image_url.url"),
    "a file": (image_url("file:///etc/passwd"), "not taken", f"{CHAT}.image_url.url"),
    "a private address": (image_url("http://127.0.0.1/a.png"), "public internet", f"{CHAT}.image_url.url"),
    "another host": (image_url("http://example.com/a.png"), "--allowed-media-domains", f"{CHAT}.image_url.url"),
    "no url": ({"type": "image_url"}, "must be a URL", f"{CHAT}.image_url"),
    "audio": ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "input_audio", f"{CHAT}.type"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_image_is_refused(served: tuple[httpx.Client, Any, Any], case: str) -> None:
    client, _, _ = served
    part, message, param = REFUSED[case]
    reply = client.post("/v1/chat/completions", json=ask(part))
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert message in error["message"]
    assert error["param"] == param or not param


def test_too_many_images_are_refused(served: tuple[httpx.Client, Any, Any]) -> None:
    client, _, _ = served
    reply = client.post("/v1/chat/completions", json=ask(*[image_url(data_url(picture(1)))] * 3))
    assert reply.status_code == 400
    assert "--limit-mm-per-prompt" in reply.json()["error"]["message"]


def test_the_image_token_as_text_is_no_image(served: tuple[httpx.Client, Any, Any]) -> None:
    """Typed by a user it is text; as ids of a prompt it is a token like others, and shares nothing with an image."""
    client, _, _ = served
    body = {"messages": [{"role": "user", "content": "a <image> b"}], **GREEDY}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    shown = client.post("/tokenize", json=ask(image_url(data_url(picture(1)))) | {"max_tokens": None}).json()
    body = {"prompt": shown["tokens"], **GREEDY}
    reply = client.post("/v1/completions", json=body).json()
    assert reply["usage"]["prompt_tokens"] == shown["count"]
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] <= 8
