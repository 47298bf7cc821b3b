"""Tokenizers in folders without a tokenizer.json: byte-level BPE, SentencePiece, tiktoken and tekken files of small
vocabularies, against Transformers and against the definition of each format, over nasty texts.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import regex
from nasty_text import NASTY, random_texts
from test_tokenizer_sentencepiece import corpus, train
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer

from octavo import _core
from octavo.models import tokenizer_folder

TEXTS = [text for text in [*NASTY, *random_texts(5, 400)] if text]
TEKKEN_CUTS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TIKTOKEN_CUTS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = ("th", "the", " the", "in", " in", "an", "and", "er", "12", "123", "  ", "\n\n", "日本", "é", "🙂", "==")
SPECIALS = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")


def pieces() -> list[bytes]:
    """All bytes, then prefixes of some words, so that each is two earlier ones behind each other."""
    found = [bytes([i]) for i in range(256)]
    for word in WORDS:
        data = word.encode()
        found += [data[:k] for k in range(2, len(data) + 1) if data[:k] not in found]
    return found


def by_rank(cuts: str, first: int) -> Callable[[str], list[int]]:
    """The definition of tiktoken's and tekken's BPE: in each part of the text, the pair that makes the piece of the
    lowest rank is joined, until none does."""
    ranks = {piece: rank for rank, piece in enumerate(pieces())}

    def encode(text: str) -> list[int]:
        ids: list[int] = []
        for part in regex.findall(cuts, text):
            parts = [bytes([byte]) for byte in part.encode()]
            while True:
                pairs = [(ranks.get(a + b, len(ranks)), i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
                rank, i = min(pairs, default=(len(ranks), 0))
                if rank == len(ranks):
                    break
                parts[i : i + 2] = [parts[i] + parts[i + 1]]
            ids += [first + ranks[piece] for piece in parts]
        return ids

    return encode


def write(folder: Path, model_type: str, **options: Any) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if options:
        (folder / "tokenizer_config.json").write_text(json.dumps(options))


def byte_level(folder: Path) -> None:
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(corpus(), vocab_size=600, show_progress=False)
    tokenizer.save_model(str(folder))
    write(folder, "gpt2")


def sentencepiece_bpe(folder: Path) -> None:
    processor = train(
        model_type="bpe", add_dummy_prefix=True, remove_extra_whitespaces=False, normalization_rule_name="identity"
    )
    (folder / "tokenizer.model").write_bytes(processor.serialized_model_proto())
    write(folder, "llama", tokenizer_class="LlamaTokenizer", legacy=False)


def sentencepiece_unigram(folder: Path) -> None:
    processor = train(model_type="unigram", byte_fallback=False, hard_vocab_limit=False)
    (folder / "spiece.model").write_bytes(processor.serialized_model_proto())
    write(folder, "t5", tokenizer_class="T5Tokenizer", extra_ids=0)


def tiktoken(folder: Path) -> Callable[[str], list[int]]:
    pytest.importorskip("tiktoken")
    lines = [f"{base64.b64encode(piece).decode()} {rank}" for rank, piece in enumerate(pieces())]
    (folder / "tokenizer.model").write_text("\n".join(lines) + "\n")
    write(folder, "llama", tokenizer_class="PreTrainedTokenizerFast")
    return by_rank(TIKTOKEN_CUTS, 0)


def tekken(folder: Path) -> Callable[[str], list[int]]:
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for rank, piece in enumerate(pieces())
    ]
    specials = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(SPECIALS)]
    config = {
        "pattern": TEKKEN_CUTS,
        "num_vocab_tokens": len(vocab),
        "default_vocab_size": len(vocab) + len(specials),
        "default_num_special_tokens": len(specials),
        "version": "v7",
    }
    (folder / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab, "special_tokens": specials}))
    write(folder, "mistral")
    return by_rank(TEKKEN_CUTS, len(specials))


FORMATS: dict[str, Callable[[Path], Callable[[str], list[int]] | None]] = {
    "byte-level BPE": byte_level,
    "SentencePiece BPE": sentencepiece_bpe,
    "SentencePiece unigram": sentencepiece_unigram,
    "tiktoken": tiktoken,
    "tekken": tekken,
}


@pytest.mark.parametrize("name", FORMATS)
def test_ids_and_texts_are_those_of_the_format(name: str, tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    definition = FORMATS[name](folder)
    found = tokenizer_folder.find(folder)
    assert found is not None
    assert found.is_relative_to(cache)
    ours, theirs = _core.Tokenizer.from_file(str(found / "tokenizer.json")), AutoTokenizer.from_pretrained(folder)
    batch = ours.encode_batch(TEXTS)
    for text, ids in zip(TEXTS, batch, strict=True):
        assert ids == theirs.encode(text), repr(text)
        if definition is not None and not any(special in text for special in SPECIALS):
            assert theirs.encode(text, add_special_tokens=False) == definition(text), repr(text)
        plain = theirs.encode(text, add_special_tokens=False)
        expected = theirs.decode(plain, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert ours.decode(plain) == expected, repr(text)
        if definition is not None or name == "byte-level BPE":
            assert expected == text
