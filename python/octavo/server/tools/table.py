"""The formats of tool calls by name, and which one a model writes."""

from __future__ import annotations

from importlib import import_module

from octavo.server.tools.format import ToolFormat

# Name -> where the format is. The order matters: the first one with evidence in a model's template is chosen.
TOOL_FORMATS: dict[str, str] = {
    "openai": "octavo.server.tools.harmony:FORMAT",
    "deepseek_v3": "octavo.server.tools.deepseek:FORMAT_V3",
    "deepseek_v31": "octavo.server.tools.deepseek:FORMAT_V31",
    "kimi_k2": "octavo.server.tools.kimi_k2:FORMAT",
    "qwen3_coder": "octavo.server.tools.qwen3_coder:FORMAT",
    "glm45": "octavo.server.tools.glm45:FORMAT",
    "mistral": "octavo.server.tools.mistral:FORMAT",
    "phi4_mini_json": "octavo.server.tools.phi4_mini:FORMAT",
    "granite": "octavo.server.tools.granite:FORMAT",
    "hermes": "octavo.server.tools.hermes:FORMAT",
    "pythonic": "octavo.server.tools.pythonic:FORMAT",
    "llama3_json": "octavo.server.tools.llama_json:FORMAT",
    "json": "octavo.server.tools.generic_json:FORMAT",
}
DEFAULT = "json"


def tool_format(name: str) -> ToolFormat:
    """A format by its name, which is one of `TOOL_FORMATS`."""
    module, _, attribute = TOOL_FORMATS[name].partition(":")
    found = getattr(import_module(module), attribute)
    assert isinstance(found, ToolFormat)
    return found


def choose_tool_format(template: str) -> str:
    """The name of the format that a chat template shows; `DEFAULT` when it shows none."""
    for name in TOOL_FORMATS:
        for group in tool_format(name).evidence:
            if all(text in template for text in group):
                return name
    return DEFAULT
