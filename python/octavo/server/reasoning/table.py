"""The formats of reasoning by name, and which one a model writes."""

from __future__ import annotations

from importlib import import_module

from octavo.server.reasoning.base import ReasoningFormat

# Name -> where the format is. The order matters: the first one with evidence in a model's template is chosen.
REASONING_FORMATS: dict[str, str] = {
    "openai_gptoss": "octavo.server.reasoning.harmony:FORMAT",
    "mistral": "octavo.server.reasoning.tags:MISTRAL",
    "granite": "octavo.server.reasoning.granite:FORMAT",
    "qwen3": "octavo.server.reasoning.tags:THINK",
    "glm45": "octavo.server.reasoning.tags:THINK",
    "deepseek_r1": "octavo.server.reasoning.tags:DEEPSEEK_R1",
}


def reasoning_format(name: str) -> ReasoningFormat:
    """A format by its name, which is one of `REASONING_FORMATS`."""
    module, _, attribute = REASONING_FORMATS[name].partition(":")
    found = getattr(import_module(module), attribute)
    assert isinstance(found, ReasoningFormat)
    return found


def choose_reasoning_format(template: str) -> str | None:
    """The name of the format that a chat template shows; None when the model does not reason."""
    for name in REASONING_FORMATS:
        for group in reasoning_format(name).evidence:
            if all(text in template for text in group):
                return name
    return None
