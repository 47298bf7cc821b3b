"""Llama's Python lists: [name(key="value", …), …] as the whole message, or between <|python_start|> and <|python_end|>.

Values are Python literals, and JSON's true, false and null. A call is told when it is whole.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
import warnings
from typing import Any

from octavo.server.cursor import Marks, Steps
from octavo.server.tools.arguments import keyword_arguments
from octavo.server.tools.base import CallReader
from octavo.server.tools.format import ToolFormat
from octavo.server.tools.shape import CallShape

START, END = "<|python_start|>", "<|python_end|>"
NOT_NAME = re.compile(r"[^\w.]")
_STOPS = re.compile(r"""["'()\[\]{}\\]""")
_JSON_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}


class PythonicCalls(CallReader):
    opening = Marks((START,))
    closing = Marks((END,))

    def _run(self) -> Steps[None]:
        self.cursor.record()
        if (yield from self.cursor.blanks()) == "[":
            yield from self._calls("")
        self.give_back(drop_cut=self.tools.must_call)
        yield from super()._run()

    def _calls(self, mark: str) -> Steps[None]:
        cursor = self.cursor
        if (yield from cursor.blanks()) != "[":
            return
        cursor.at += 1
        while True:
            yield from cursor.blanks()
            name = yield from cursor.upto(NOT_NAME)
            if not name or name not in self.tools or (yield from cursor.peek()) != "(":
                return
            source = yield from self._parenthesis()
            arguments = self._arguments(name, source) if source is not None else None
            if arguments is None:
                return
            self.start(name)
            self.arguments(arguments)
            cursor.record()
            following = yield from cursor.blanks()
            if following not in (",", "]") or not following:
                return
            cursor.at += 1
            if following == "]":
                cursor.forget()
                yield from cursor.blanks()
                yield from cursor.one_of(self.closing)
                return

    def _parenthesis(self) -> Steps[str | None]:
        """Read "(…)" by its brackets and quotes; None when it is cut."""
        cursor = self.cursor
        pieces: list[str] = []
        depth, quote = 0, ""
        while True:
            before = yield from cursor.upto(_STOPS)
            if before is None:
                return None
            stop = cursor.text[cursor.at]
            cursor.at += 1
            pieces += (before, stop)
            if stop == "\\":
                pieces.append((yield from cursor.peek()))
                cursor.at += len(pieces[-1])
            elif quote:
                quote = "" if stop == quote else quote
            elif stop in "\"'":
                quote = stop
            else:
                depth += 1 if stop in "([{" else -1
                if depth == 0:
                    return "".join(pieces)

    def _arguments(self, name: str, source: str) -> str | None:
        """JSON of what stands in a call's parentheses; None when that is not a list of literals."""
        try:
            with warnings.catch_warnings(action="ignore"):
                source = "f" + source
                tree = ast.parse(source, mode="eval").body
            if not isinstance(tree, ast.Call):
                return None
            names = list(self.tools.parameters(name).get("properties") or {})
            given = dict(zip(names, (_value(source, node) for node in tree.args), strict=False))
            if len(given) < len(tree.args) or any(each.arg is None for each in tree.keywords):
                return None
            given |= {each.arg: _value(source, each.value) for each in tree.keywords if each.arg is not None}
            return json.dumps(given, ensure_ascii=False, allow_nan=False)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return None


def _value(source: str, node: ast.expr) -> Any:
    """The value of an argument: JSON where it is that (Python knows its escapes otherwise), else Python."""
    try:
        return json.loads(ast.get_source_segment(source, node) or "")
    except (ValueError, RecursionError):
        return _literal(node)


def _literal(node: ast.expr) -> Any:
    """The value of a literal expression; JSON's words count as literals."""

    class Words(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.expr:
            return ast.Constant(_JSON_WORDS[name.id]) if name.id in _JSON_WORDS else name

    return ast.literal_eval(Words().visit(node))


def _is_name(name: str) -> bool:
    """Whether a function or a keyword can have this name."""
    return all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split("."))


FORMAT = ToolFormat(
    parser=PythonicCalls.parser,
    marks=(START, END),
    shapes=(
        CallShape(
            begin="NAME(",
            end=")",
            before="[",
            between=", ",
            after="]",
            trigger=START,
            closing=END,
            instead=r"\[\s*[\w.]+\(",
            arguments=keyword_arguments,
            can_name=_is_name,
        ),
    ),
    evidence=((START,), ("[func_name1(params_name1=",)),
)
