"""/v1/embeddings of the real model: equal to the reference, through the official client, whatever shares the batch."""

from __future__ import annotations

import base64
import shutil
from pathlib import Path

import httpx
import numpy as np
import pytest
from openai import BadRequestError, OpenAI

from octavo import LLM
from tests.pooling.conftest import Reference
from tests.server.serving import ServerProcess

TEXTS = [
    "What is an octavo?",
    "A sheet folded into eight leaves.",
    "naïve café — 東京 🙂",
    "word " * 200,
    "x",
]


@pytest.fixture(scope="module")
def client(minilm_server: ServerProcess) -> OpenAI:
    return OpenAI(base_url=f"{minilm_server.url}/v1", api_key="none", max_retries=0)


def test_equal_to_the_reference(client: OpenAI, reference: Reference) -> None:
    """The client asks for base64 by itself."""
    answer = client.embeddings.create(model="minilm", input=TEXTS)
    rows = np.array([each.embedding for each in answer.data], np.float32)
    assert [each.index for each in answer.data] == list(range(len(TEXTS)))
    np.testing.assert_allclose(rows, reference(TEXTS), atol=1e-4)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 200


def test_equal_to_sentence_transformers(client: OpenAI, minilm_folder: Path) -> None:
    """Texts of all lengths up to the model's, in one call and one by one."""
    from sentence_transformers import SentenceTransformer  # seconds

    model = SentenceTransformer(str(minilm_folder), device="cpu")
    texts = [text for text in TEXTS if text]
    expected = model.encode(texts, normalize_embeddings=True)
    answer = client.embeddings.create(model="minilm", input=texts)
    rows = np.array([each.embedding for each in answer.data], np.float32)
    np.testing.assert_allclose(rows, expected, atol=1e-4)
    alone = client.embeddings.create(model="minilm", input=texts[0]).data[0].embedding
    np.testing.assert_allclose(np.array(alone, np.float32), expected[0], atol=1e-4)
    assert not np.allclose(expected[0], expected[1], atol=1e-2)


def test_a_vocabulary_alone(
    minilm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Reference
) -> None:
    """Older checkpoints have vocab.txt and no tokenizer.json."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("OCTAVO_CACHE", str(cache))
    folder = tmp_path / "old"
    shutil.copytree(minilm_folder, folder, ignore=shutil.ignore_patterns("tokenizer.json"))
    with LLM(str(folder), device="cpu") as llm:
        assert llm.facts.tokenizer_path is not None
        assert Path(llm.facts.tokenizer_path).is_relative_to(cache)
        rows = [each.outputs.embedding for each in llm.embed(TEXTS)]
    np.testing.assert_allclose(rows, reference(TEXTS), atol=1e-4)


def test_float_and_base64_are_the_same(client: OpenAI, minilm_server: ServerProcess) -> None:
    floats = client.embeddings.create(model="minilm", input="one text", encoding_format="float").data[0].embedding
    body = {"model": "minilm", "input": ["one text"], "encoding_format": "base64"}
    packed = httpx.post(f"{minilm_server.url}/v1/embeddings", json=body).json()["data"][0]["embedding"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(packed), "<f4"), floats, atol=1e-6)


def test_token_ids(client: OpenAI, minilm_server: ServerProcess) -> None:
    ids = httpx.post(f"{minilm_server.url}/tokenize", json={"prompt": "one text"}).json()["tokens"]
    rows = [client.embeddings.create(model="minilm", input=each).data[0].embedding for each in ("one text", ids, [ids])]
    np.testing.assert_allclose(rows[1:], [rows[0]] * 2, atol=1e-6)


def test_dimensions(client: OpenAI) -> None:
    whole = np.array(client.embeddings.create(model="minilm", input="cut me").data[0].embedding)
    short = np.array(client.embeddings.create(model="minilm", input="cut me", dimensions=64).data[0].embedding)
    assert short.shape == (64,)
    np.testing.assert_allclose(short, whole[:64] / np.linalg.norm(whole[:64]), atol=1e-5)


def test_truncation_is_asked_for(client: OpenAI, reference: Reference) -> None:
    long = "word " * 400
    with pytest.raises(BadRequestError, match=r"input\[0\] has 402 tokens, the model takes at most 256"):
        client.embeddings.create(model="minilm", input=long)
    cut = client.embeddings.create(model="minilm", input=long, extra_body={"truncate_prompt_tokens": -1})
    assert cut.usage.prompt_tokens == 256
    np.testing.assert_allclose([cut.data[0].embedding], reference(["word " * 254]), atol=1e-4)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "required"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": ""}, "input", "is empty"),
        ({"input": ["a", ""]}, "input", r"input[1] is empty"),
        ({"input": ["a", 1]}, "input", "input"),
        ({"input": {"text": "a"}}, "input", "input"),
        ({"input": [[30522]]}, "input", "within 0 and 30521"),
        ({"input": [[-1]]}, "input", "within 0 and 30521"),
        ({"input": [2**70]}, "input", "within 0 and 30521"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "float, base64"),
        ({"input": "a", "dimensions": 0}, "dimensions", "within 1 and 384"),
        ({"input": "a", "dimensions": 385}, "dimensions", "within 1 and 384"),
        ({"input": "a", "truncate_prompt_tokens": 257}, "truncate_prompt_tokens", "within 1 and 256"),
        ({"input": "a", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens", "no room"),
    ],
)
def test_bad_bodies(minilm_server: ServerProcess, body: dict[str, object], param: str, message: str) -> None:
    answer = httpx.post(f"{minilm_server.url}/v1/embeddings", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_generation_is_refused(minilm_server: ServerProcess, path: str) -> None:
    answer = httpx.post(f"{minilm_server.url}{path}", json={"model": "minilm", "prompt": "x"})
    assert answer.status_code == 400
    assert "minilm is served as one that makes embeddings" in answer.json()["error"]["message"]


def test_classification_is_refused(minilm_server: ServerProcess) -> None:
    answer = httpx.post(f"{minilm_server.url}/classify", json={"input": "x"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "wrong_task"


def test_the_usual_routes(minilm_server: ServerProcess) -> None:
    get = httpx.get
    url = minilm_server.url
    assert get(f"{url}/health").status_code == get(f"{url}/ready").status_code == 200
    card = get(f"{url}/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("minilm", 256)
    before = _metric(url, "octavo:prompt_tokens_total")
    httpx.post(f"{url}/v1/embeddings", json={"input": [[101, 102], [101, 2000, 102]]})
    assert _metric(url, "octavo:prompt_tokens_total") == before + 5


def _metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))
