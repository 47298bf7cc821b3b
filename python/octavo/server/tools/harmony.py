"""gpt-oss: calls are messages to a recipient. All kinds of its messages are read by reasoning/harmony.py, which this
format uses; with `--reasoning-parser openai_gptoss` (the default for such models) they have been read before."""

from __future__ import annotations

from octavo.server.parts import Parser
from octavo.server.reasoning.harmony import CHANNEL, CONSTRAIN, MARKS, MESSAGE, HarmonyMessages
from octavo.server.tools.base import Tools
from octavo.server.tools.format import ToolFormat
from octavo.server.tools.shape import CallShape


def _parser(tools: Tools) -> Parser:
    return HarmonyMessages()


SHAPE = CallShape(begin=f"{CHANNEL}commentary to=functions.NAME {CONSTRAIN}json{MESSAGE}", one_call=True)
FORMAT = ToolFormat(parser=_parser, marks=MARKS, shapes=(SHAPE,), evidence=((CHANNEL, MESSAGE),))
