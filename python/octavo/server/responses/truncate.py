"""`truncation: auto`: the oldest turns of a conversation are left out until it fits the context."""

from __future__ import annotations

from dataclasses import replace

from octavo.errors import RequestError
from octavo.server.context import ServerContext
from octavo.server.events import TurnRequest
from octavo.server.turn import prompt_token_ids

SYSTEM = ("system", "developer")


async def drop_oldest(context: ServerContext, request: TurnRequest, *, size_bytes: int) -> TurnRequest:
    """The request with as many of its turns, counted from the last one, as fit beside the tokens to come.

    A turn begins with a message by the user; instructions at the beginning stay. The last turn stays in any case (the
    engine refuses it then, if it is too long). Takes the logarithm of the number of turns in encodings.
    """
    messages = list(request.messages)
    num_system = next((i for i, message in enumerate(messages) if message["role"] not in SYSTEM), len(messages))
    starts = [num_system, *(i for i, m in enumerate(messages) if i > num_system and m["role"] == "user")]
    longest = context.facts.max_model_len - max(1, request.params.max_tokens or 1)

    def from_turn(number: int) -> TurnRequest:
        return replace(request, messages=[*messages[:num_system], *messages[starts[number] :]])

    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        try:
            num_tokens = len(await prompt_token_ids(context, from_turn(middle), size_bytes=size_bytes))
        except RequestError as error:
            if error.code != "context_length_exceeded":
                raise
            num_tokens = longest + 1
        if num_tokens <= longest:
            high = middle
        else:
            low = middle + 1
    return from_turn(low)
