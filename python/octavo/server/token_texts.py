"""Pieces of several tokens (drafts that were right, a client of the engine that lags) as pieces of one.

Budgets of reasoning are counted in tokens, and a stop string ends a sequence at one: what comes of either must not
depend on how tokens happened to come together. Not here: what ends a sequence (turn.py).
"""

from __future__ import annotations

import codecs
from collections.abc import Collection

from octavo._core import Tokenizer
from octavo.server.chunks import PartDelta, Piece


class TokenTexts:
    """Of one sequence, whose pieces come in order.

    Args:
        hidden: Ids of tokens that the text leaves out.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = frozenset(hidden)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def split(self, piece: Piece) -> list[Piece]:
        """The piece as one a token, or as it is where the tokens' own texts don't add up to its text."""
        is_last = piece.finish_reason is not None
        ends = [is_last and at == len(piece.token_ids) - 1 for at in range(len(piece.token_ids))]
        texts = [self._text(token_id, end) for token_id, end in zip(piece.token_ids, ends, strict=True)]
        if len(texts) < 2 or "".join(texts) != piece.text:
            return [piece]
        return [PartDelta(piece, at, text) for at, text in enumerate(texts)]

    def _text(self, token_id: int, is_last: bool) -> str:
        """Whole characters that the token completes."""
        return self._decoder.decode(b"" if token_id in self._hidden else self._tokenizer.token_bytes(token_id), is_last)
