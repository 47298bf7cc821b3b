"""How much a turn thinks: counts reasoning tokens, and ends reasoning whose budget is spent.

The end is not sampled but written: the request is closed and goes on as another one, whose prompt is what there is so
far and the text that ends reasoning. Its blocks are in the prefix cache, so that costs about one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.sampling_params import SamplingParams
from octavo.server.choice import ChoiceReader
from octavo.server.dialect import Stage
from octavo.server.events import TurnRequest
from octavo.server.prompt import Prompt
from octavo.server.turn_form import TurnForm, end_of_reasoning

if TYPE_CHECKING:
    from octavo.server.context import ServerContext


class Thinking:
    """The reasoning of a turn's choices.

    Attributes:
        stage: Where the answer begins.
        is_bounded: There is a budget to keep.
        end_text: What ends reasoning.
        num_tokens: Reasoning tokens so far, of all choices.
        num_forced_tokens: Tokens of end texts that were written.
    """

    def __init__(self, context: ServerContext, request: TurnRequest, form: TurnForm, prompt: list[int]) -> None:
        tokenizer, reasoning = context.llm.tokenizer, context.dialect.reasoning
        self.stage: Stage = context.dialect.stage(tokenizer, prompt)
        self.num_tokens = 0
        self.num_forced_tokens = 0
        self._budget = request.thinking_budget
        self.is_bounded = self._budget is not None and reasoning is not None and tokenizer is not None
        self.end_text = end_of_reasoning(reasoning, form) if reasoning is not None else ""
        self._end_ids: list[int] = []
        if self.is_bounded and tokenizer is not None:
            self._end_ids = tokenizer.encode(self.end_text, False)
        self._prompt = prompt
        self._max_model_len = context.facts.max_model_len
        self._spent = [0] * request.params.n
        self._written: list[list[int]] = [[] for _ in range(request.params.n)]

    def begin(self, readers: Sequence[ChoiceReader]) -> list[int]:
        """The prompt to submit: with nothing to spend, reasoning that it began ends in it."""
        if not self.is_bounded or self._budget != 0 or self.stage != "thinks":
            return self._prompt
        for reader in readers:
            reader.feed(self.end_text)
        self.stage = "answers"
        return self._prompt + self._end_ids

    def count(self, choice: int, token_ids: Sequence[int], reader: ChoiceReader) -> None:
        """New tokens of a choice, before its reader gets their text."""
        if reader.thinks:
            self.num_tokens += len(token_ids)
            self._spent[choice] += len(token_ids)
        if self.is_bounded:
            self._written[choice] += token_ids

    def is_spent(self, choice: int, reader: ChoiceReader) -> bool:
        """Whether reasoning that goes on has to end."""
        return self.is_bounded and reader.thinks and self._spent[choice] >= (self._budget or 0)

    def go_on(self, choice: int, params: SamplingParams) -> tuple[Prompt, SamplingParams] | None:
        """The request that goes on after the end of reasoning; None when there is no room left."""
        written = self._written[choice]
        written += self._end_ids
        self.num_forced_tokens += len(self._end_ids)
        ids = self._prompt + written
        left = None if params.max_tokens is None else params.max_tokens - len(written)
        if len(ids) >= self._max_model_len or (left is not None and left < 1):
            return None
        least = max(0, params.min_tokens - len(written))
        return Prompt(ids, None, choice), replace(params, n=1, max_tokens=left, min_tokens=least, prompt_logprobs=None)
