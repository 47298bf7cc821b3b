"""Bodies of the pooling routes: /v1/embeddings, /rerank, /score and /classify."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import RequestError
from octavo.pooling.work import check_dimensions, pair_up
from octavo.server.schema.unknown import parse_body

MAX_INPUTS = 2048
"""Texts (or pairs) of one call, as OpenAI allows."""
FORMATS = ("float", "base64")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """Texts or token ids to be made vectors."""

    model: str | None = None
    input: str | list[int] | list[str | list[int]]
    encoding_format: str = "float"
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyRequest:
    """Texts or token ids to be labelled."""

    model: str | None = None
    input: str | list[int] | list[str | list[int]]
    use_activation: bool = True
    truncate_prompt_tokens: int | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankRequest:
    """Documents to be put in order for a query. A document is text, or an object with `text`."""

    model: str | None = None
    query: str
    documents: list[str | dict[str, Any]]
    top_n: int | None = None
    return_documents: bool = True
    instruction: str | None = None
    truncate_prompt_tokens: int | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """Pairs of texts: one first text for all second ones, or as many of both."""

    model: str | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    instruction: str | None = None
    truncate_prompt_tokens: int | None = None
    user: str | None = None


def parse_embedding(body: Mapping[str, Any], num_dimensions: int) -> EmbeddingRequest:
    """Check a body. `RequestError` names the field at fault."""
    request = parse_body(EmbeddingRequest, body)
    if request.encoding_format not in FORMATS:
        raise RequestError(f"encoding_format must be one of {', '.join(FORMATS)}", "encoding_format")
    if request.dimensions is not None:
        check_dimensions(request.dimensions, num_dimensions)
    return request


def input_list(given: str | list[int] | list[str | list[int]]) -> list[str | list[int]]:
    """The inputs one by one. `RequestError` for none, an empty one, or too many."""
    items: Any = given
    is_one = isinstance(items, str) or (bool(items) and isinstance(items[0], int))
    inputs: list[str | list[int]] = [items] if is_one else list(items)
    if any(isinstance(each, int) for each in inputs):
        raise RequestError("input mixes texts and token ids of one prompt: give a list of either", "input")
    _check_count(len(inputs), "input")
    for number, each in enumerate(inputs):
        if not each:
            raise RequestError(f"input[{number}] is empty" if len(inputs) > 1 else "input is empty", "input")
    return inputs


def parse_rerank(body: Mapping[str, Any]) -> tuple[RerankRequest, list[str]]:
    """(the request, its documents' texts). `RequestError` names the field at fault."""
    request = parse_body(RerankRequest, body)
    _check_count(len(request.documents), "documents")
    if request.top_n is not None and request.top_n < 1:
        raise RequestError("top_n must be at least 1", "top_n")
    return request, [_text_of(each, number) for number, each in enumerate(request.documents)]


def parse_score(body: Mapping[str, Any]) -> tuple[ScoreRequest, list[tuple[str, str]]]:
    """(the request, its pairs). `RequestError` names the field at fault."""
    request = parse_body(ScoreRequest, body)
    names = ("queries", "documents") if request.text_1 is None and request.text_2 is None else ("text_1", "text_2")
    first, second = (_texts(getattr(request, name), name) for name in names)
    return request, pair_up(first, second, names)


def _texts(given: str | list[str] | None, name: str) -> list[str]:
    if given is None:
        raise RequestError(f"{name} is required (text_1 and text_2, or queries and documents)", name)
    texts = [given] if isinstance(given, str) else given
    _check_count(len(texts), name)
    return texts


def _check_count(count: int, name: str) -> None:
    if not count:
        raise RequestError(f"{name} must not be empty", name)
    if count > MAX_INPUTS:
        raise RequestError(f"{name} has {count} entries, at most {MAX_INPUTS} are taken", name)


def _text_of(document: str | dict[str, Any], number: int) -> str:
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise RequestError(f"documents[{number}] must be text or an object with text", "documents")
    return text
