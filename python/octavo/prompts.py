"""From what a caller sends (text or chat messages) to token ids, the same for `LLM`, `AsyncLLM` and the server.

Text inside chat messages never becomes a control token: "<|im_end|>" typed by a user is read as those ten characters.
Plain prompts do parse special tokens, because callers that apply a template themselves depend on it.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from octavo._core import Tokenizer
from octavo.chat_template import ChatTemplate, Message
from octavo.errors import RequestError

# Texts shorter than this many bytes a token of context are tokenized without asking how long tokens can be.
_USUAL_BYTES_PER_TOKEN = 8


class PromptEncoder:
    """Makes token ids of prompts; thread-safe.

    Args:
        tokenizer: None for a model without one (`RequestError` on every text).
        template: The model's chat template.
        folder: The tokenizer's folder (`ModelFacts.tokenizer_path`).
        max_model_len: Prompts that can't fit are refused before they are tokenized.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, template: ChatTemplate, folder: str | Path | None, max_model_len: int
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.max_model_len = max_model_len
        self._folder = Path(folder) if folder is not None else None
        bos = template.special_tokens.get("bos_token")
        self._bos = bos or ""
        self._bos_id = tokenizer.token_to_id(bos) if tokenizer is not None and bos else None

    def with_template(self, template: ChatTemplate) -> PromptEncoder:
        """The same with another template; what is known of the tokenizer is shared."""
        other = copy.copy(self)
        other.template = template
        return other

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a plain prompt. A begin token that the text already has is not added again."""
        tokenizer = self._need_tokenizer()
        self.check_length(text, "prompt")
        with _whole_characters("prompt"):
            ids = tokenizer.encode(text, add_special_tokens)
        return self._without_second_bos(text, ids) if add_special_tokens else ids

    def _without_second_bos(self, text: str, ids: list[int]) -> list[int]:
        """Ids of a text that begins with the begin token, to which the tokenizer may have added another."""
        return ids[1:] if ids[:2] == [self._bos_id] * 2 and text.startswith(self._bos) else ids

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_special_tokens: bool = False,
        **options: Any,
    ) -> list[int]:
        """Ids of chat messages and the tools that they may use; `options` go to `ChatTemplate.render`."""
        tokenizer = self._need_tokenizer()
        typed = _all_text((messages, tools))
        self.check_length(typed, "messages")
        (hidden, hidden_tools), literals = self._hide_literals((messages, tools), typed)
        text = self.template.render(hidden, tools=hidden_tools, **options)
        self.check_length(text, "messages")
        with _whole_characters("messages"):
            if not literals:
                ids = tokenizer.encode(text, add_special_tokens)
            else:
                added = tokenizer.encode("", True)[:1] if add_special_tokens else []
                ids = [*(added if added == [self._bos_id] else []), *self._encode_around(text, literals)]
        return self._without_second_bos(text, ids) if add_special_tokens else ids

    def check_length(self, text: str, param: str) -> None:
        """Refuse text that can't fit the context, however well it packs into tokens; cheap."""
        num_bytes = len(text)
        if num_bytes <= self.max_model_len * _USUAL_BYTES_PER_TOKEN:
            return
        if num_bytes > self.max_model_len * self._longest_token:
            raise RequestError(
                f"{param} has {num_bytes} characters, more than the context of {self.max_model_len} tokens can hold",
                param=param,
                code="context_length_exceeded",
            )

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer: send token ids", param="prompt")
        return self.tokenizer

    @cached_property
    def _longest_token(self) -> int:
        tokenizer = self._need_tokenizer()
        return max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))

    @cached_property
    def _specials(self) -> re.Pattern[str] | None:
        """Finds special tokens in text, longest first."""
        tokenizer = self._need_tokenizer()
        names = [tokenizer.id_to_token(i) for i in tokenizer.special_token_ids()]
        found = sorted((name for name in names if name), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, found))) if found else None

    @cached_property
    def _plain(self) -> Tokenizer:
        """The tokenizer without its special tokens: it reads them as ordinary text."""
        if self._folder is None:
            return self._need_tokenizer()
        body = json.loads((self._folder / "tokenizer.json").read_text(encoding="utf-8"))
        body["added_tokens"] = [token for token in body.get("added_tokens") or [] if not token.get("special")]
        body["post_processor"] = None
        return Tokenizer.from_json(json.dumps(body).encode())

    def _hide_literals(self, value: Any, typed: str) -> tuple[Any, dict[str, str]]:
        """A JSON value with every special token's text in it replaced by a mark, and what the marks stand for.

        `typed` is all its text.
        """
        specials = self._specials
        if specials is None or not specials.search(typed):
            return value, {}
        nonce = secrets.token_hex(8)
        literals: dict[str, str] = {}

        def mark(match: re.Match[str]) -> str:
            name = f"\ue000{nonce}.{len(literals)}\ue001"
            literals[name] = match.group()
            return name

        def walk(value: Any) -> Any:
            if isinstance(value, str):
                return specials.sub(mark, value)
            if isinstance(value, Mapping):
                return {key: walk(item) for key, item in value.items()}
            return [walk(item) for item in value] if isinstance(value, list | tuple) else value

        return walk(value), literals

    def _encode_around(self, text: str, literals: Mapping[str, str]) -> list[int]:
        """Ids of rendered text: special tokens of the template become their ids, marked ones stay text."""
        tokenizer, specials = self._need_tokenizer(), self._specials
        assert specials is not None
        ids: list[int] = []
        plain = ""
        marks = re.compile("|".join(map(re.escape, literals)))
        for piece in re.split(f"({marks.pattern})", text):
            if piece in literals:
                plain += literals[piece]
                continue
            at = 0
            for match in specials.finditer(piece):
                plain += piece[at : match.start()]
                ids += self._plain.encode(plain, False) if plain else []
                plain, at = "", match.end()
                token_id = tokenizer.token_to_id(match.group())
                assert token_id is not None
                ids.append(token_id)
            plain += piece[at:]
        return ids + (self._plain.encode(plain, False) if plain else [])


@contextmanager
def _whole_characters(param: str) -> Iterator[None]:
    """Half of a surrogate pair in text (an escape in the arguments of an earlier call) is the request's fault."""
    try:
        yield
    except UnicodeEncodeError:
        raise RequestError(f"{param}: the text has half of a surrogate pair", param=param) from None


def _all_text(value: object) -> str:
    """Every string in a JSON value, joined by line feeds."""
    out: list[str] = []
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            out.append(item)
        elif isinstance(item, Mapping):
            todo.extend(item.values())
        elif isinstance(item, list | tuple):
            todo.extend(item)
    return "\n".join(out)
