"""Client libraries of others against `octavo serve`: LangChain on Responses, LiteLLM on Messages and Responses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import ServerProcess, fake_model

HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def url(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = fake_model(model_folder, tmp_path_factory.mktemp("model"))
    with ServerProcess(str(model), "--runner", "fake", "--served-model-name", "tiny") as server:
        yield server.wait_ready()


def test_langchain_on_responses(url: str) -> None:
    from langchain_openai import ChatOpenAI

    chat: Any = ChatOpenAI(model="tiny", base_url=f"{url}/v1", api_key="k", use_responses_api=True, max_tokens=20)
    whole = chat.invoke([("system", "be brief"), ("user", "hi")])
    assert whole.usage_metadata["output_tokens"] == 20
    assert whole.response_metadata["status"] == "incomplete"
    streamed = list(chat.stream([("system", "be brief"), ("user", "hi")]))
    assert "".join(chunk.text for chunk in streamed) == whole.text
    assert streamed[-1].response_metadata or streamed[-2].response_metadata


def test_litellm_on_messages_and_responses(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it fetches a list of prices
    import litellm

    asked: Any = {"model": "anthropic/tiny", "api_base": url, "api_key": "k", "messages": HI, "max_tokens": 20}
    whole = litellm.completion(**asked)
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 20)
    chunks = list(litellm.completion(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    answer = litellm.responses(model="openai/tiny", api_base=f"{url}/v1", api_key="k", input="hi", max_output_tokens=20)
    assert answer.status == "incomplete"
    assert answer.usage.output_tokens == 20
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**asked, "model": "anthropic/other"})
