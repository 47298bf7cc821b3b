"""gpt-oss: calls are messages to a recipient. All kinds of its messages are read by reasoning/harmony.py, which this
format uses; with `--reasoning-parser openai_gptoss` (the default for such models) they have been read before."""

from __future__ import annotations

from octavo.server.parts import Parser
from octavo.server.reasoning.harmony import CHANNEL, MARKS, MESSAGE, HarmonyMessages
from octavo.server.tools.base import ToolFormat, Tools


def _parser(tools: Tools) -> Parser:
    return HarmonyMessages()


FORMAT = ToolFormat(parser=_parser, marks=MARKS, evidence=((CHANNEL, MESSAGE),))
