"""Octavo: runs and serves large language models. The names below load on first use; `import octavo` stays light."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.llm import LLM
    from octavo.protocol import CompletionOutput, RequestOutput
    from octavo.sampling_params import SamplingParams

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "octavo.llm",
    "AsyncLLM": "octavo.async_llm",
    "SamplingParams": "octavo.sampling_params",
    "RequestOutput": "octavo.protocol",
    "CompletionOutput": "octavo.protocol",
}


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "__version__":
        return import_module("octavo._core").__version__
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
