"""How the served model writes reasoning and calls: found out once, from the server's options, the model's chat template
and its tokenizer. Not here: the formats themselves (tools/, reasoning/)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from octavo._core import Tokenizer
from octavo.chat_template import ChatTemplate
from octavo.config import ServerConfig
from octavo.server.reasoning.base import ReasoningFormat
from octavo.server.reasoning.table import choose_reasoning_format, reasoning_format
from octavo.server.tools.format import ToolFormat
from octavo.server.tools.shape import CallShape
from octavo.server.tools.table import DEFAULT, choose_tool_format, tool_format

# A prompt's last ids that are looked at for an open reasoning tag.
_PROMPT_END = 16


Stage = Literal["thinks", "may_think", "answers"]
"""Where a text begins: inside reasoning, where reasoning may come, or where it can't come any more."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """What the model writes.

    Attributes:
        tools: None when the server does not parse calls.
        reasoning: None when the model does not reason.
        shape: How calls are written; None when they are not parsed.
        shows_tools: The chat template tells the model about tools; else the server must.
        hidden: Special tokens (id: text) that are no marks of the formats: they are taken out of text.
        keeps_special: Marks of the formats are special tokens, so text must be made with special tokens in it.
    """

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    shape: CallShape | None = None
    shows_tools: bool = True
    hidden: dict[int, str] = field(default_factory=dict)
    keeps_special: bool = False

    @classmethod
    def of(cls, config: ServerConfig, template: ChatTemplate, tokenizer: Tokenizer | None) -> Dialect:
        """The dialect of a model."""
        source = template.all_source
        tools_name = _chosen(config.tool_call_parser, choose_tool_format(source))
        if config.tool_call_parser == "auto" and tools_name == DEFAULT and tokenizer is not None:
            tools_name = _by_tokens(tokenizer) or tools_name
        reasoning_name = _chosen(config.reasoning_parser, choose_reasoning_format(source))
        tools = tool_format(tools_name) if tools_name else None
        reasoning = reasoning_format(reasoning_name) if reasoning_name else None
        marks = {*(tools.marks if tools else ()), *(reasoning.marks if reasoning else ())}
        special = {i: tokenizer.id_to_token(i) or "" for i in tokenizer.special_token_ids()} if tokenizer else {}
        return cls(
            tools,
            reasoning,
            tools.shape(_Vocabulary(tokenizer).__contains__) if tools else None,
            shows_tools="tools" in source,
            hidden={i: text for i, text in special.items() if text not in marks},
            keeps_special=not marks.isdisjoint(special.values()),
        )

    def stage(self, tokenizer: Tokenizer | None, prompt: list[int]) -> Stage:
        """Where the answer to a prompt begins."""
        if self.reasoning is None or tokenizer is None:
            return "answers"
        end = tokenizer.decode(prompt[-_PROMPT_END:], False)
        if self.reasoning.starts_in_reasoning(end):
            return "thinks"
        return "answers" if self.reasoning.is_over(end) else "may_think"


class _Vocabulary:
    """The texts that a model has tokens for."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def __contains__(self, text: str) -> bool:
        return self._tokenizer is not None and self._tokenizer.token_to_id(text) is not None


def _chosen(option: str, found: str | None) -> str | None:
    return found if option == "auto" else None if option == "none" else option


def _by_tokens(tokenizer: Tokenizer) -> str | None:
    """A format whose opening mark the model has a token for, when its template shows none."""
    marks = {"[TOOL_CALLS]": "mistral", "<｜tool▁calls▁begin｜>": "deepseek_v31", "<tool_call>": "hermes"}
    return next((name for mark, name in marks.items() if mark in _Vocabulary(tokenizer)), None)


def effort_options(effort: str | None) -> dict[str, Any]:
    """What chat templates are told of a reasoning effort; their words for it differ."""
    if effort is None:
        return {}
    thinks = effort != "none"
    word = {"none": "low", "minimal": "low", "xhigh": "high"}.get(effort, effort)
    return {"reasoning_effort": word, "enable_thinking": thinks, "thinking": thinks}
