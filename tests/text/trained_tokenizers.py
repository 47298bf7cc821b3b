"""Tokenizers of every kind, trained on a small text: as the `tokenizers` package runs them and as Octavo does."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from octavo import _core

SPECIALS = ["<unk>", "<s>", "</s>", "<|im_end|>"]
TRAINING_TEXT = """
A sequence's cache lives in small equal pages; a page holds sixteen positions. Pages that two sequences share are
counted, pages that nobody uses are kept for a while, because the next prompt may begin as the last one did. Don't
copy them: share them! 1234 tokens, 56 pages, 7 sequences, 8.9 milliseconds.
def step(result): return plan  # one call, and nothing else
Größe, naïve, café, señor, smörgåsbord. Это небольшой текст. 你好世界，今天天气很好。 日本語のテキスト。 🙂 👩‍👩‍👧 🏳️‍🌈
"""


@dataclass(frozen=True)
class Pair:
    """One tokenizer, twice."""

    kind: str
    reference: Tokenizer
    ours: _core.Tokenizer

    def special_ids(self) -> list[int]:
        return [
            self.reference.token_to_id(token) for token in SPECIALS if self.reference.token_to_id(token) is not None
        ]


def _train(tokenizer: Tokenizer, trainer: trainers.Trainer) -> Tokenizer:
    tokenizer.train_from_iterator([line for line in TRAINING_TEXT.splitlines(keepends=True) for _ in range(3)], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.add_tokens(["two words"])
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    return tokenizer


def byte_level() -> Tokenizer:
    """Like GPT-2, Llama 3, Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _train(tokenizer, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False))


def sentencepiece_bpe() -> Tokenizer:
    """Like Llama 2: blanks as ▁, unknown characters as byte tokens, one leading blank cut."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>"], limit_alphabet=60, max_token_length=12, show_progress=False
    )
    tokenizer = _train(tokenizer, trainer)
    body = json.loads(tokenizer.to_str())
    vocab: dict[str, int] = body["model"]["vocab"]
    first = max(max(vocab.values()), *(token["id"] for token in body["added_tokens"])) + 1
    vocab |= {token: first + byte for byte, token in enumerate(byte_tokens)}
    return Tokenizer.from_str(json.dumps(body))


def unigram() -> Tokenizer:
    """Like T5: blanks as ▁ by Metaspace."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    return _train(tokenizer, trainer)


def word_piece() -> Tokenizer:
    """Like BERT."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False)
    return _train(tokenizer, trainer)


KINDS: dict[str, Any] = {
    "byte_level": byte_level,
    "sentencepiece_bpe": sentencepiece_bpe,
    "unigram": unigram,
    "word_piece": word_piece,
}


def make_pair(kind: str) -> Pair:
    reference = KINDS[kind]()
    return Pair(kind, reference, _core.Tokenizer.from_json(reference.to_str().encode()))
