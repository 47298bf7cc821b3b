"""The form that a turn's text must have: calls that are required or strict, and the constraint of the request.

A constraint holds for the answer, after reasoning. Calls under `required` or a named function are written by a grammar
in the model's own format; under `auto` so are those of strict tools. Not here: how a format writes calls (tools/), what
a grammar is made of (structural.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from octavo.errors import RequestError
from octavo.server.dialect import Dialect, Stage
from octavo.server.events import ToolName, TurnRequest
from octavo.server.parts import Parser
from octavo.server.reasoning.base import ReasoningFormat
from octavo.server.structural import Form, either, free, pattern, schema, sequence, text
from octavo.server.tools.base import Tools
from octavo.server.tools.format import ToolFormat
from octavo.server.tools.mixed import when_called
from octavo.server.tools.shape import CallShape
from octavo.server.tools.table import DEFAULT, tool_format
from octavo.server.turn_prompt import offered_tools
from octavo.structured_outputs import PARAM, StructuredOutputs

_GAP = pattern(r"\n{0,2}")


class TurnForm:
    """What a turn's text must look like.

    Attributes:
        must_call: The answer is calls and nothing else.
    """

    def __init__(self, request: TurnRequest, dialect: Dialect) -> None:
        choice = request.tool_choice
        self.must_call = choice == "required" or isinstance(choice, ToolName)
        self._request = request
        self._reasoning = dialect.reasoning
        self._tools = Tools(offered_tools(request), must_call=self.must_call)
        self._format: ToolFormat | None = dialect.tools if self._tools.functions else None
        self._shape: CallShape | None = dialect.shape if self._format is not None else None
        if self._shape is not None and self.must_call and self._shape.unwritable(self._tools) is not None:
            self._format = tool_format(DEFAULT)
            self._shape = self._format.shapes[0]

    @property
    def make_parser(self) -> Callable[[], Parser] | None:
        """Makes a parser of calls; None when none are wanted."""
        found = self._format
        return None if found is None else lambda: found.parser(self._tools)

    def outputs(self, stage: Stage) -> StructuredOutputs | None:
        """The constraint for an answer that begins in a stage."""
        given = self._request.params.structured_outputs
        assert given is None or isinstance(given, StructuredOutputs), "SamplingParams makes it so"
        if self.must_call and self._shape is not None:
            return self._staged(self._required(self._shape), stage, None)
        if given is None:
            return self._strict(stage)
        form = form_of(given)
        if given.start_after is not None or form is None:
            return given
        if self._reasoning is not None and self._reasoning.answer:
            form = sequence(text(self._reasoning.answer), form)
        if self._shape is not None and (given.json is not None or given.json_object):
            form = either(form, self._required(self._shape))
        elif stage == "answers" and not (self._reasoning is not None and self._reasoning.answer):
            return given
        return self._staged(form, stage, given)

    def blame(self, error: RequestError) -> RequestError:
        """An error of the engine in the words of the request: a grammar that was made of tools is the tools' fault."""
        if error.param != PARAM or self._request.params.structured_outputs is not None:
            return error
        return RequestError(f"tools: {error}", param="tools", code=error.code)

    def _required(self, shape: CallShape) -> Form:
        choice = self._request.tool_choice
        named = isinstance(choice, ToolName)
        names = [choice.name] if isinstance(choice, ToolName) else list(self._tools.functions)
        return shape.required(self._tools, names, only_one=named or not self._request.parallel_tool_calls)

    def _strict(self, stage: Stage) -> StructuredOutputs | None:
        """Free text in which calls of strict tools are right."""
        is_strict = any(function.get("strict") for function in self._tools.functions.values())
        if not is_strict or self._shape is None:
            return None
        name = self._shape.unwritable(self._tools)
        if name is not None:
            message = f"tools: {name!r} is no name in the format that the model writes calls in; leave out strict"
            raise RequestError(message, param="tools")
        opens = self._reasoning.opens if self._reasoning is not None and stage == "may_think" else ()
        only_one = not self._request.parallel_tool_calls
        form = when_called(self._shape, self._tools, only_one=only_one, not_before=opens)
        if self._shape.instead:
            return self._staged(form, stage, None)
        return self._staged(form, "thinks" if stage == "thinks" else "answers", None)

    def _staged(self, form: Form, stage: Stage, options: StructuredOutputs | None) -> StructuredOutputs:
        """The form after reasoning."""
        reasoning = self._reasoning
        if stage == "may_think" and reasoning is not None:
            form = sequence(either(sequence(free(reasoning.opens[0], reasoning.close), _GAP), text("")), form)
        outputs = StructuredOutputs(
            structural_tag={"type": "structural_tag", "format": form},
            start_after=reasoning.close if stage == "thinks" and reasoning is not None else None,
        )
        if options is None:  # calls, whose arguments models write on one line
            return replace(outputs, whitespace_pattern="[ ]")
        return replace(
            outputs,
            disable_any_whitespace=options.disable_any_whitespace,
            whitespace_pattern=options.whitespace_pattern,
            disable_additional_properties=options.disable_additional_properties,
        )


def end_of_reasoning(reasoning: ReasoningFormat, form: TurnForm) -> str:
    """What ends reasoning, so that what must follow follows."""
    return reasoning.close if form.must_call and reasoning.answer else reasoning.end


def form_of(given: StructuredOutputs) -> Form | None:
    """A constraint as part of a structural tag; None for the older form of tags."""
    if given.json is not None and given.json is not False:
        value = json.loads(given.json) if isinstance(given.json, str) else given.json
        return schema({} if value is True else value)
    if given.json_object:
        return schema({"type": "object"})
    if given.regex is not None:
        return pattern(given.regex)
    if given.choice is not None:
        return either(*map(text, given.choice))
    if given.grammar is not None:
        return {"type": "grammar", "grammar": given.grammar}
    tag: Any = json.loads(given.structural_tag) if isinstance(given.structural_tag, str) else given.structural_tag
    found = tag.get("format") if isinstance(tag, Mapping) else None
    return found if isinstance(found, Mapping) else None
