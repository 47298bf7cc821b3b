"""An assistant's turn: encodes the conversation, runs it, and tells what the model says as `TurnEvent`s.

Every API shape (chat completions, Responses, Messages) stands on this. Not here: the prompt (turn_prompt.py), how
reasoning and calls are told from text (choice.py with reasoning/ and tools/), and how events are written (routes).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from octavo.errors import RequestError
from octavo.multimodal.placed import NO_MEDIA, PlacedMedia
from octavo.sampling_params import SamplingParams
from octavo.server.choice import ChoiceReader
from octavo.server.chunks import Piece, merge
from octavo.server.dialect import Stage
from octavo.server.events import (
    ContentDelta,
    ReasoningDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallStart,
    TurnEnd,
    TurnEvent,
    TurnMessage,
    TurnRequest,
)
from octavo.server.generation import Generation
from octavo.server.logprobs import Row
from octavo.server.prompt import Prompt
from octavo.server.stop_strings import StopStrings
from octavo.server.tenants import caller
from octavo.server.thinking import Thinking
from octavo.server.token_texts import TokenTexts
from octavo.server.tools.base import call_id
from octavo.server.turn_form import TurnForm
from octavo.server.turn_prompt import encode_prompt

if TYPE_CHECKING:
    from octavo.server.context import ServerContext


class Turn:
    """One request for a turn, submitted on construction; iterate `events` once, and `close` always.

    `start` is the usual way to make one.
    """

    def __init__(
        self,
        context: ServerContext,
        request: TurnRequest,
        token_ids: list[int],
        media: PlacedMedia = NO_MEDIA,
        *,
        goes_on: bool = False,
    ) -> None:
        self.request = request
        self.prompt_rows: list[Row] = []
        """Log probabilities of the prompt's tokens but the first, once the first output has come; when asked for."""
        self._dialect = context.dialect
        self._tokenizer = context.llm.tokenizer
        self._plain = request.params.logprobs is None and not request.return_token_ids
        self._num_tokens = [0] * request.params.n
        self._num_dropped = 0
        self._num_prompt_tokens = len(token_ids)
        self._num_cached_tokens: int | None = None
        self._form = TurnForm(request, context.dialect)
        self._thinking = Thinking(context, request, self._form, token_ids)
        self._media = media
        self._readers = self._make_readers()
        self._texts = {choice: self._token_texts() for choice in range(request.params.n) if self._ends_alone}
        prompt = Prompt(self._thinking.begin(self._readers), None, media=media)
        prompts, params = [prompt], self._engine_params(self._thinking.stage)
        if params.n > 1 and self._ends_alone:
            prompts = [replace(prompt, first_choice=choice) for choice in range(params.n)]
            params = replace(params, n=1)
        self.generation = Generation(
            context, prompts, params, priority=request.priority, cache_salt=request.cache_salt, goes_on=goes_on
        )

    @classmethod
    async def start(
        cls, context: ServerContext, request: TurnRequest, *, size_bytes: int, goes_on: bool = False
    ) -> Turn:
        """Encode the messages (in a thread when `size_bytes`, the body's size, says that it takes long) and submit.

        Args:
            goes_on: It goes on with work that was admitted before: a server that drains takes it.

        Raises:
            RequestError: The messages, the tools or the parameters don't fit the model; nothing was submitted.
            UnavailableError: The server drains.
            OverloadError: The queue is full; nothing was encoded.
        """
        if not goes_on:
            context.overload.check(caller.current(), size_bytes)
        token_ids, media = await encode_prompt(context, request, size_bytes=size_bytes)
        fitted = _fitted(request, context.facts.max_model_len - len(token_ids))
        return cls(context, fitted, token_ids, media, goes_on=goes_on)

    def _make_readers(self) -> list[ChoiceReader]:
        """What reads each choice; empty when its text is content as it is."""
        request, dialect = self.request, self._dialect
        make_parser = self._form.make_parser
        if dialect.reasoning is None and make_parser is None:
            return []
        make_id = dialect.tools.make_id if dialect.tools is not None else call_id
        params = request.params

        def reader(number: int) -> ChoiceReader:
            stop = StopStrings(params.stop, keep=params.include_stop_str_in_output) if params.stop else None
            return ChoiceReader(
                number,
                reasoning=dialect.reasoning.parser(self._thinking.stage == "thinks") if dialect.reasoning else None,
                tools=make_parser() if make_parser is not None else None,
                make_id=make_id,
                stop=stop,
                shows_reasoning=request.include_reasoning,
                one_call=not request.parallel_tool_calls,
            )

        return [reader(number) for number in range(params.n)]

    def _token_texts(self) -> TokenTexts:
        """For a stream that begins."""
        tokenizer = self._tokenizer
        assert tokenizer is not None, "text is parsed, so it was tokenized"
        skips = self.request.params.skip_special_tokens and not self._dialect.keeps_special
        return TokenTexts(tokenizer, tokenizer.special_token_ids() if skips else ())

    @property
    def _ends_alone(self) -> bool:
        """Whether a choice may be ended or continued from here, so that each needs a stream of its own."""
        if not self._readers:
            return False
        return bool(self.request.params.stop) or not self.request.parallel_tool_calls or self._thinking.is_bounded

    def _engine_params(self, stage: Stage) -> SamplingParams:
        """The request's parameters for text that begins in a stage, without what is done here."""
        params = self.request.params
        if not self._readers:
            return params
        outputs = self._form.outputs(stage)
        if outputs is not params.structured_outputs:
            params = replace(params, structured_outputs=outputs)
        keeps_special = self._dialect.keeps_special
        return replace(params, stop=(), skip_special_tokens=params.skip_special_tokens and not keeps_special)

    @property
    def num_choices(self) -> int:
        return self.request.params.n

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object, for what has come so far."""
        made = self.generation.num_output_tokens - self._num_dropped
        completion = made + self._thinking.num_forced_tokens
        usage = {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._num_prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens or 0},
        }
        if self._dialect.reasoning is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self._thinking.num_tokens}
        return usage

    async def events(self) -> AsyncIterator[list[TurnEvent]]:
        """What the turn brings, as it comes: lists that are never empty. Ends after every choice's `TurnEnd`."""
        n, readers = self.generation.n, self._readers
        joins = self._plain and not self._thinking.is_bounded
        try:
            async for prompt, deltas in self.generation.batches():
                events: list[TurnEvent] = []
                pieces = merge(deltas, joins) if len(deltas) > 1 else deltas
                for at, piece in enumerate(pieces):
                    if not readers:
                        self._pass_on(piece, events)
                    elif not self._read_parts(prompt * n + piece.index, piece, events):
                        self._drop(pieces[at + 1 :])
                        break
                if events:
                    yield events
        except RequestError as error:
            raise self._form.blame(error) from None

    def _pass_on(self, delta: Piece, events: list[TurnEvent]) -> None:
        """A delta whose text is content."""
        choice = delta.index
        if self._plain:
            if delta.text:
                events.append(ContentDelta(choice, delta.text))
        elif delta.text or delta.token_ids:
            events.append(ContentDelta(choice, delta.text, delta.logprobs, self._shown_ids(delta)))
        self._note_prompt(delta)
        if delta.finish_reason is not None:
            events.append(TurnEnd(choice, delta.finish_reason, delta.stop_reason))

    def _read_parts(self, choice: int, piece: Piece, events: list[TurnEvent]) -> bool:
        """`_read` a piece, token by token where it may be ended at any of them."""
        texts = self._texts.get(choice)
        parts = [piece] if texts is None else texts.split(piece)
        for at, part in enumerate(parts):
            if not self._read(choice, part, events):
                self._drop(parts[at + 1 :])
                return False
        return True

    def _drop(self, pieces: Sequence[Piece]) -> None:
        """What came behind the end of a stream was not asked for."""
        self._num_dropped += sum(len(piece.token_ids) for piece in pieces)

    def _read(self, choice: int, delta: Piece, events: list[TurnEvent]) -> bool:
        """A delta whose text is parsed; False when its stream was ended or replaced: nothing after it counts."""
        reader = self._readers[choice]
        self._note_prompt(delta)
        self._num_tokens[choice] += len(delta.token_ids)
        self._thinking.count(choice, delta.token_ids, reader)
        counts = self._num_tokens[choice] >= self.request.params.min_tokens
        found = reader.feed(self._text_of(delta), stops_count=counts)
        if not self._plain and delta.token_ids:
            _attach(found, choice, delta.logprobs, self._shown_ids(delta))
        events += found
        if delta.finish_reason is not None:
            events += self._end(choice, delta.finish_reason, delta.stop_reason)
        elif reader.is_over:
            self.generation.end(choice)
            events += self._end(choice, "stop", None)
            return False
        elif self._thinking.is_spent(choice, reader):
            events += self._end_thinking(choice, reader)
            return False
        return True

    def _note_prompt(self, delta: Piece) -> None:
        """What a choice's first delta says of the prompt."""
        if delta.prompt_logprobs is not None:
            self.prompt_rows = delta.prompt_logprobs
        if self._num_cached_tokens is None:
            self._num_cached_tokens = delta.num_cached_tokens

    def _text_of(self, delta: Piece) -> str:
        """The text, without those special tokens that are no marks."""
        text, hidden = delta.text, self._dialect.hidden
        if self._dialect.keeps_special and self.request.params.skip_special_tokens:
            for token_id in delta.token_ids:
                if token_id in hidden:
                    text = text.replace(hidden[token_id], "")
        return text

    def _shown_ids(self, delta: Piece) -> Sequence[int]:
        return delta.token_ids if self.request.return_token_ids else ()

    def _end(self, choice: int, reason: str, stop_reason: int | str | None) -> list[TurnEvent]:
        """A choice has ended, by the engine or here."""
        reader = self._readers[choice]
        events = reader.finish(cut=reason != "stop" and not reader.is_over)
        if reader.is_over:
            reason, stop_reason = "stop", reader.stop_reason
        if reason == "stop" and reader.num_calls:
            reason = "tool_calls"
        return [*events, TurnEnd(choice, reason, stop_reason)]

    def _end_thinking(self, choice: int, reader: ChoiceReader) -> list[TurnEvent]:
        """The budget of a choice's reasoning is spent: the end of reasoning is written for the model, which goes on."""
        events = reader.feed(self._thinking.end_text)
        further = self._thinking.go_on(choice, self._engine_params("answers"))
        if further is None:
            self.generation.end(choice)
            return [*events, *reader.finish(cut=True), TurnEnd(choice, "length")]
        prompt, params = further
        self._texts[choice] = self._token_texts()
        self.generation.replace(choice, replace(prompt, media=self._media), params)
        return events

    def close(self) -> None:
        """Abort what still runs."""
        self.generation.close()


def _attach(events: list[TurnEvent], choice: int, rows: list[Row] | None, token_ids: Sequence[int]) -> None:
    """Put a delta's log probabilities and ids on its last content, or on content without text."""
    last = next((event for event in reversed(events) if isinstance(event, ContentDelta)), None)
    if last is None:
        events.append(ContentDelta(choice, "", rows, token_ids))
    else:
        last.rows, last.token_ids = rows, token_ids


async def prompt_token_ids(context: ServerContext, request: TurnRequest, *, size_bytes: int) -> list[int]:
    """The prompt that a turn would submit. `RequestError` when the messages or the tools don't fit the model."""
    return (await encode_prompt(context, request, size_bytes=size_bytes))[0]


def _fitted(request: TurnRequest, room: int) -> TurnRequest:
    """With `fit_context`, no more new tokens than there is room for."""
    params = request.params
    if request.fit_context and params.max_tokens is not None and max(params.min_tokens, 1) <= room < params.max_tokens:
        return replace(request, params=replace(params, max_tokens=room))
    return request


async def collect(turn: Turn) -> list[TurnMessage]:
    """Wait for the end of the turn: its choices in one piece each."""
    messages = [TurnMessage() for _ in range(turn.num_choices)]
    async for events in turn.events():
        for event in events:
            _add(messages[event.choice], event)
    return messages


def _add(message: TurnMessage, event: TurnEvent) -> None:
    if isinstance(event, ContentDelta):
        message.content += event.text
        message.rows += event.rows or ()
        message.token_ids += event.token_ids
    elif isinstance(event, ReasoningDelta):
        message.reasoning += event.text
    elif isinstance(event, ToolCallStart):
        message.tool_calls.append(ToolCall(event.id, event.name, ""))
    elif isinstance(event, ToolCallDelta):
        message.tool_calls[event.call].arguments += event.arguments
    else:
        message.finish_reason, message.stop_reason = event.finish_reason, event.stop_reason
