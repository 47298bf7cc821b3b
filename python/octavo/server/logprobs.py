"""Log probabilities in the shapes of the API: chat (`content[]` with bytes), completions (parallel lists), and the
mapping that `prompt_logprobs` uses. JSON has no infinity: a masked token shows as `LOWEST`.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from octavo._core import Tokenizer

Row = tuple[int, list[tuple[int, float]]]
"""(rank, [(token id, log probability), …] with the token itself first)."""

LOWEST = -9999.0


def finite(value: float) -> float:
    """A number that JSON can hold."""
    return value if value > LOWEST else LOWEST


class TokenNames:
    """How single tokens are written in answers; remembers what it has looked up."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self.special = frozenset(tokenizer.special_token_ids() if tokenizer is not None else ())

    def bytes_of(self, token_id: int) -> bytes:
        """The token's bytes; half characters included."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._tokenizer.token_bytes(token_id) if self._tokenizer is not None else b""
            self._bytes[token_id] = found
        return found

    def text_of(self, token_id: int) -> str:
        """The token's text; bytes that are no text show as U+FFFD."""
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def key_of(self, token_id: int) -> str:
        """A name that differs between tokens: half characters are written as "bytes:\\xe2\\x80"."""
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        raw = self.bytes_of(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_entries(names: TokenNames, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """`choices[].logprobs.content` of chat answers."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = names.bytes_of(token_id)
        return {"token": names.text_of(token_id), "logprob": finite(logprob), "bytes": list(raw)}

    return [
        {**entry(*ranked[0]), "top_logprobs": [entry(token_id, logprob) for token_id, logprob in ranked[1:]]}
        for _, ranked in rows
    ]


class CompletionLogprobs:
    """`choices[].logprobs` of completions, built along the text; `take` empties it (for chunks)."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def _add(self, token_id: int, logprob: float | None, top: dict[str, float] | None) -> None:
        self._tokens.append(self._names.key_of(token_id))
        self._logprobs.append(logprob)
        self._top.append(top)
        self._offsets.append(self._offset)
        if token_id not in self._names.special:  # those are not part of the text
            self._offset += len(self._decoder.decode(self._names.bytes_of(token_id)))

    def add_unscored(self, token_id: int) -> None:
        """The first token of an echoed prompt: nothing predicts it."""
        self._add(token_id, None, None)

    def add(self, rows: Sequence[Row], *, num_top: int) -> None:
        """Tokens with their rows; `num_top` 0 leaves top_logprobs null."""
        for _, ranked in rows:
            token_id, logprob = ranked[0]
            top = {self._names.key_of(i): finite(p) for i, p in (*ranked[1:], ranked[0])} if num_top else None
            self._add(token_id, finite(logprob), top)

    def take(self) -> dict[str, Any]:
        """What was added since the last call."""
        out = {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._top,
            "text_offset": self._offsets,
        }
        self._clear()
        return out


def prompt_mappings(names: TokenNames, rows: Sequence[Row]) -> list[dict[str, dict[str, Any]] | None]:
    """`prompt_logprobs`: null for the first token, then id -> {logprob, rank, decoded_token}."""
    out: list[dict[str, dict[str, Any]] | None] = [None]
    for rank, ranked in rows:
        mapping: dict[str, dict[str, Any]] = {}
        for place, (token_id, logprob) in enumerate(ranked):
            mapping.setdefault(
                str(token_id),
                {
                    "logprob": finite(logprob),
                    "rank": place or rank,
                    "decoded_token": names.text_of(token_id),
                },
            )
        out.append(mapping)
    return out
