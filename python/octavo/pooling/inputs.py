"""From texts and pairs of texts to token ids with segments, for models that pool. Without torch: the server's side.

Uses the `tokenizers` package itself, because pairs need its post-processor between truncation and special tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Encoding, Tokenizer

from octavo.errors import RequestError
from octavo.protocol import ModelFacts

# The form that Qwen3-Reranker was trained on, as its model card gives it.
YES_NO_HEAD = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
YES_NO_TAIL = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class PoolingInput(NamedTuple):
    """One input of the model: ids, and the segment of each (None: all 0)."""

    token_ids: list[int]
    type_ids: list[int] | None = None


class InputEncoder:
    """Makes inputs within the model's length; thread-safe. Errors are `RequestError`s that name the field."""

    def __init__(self, facts: ModelFacts) -> None:
        assert facts.pooling is not None
        if facts.tokenizer_path is None:
            raise RequestError("this model has no tokenizer: give token ids")
        file = str(Path(facts.tokenizer_path) / "tokenizer.json")
        self._max_length = facts.max_model_len
        self._vocab_size = facts.vocab_size
        self._is_question = facts.pooling.pairs == "yes_no"
        self._tokenizer = Tokenizer.from_file(file)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if self._is_question:
            self._head = self._plain([YES_NO_HEAD])[0].ids
            self._tail = self._plain([YES_NO_TAIL])[0].ids
            # What users write never becomes a control token of the question.
            self._tokenizer.encode_special_tokens = True

    def encode(
        self, inputs: Sequence[str | list[int]], *, truncate: int | None = None, param: str = "input"
    ) -> list[PoolingInput]:
        """One input a text or list of ids. `truncate`: most tokens to keep, -1 for as many as the model takes."""
        limit = self._limit(truncate)
        texts = iter(self._plain([each for each in inputs if isinstance(each, str)]))
        room = limit - self._tokenizer.num_special_tokens_to_add(False)
        made = []
        for each in inputs:
            if isinstance(each, str):
                encoding = next(texts)
                if truncate is not None:
                    _cut(encoding, room)
                made.append(_input(self._tokenizer.post_process(encoding)))
            else:
                self._check_ids(each, param)
                made.append(PoolingInput(each if truncate is None else each[:limit]))
        self._check(made, param)
        return made

    def encode_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        truncate: int | None = None,
        instruction: str | None = None,
        param: str = "documents",
    ) -> list[PoolingInput]:
        """One input a pair; truncation takes from the second text (the document) first."""
        limit = self._limit(truncate)
        make = self._question if self._is_question else self._segments
        made = make(pairs, limit if truncate is not None else None, instruction)
        self._check(made, param)
        return made

    def _segments(
        self, pairs: Sequence[tuple[str, str]], limit: int | None, instruction: str | None
    ) -> list[PoolingInput]:
        if instruction is not None:
            raise RequestError("instruction: this model takes none", "instruction")
        firsts = self._plain([first for first, _ in pairs])
        seconds = self._plain([second for _, second in pairs])
        num_special = self._tokenizer.num_special_tokens_to_add(True)
        made = []
        for first, second in zip(firsts, seconds, strict=True):
            if limit is not None:
                _cut(first, limit - num_special - 1)
                _cut(second, limit - num_special - len(first.ids))
            made.append(_input(self._tokenizer.post_process(first, second)))
        return made

    def _question(
        self, pairs: Sequence[tuple[str, str]], limit: int | None, instruction: str | None
    ) -> list[PoolingInput]:
        asked = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: "
        texts = [f"{asked}{query}\n<Document>: {document}" for query, document in pairs]
        room = None if limit is None else limit - len(self._head) - len(self._tail)
        if room is not None and room < 1:
            raise RequestError("truncate_prompt_tokens leaves no room for the texts", "truncate_prompt_tokens")
        return [PoolingInput([*self._head, *encoding.ids[:room], *self._tail]) for encoding in self._plain(texts)]

    def _plain(self, texts: Sequence[str]) -> list[Encoding]:
        """Without special tokens."""
        return self._tokenizer.encode_batch(list(texts), add_special_tokens=False)

    def _limit(self, truncate: int | None) -> int:
        if truncate is None or truncate == -1:
            return self._max_length
        if not 1 <= truncate <= self._max_length:
            raise RequestError(
                f"truncate_prompt_tokens must be -1 or within 1 and {self._max_length}, got {truncate}",
                "truncate_prompt_tokens",
            )
        return truncate

    def _check_ids(self, token_ids: list[int], param: str) -> None:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            raise RequestError(f"token ids must be within 0 and {self._vocab_size - 1}", param)

    def _check(self, made: Sequence[PoolingInput], param: str) -> None:
        for number, one in enumerate(made):
            if not one.token_ids:
                raise RequestError(f"{param}[{number}] is empty", param)
            if len(one.token_ids) > self._max_length:
                raise RequestError(
                    f"{param}[{number}] has {len(one.token_ids)} tokens, the model takes at most {self._max_length}: "
                    "shorten it, or send truncate_prompt_tokens: -1",
                    param,
                    "context_length_exceeded",
                )


def _cut(encoding: Encoding, num_tokens: int) -> None:
    if num_tokens < 1:
        raise RequestError("truncate_prompt_tokens leaves no room for the text", "truncate_prompt_tokens")
    encoding.truncate(num_tokens)


def _input(encoding: Encoding) -> PoolingInput:
    return PoolingInput(encoding.ids, encoding.type_ids if any(encoding.type_ids) else None)
