"""gpt-oss: calls are messages to a recipient. All kinds of its messages are read by reasoning/harmony.py, which this
format uses; with `--reasoning-parser openai_gptoss` (the default for such models) they have been read before."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.server.parts import Parser
from octavo.server.reasoning.harmony import CHANNEL, CONSTRAIN, MARKS, MESSAGE, START, HarmonyMessages
from octavo.server.structural import ANY_TEXT, Form, either, free, sequence, text
from octavo.server.tools.base import Tools
from octavo.server.tools.format import ToolFormat
from octavo.server.tools.shape import CallShape


def _parser(tools: Tools) -> Parser:
    return HarmonyMessages()


def _answer(calls: Sequence[Form]) -> Form:
    """Reasoning and a preamble, if the model likes, then a call or the answer."""
    last = either(*calls, sequence(text(f"{CHANNEL}final{MESSAGE}"), ANY_TEXT))
    before = [free(f"{CHANNEL}{name}{MESSAGE}", f"<|end|>{START}assistant") for name in ("analysis", "commentary")]
    return sequence(*(either(message, text("")) for message in before), last)


SHAPE = CallShape(
    begin=f"{CHANNEL}commentary to=functions.NAME {CONSTRAIN}json{MESSAGE}", one_call=True, answer=_answer
)
FORMAT = ToolFormat(parser=_parser, marks=MARKS, shapes=(SHAPE,), evidence=((CHANNEL, MESSAGE),))
