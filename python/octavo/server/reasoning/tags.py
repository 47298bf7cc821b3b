"""Reasoning between two tags: <think>…</think> (DeepSeek, Qwen, GLM and most others), [THINK]…[/THINK] (Mistral)."""

from __future__ import annotations

from functools import partial

from octavo.server.cursor import Marks, Steps, Trimmed
from octavo.server.parts import Content, Reasoning
from octavo.server.reasoning.base import ReasoningFormat, ReasoningReader


class TaggedReasoning(ReasoningReader):
    """Reads reasoning between `opening` and `closing`.

    A closing tag without reasoning is dropped; more reasoning may come later in the answer.
    """

    def __init__(self, opening: str, closing: str, started: bool) -> None:
        self._opening = opening
        self._marks = Marks((opening, closing))
        super().__init__(started)

    def _run(self) -> Steps[None]:
        emit = self.cursor.emit
        content = Trimmed(lambda text: emit(Content(text)))
        reasoning = Trimmed(lambda text: emit(Reasoning(text)))
        reasoning.drop()
        while mark := (yield from self.cursor.until(self._marks, reasoning if self.thinks else content)):
            was, self.thinks = self.thinks, mark == self._opening
            if was or self.thinks:
                content.drop()
                reasoning.drop()
        reasoning.flush()
        content.flush()


def tagged(
    opening: str, closing: str, evidence: tuple[tuple[str, ...], ...] = (), *, starts: bool = False
) -> ReasoningFormat:
    """The format of two tags."""
    return ReasoningFormat(
        parser=partial(TaggedReasoning, opening, closing),
        opens=(opening,),
        close=closing,
        end=f"\n{closing}\n\n",
        marks=(opening, closing),
        evidence=evidence,
        starts=starts,
    )


THINK = tagged("<think>", "</think>", (("<think>",), ("</think>",)))
# R1 and its distillations may leave the opening tag out, whose older templates don't write it either.
DEEPSEEK_R1 = tagged("<think>", "</think>", starts=True)
MISTRAL = tagged("[THINK]", "[/THINK]", (("[THINK]",),))
