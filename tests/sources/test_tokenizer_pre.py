"""Every named pre-tokenizer: it loads, loses no text, and cuts as that model's tokenizer is known to cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf_vocab import rebuild, write_vocab
from nasty_text import NASTY, random_texts
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from octavo.errors import ModelError
from octavo.models.tokenizer_pre import PRE_TOKENIZERS

TEXT = "I'LL pay $1234,56 for fooBar²\n\n  x"

DIGITS = ["1", "2", "3", "4", ",", "5", "6"]
GROUPS = ["123", "4", ",", "56"]
WORDS = [" for", " fooBar", "²"]

CUTS = {
    "gpt-2": ["I", "'", "LL", " pay", " $", "1234", ",", "56", *WORDS, "\n\n ", " x"],
    "smollm": ["I", "'", "LL", " pay", " $", *DIGITS, *WORDS, "\n\n ", " x"],
    "llama-bpe": ["I", "'LL", " pay", " $", *GROUPS, *WORDS, "\n\n", " ", " x"],
    "qwen2": ["I", "'LL", " pay", " $", *DIGITS, *WORDS, "\n\n", " ", " x"],
    "gpt-4o": ["I'LL", " pay", " $", *GROUPS, " for", " foo", "Bar", "²", "\n\n", " ", " x"],
    "tekken": ["I", "'LL", " pay", " $", *DIGITS, " for", " foo", "Bar", "²", "\n\n", " ", " x"],
    "deepseek-v3": ["I", "'LL", " pay", " $", *GROUPS, *WORDS, "\n\n", " ", " x"],
    "deepseek-coder": ["I", "'", "LL", " pay", " $", *DIGITS, *WORDS, "\n", "\n", " ", " x"],
    "deepseek-llm": ["I", "'", "LL", " pay", " $", *DIGITS, *WORDS, "\n", "\n", " ", " x"],
    # Falcon looks for digits after the change to bytes: the second byte of ² shows as ², which is one.
    "falcon": ["I", "'", "LL", " pay", " ", "$", *GROUPS, *WORDS, "²", "\n\n ", " x"],
    "bloom": ["I'LL", " pay", " $1234", ",", "56", " for", " fooBar²", "\n\n ", " x"],
}
"""Written by hand from the patterns; the blank before x shows who keeps a run of white space together."""


def vocab_file(path: Path, pre: str | None) -> Path:
    """A byte-level vocabulary of single bytes and one merge."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    values = {"ggml.model": "gpt2", "ggml.tokens": tokens, "ggml.merges": ["a b"], "ggml.bos_token_id": 0}
    return write_vocab(path, values if pre is None else {**values, "ggml.pre": pre})


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_no_text_is_lost(pre: str, tmp_path: Path, cache: Path) -> None:
    tokenizer = rebuild(vocab_file(tmp_path / "v.gguf", pre))
    tokenizer.normalizer = None  # type: ignore[assignment]  # composed forms are the one allowed change
    for text in [TEXT, *NASTY, *random_texts(4, 200)]:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


@pytest.mark.parametrize("pre", sorted(CUTS))
def test_cuts(pre: str, tmp_path: Path, cache: Path) -> None:
    tokenizer = rebuild(vocab_file(tmp_path / "v.gguf", pre))
    pieces = [TEXT[begin:end] for _, (begin, end) in tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)]
    assert pieces == CUTS[pre]


def test_default_is_what_a_file_without_a_name_gets(tmp_path: Path, cache: Path) -> None:
    named = rebuild(vocab_file(tmp_path / "a.gguf", "default"))
    unnamed = rebuild(vocab_file(tmp_path / "b.gguf", None))
    assert named.to_str() == unnamed.to_str()
    assert named.to_str() != rebuild(vocab_file(tmp_path / "c.gguf", "gpt-2")).to_str()


def test_unknown_name_is_refused(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ModelError, match=r"v\.gguf: the pre-tokenizer 'new-thing'.*--tokenizer"):
        rebuild(vocab_file(tmp_path / "v.gguf", "new-thing"))


@pytest.mark.parametrize(("pre", "text"), [("qwen2", "cafe\u0301"), ("olmo", "A\u030a")])
def test_composed_form_where_the_model_wants_it(pre: str, text: str, tmp_path: Path, cache: Path) -> None:
    composed = rebuild(vocab_file(tmp_path / "v.gguf", pre))
    assert composed.decode(composed.encode(text, add_special_tokens=False).ids) != text
    plain = rebuild(vocab_file(tmp_path / "w.gguf", "gpt-2"))
    assert plain.decode(plain.encode(text).ids) == text


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "deepseek-v3", "tekken"])
def test_merges_of_a_trained_vocabulary(pre: str, tmp_path: Path, cache: Path) -> None:
    """The same merges under the same cut: rebuilt from the file's arrays = built by the library."""
    original = Tokenizer(models.BPE(ignore_merges=PRE_TOKENIZERS[pre].ignore_merges))
    cutter = rebuild(vocab_file(tmp_path / "cutter.gguf", pre))
    original.pre_tokenizer = cutter.pre_tokenizer
    original.normalizer = cutter.normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>"]
    )
    original.train_from_iterator([*NASTY, *random_texts(5, 500)] * 2, trainer)
    vocab = sorted(original.get_vocab().items(), key=lambda item: item[1])
    merges = json.loads(original.to_str())["model"]["merges"]
    path = write_vocab(
        tmp_path / "trained.gguf",
        {
            "ggml.model": "gpt2",
            "ggml.pre": pre,
            "ggml.tokens": [token for token, _ in vocab],
            "ggml.token_type": [3 if token == "<|end|>" else 1 for token, _ in vocab],
            "ggml.merges": [" ".join(pair) for pair in merges],
            "ggml.add_bos_token": False,
        },
    )
    rebuilt = rebuild(path)
    for text in [*NASTY, *random_texts(6, 300), "a<|end|>b"]:
        assert rebuilt.encode(text).ids == original.encode(text).ids, repr(text)
