"""/rerank, /score and /classify over HTTP: a tiny cross-encoder, and the real embedding model by cosine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from octavo import LLM
from octavo.config import ServerConfig
from octavo.server.app import make_app
from tests.pooling.conftest import Reference
from tests.pooling.tiny_models import save
from tests.server.fake_engine import FakeLLM
from tests.server.serving import ServerProcess

DOCUMENTS = ["w1 w2", "w3", "w4 w5 w6 w7", "w1 w8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cross-encoder")
    save(made, "BertForSequenceClassification", "BertConfig", num_labels=1)
    return made


@pytest.fixture(scope="module")
def scores(folder: Path) -> list[float]:
    with LLM(str(folder), device="cpu") as llm:
        return [each.score for each in llm.score("w1 w2", DOCUMENTS)]


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with ServerProcess(str(folder), "--device", "cpu", "--served-model-name", "tiny") as server:
        yield server.wait_ready()


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(url: str, scores: list[float], path: str) -> None:
    documents: list[Any] = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, *DOCUMENTS[2:]]
    answer = httpx.post(f"{url}{path}", json={"model": "tiny", "query": "w1 w2", "documents": documents}).json()
    order = sorted(range(4), key=lambda i: -scores[i])
    assert [each["index"] for each in answer["results"]] == order
    np.testing.assert_allclose(
        [each["relevance_score"] for each in answer["results"]], [scores[i] for i in order], atol=1e-6
    )
    assert [each["document"]["text"] for each in answer["results"]] == [DOCUMENTS[i] for i in order]
    best = {"query": "w1 w2", "documents": documents, "top_n": 2, "return_documents": False}
    answer = httpx.post(f"{url}{path}", json=best).json()
    assert [list(each) for each in answer["results"]] == [["index", "relevance_score"]] * 2
    assert answer["usage"]["total_tokens"] > 0


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_score(url: str, scores: list[float], path: str, names: tuple[str, str]) -> None:
    for first in ("w1 w2", ["w1 w2"], ["w1 w2"] * 4):
        answer = httpx.post(f"{url}{path}", json={names[0]: first, names[1]: DOCUMENTS}).json()
        np.testing.assert_allclose([each["score"] for each in answer["data"]], scores, atol=1e-6)


def test_classify(url: str) -> None:
    answer = httpx.post(f"{url}/classify", json={"input": ["w1", "w2 w3"]}).json()
    raw = httpx.post(f"{url}/classify", json={"input": ["w1", "w2 w3"], "use_activation": False}).json()
    logits = np.array([each["probs"][0] for each in raw["data"]])
    np.testing.assert_allclose([each["probs"][0] for each in answer["data"]], 1 / (1 + np.exp(-logits)), atol=1e-6)
    assert [(each["label"], each["num_classes"]) for each in answer["data"]] == [("LABEL_0", 1)] * 2


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/rerank", {"documents": ["w1"]}, "query"),
        ("/rerank", {"query": "w1", "documents": []}, "documents"),
        ("/rerank", {"query": "w1", "documents": [{"title": "x"}]}, "documents"),
        ("/rerank", {"query": "w1", "documents": ["w1 " * 70]}, "documents"),
        ("/rerank", {"query": "w1", "documents": ["w1"], "top_n": 0}, "top_n"),
        ("/rerank", {"query": "w1", "documents": ["w1"], "instruction": "x"}, "instruction"),
        ("/rerank", {"query": "w1", "documents": ["w1"], "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ("/score", {"text_1": "w1"}, "text_2"),
        ("/score", {}, "queries"),
        ("/score", {"text_1": ["w1", "w2"], "text_2": ["w1", "w2", "w3"]}, "text_1"),
        ("/classify", {"input": []}, "input"),
        ("/v1/embeddings", {"input": "w1"}, "model"),
    ],
)
def test_bad_bodies(url: str, path: str, body: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{url}{path}", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert httpx.post(f"{url}/rerank", json={"query": "w1", "documents": ["w1"]}).status_code == 200


def test_embedding_models_rank_by_cosine(minilm_server: ServerProcess, reference: Reference) -> None:
    documents = ["A flute in C.", "A sheet folded into eight leaves makes an octavo.", "It rains."]
    body = {"query": "What is an octavo?", "documents": documents}
    answer = httpx.post(f"{minilm_server.url}/rerank", json=body).json()
    rows = reference([str(body["query"]), *documents])
    cosines = rows[1:] @ rows[0]
    assert answer["results"][0]["index"] == 1
    got = {each["index"]: each["relevance_score"] for each in answer["results"]}
    np.testing.assert_allclose([got[i] for i in range(3)], cosines, atol=1e-4)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/classify"])
async def test_generators_refuse(path: str) -> None:
    llm = FakeLLM(None, None)
    transport = httpx.ASGITransport(make_app(llm, ServerConfig()))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
        answer = await client.post(path, json={"input": "x"})
    assert answer.status_code == 400
    assert "is served as one that generates text (--task generate)" in answer.json()["error"]["message"]
