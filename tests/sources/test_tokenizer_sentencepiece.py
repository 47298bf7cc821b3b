"""SentencePiece models, trained here, written into a .gguf as converters do, rebuilt and compared with the library."""

from __future__ import annotations

import io
import itertools
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from gguf_vocab import rebuild, write_vocab
from nasty_text import NASTY, random_texts
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer

from octavo.models.gguf_file import open_gguf

WORDS = "the of and to in that is was for on as with his they at be this from have or by one had not but what all"
MORE = "日本 東京 größer naïve русский язык 42 1999 3.14 foo_bar x+y hello, world! don't 🙂 e\u0301te"


def corpus() -> list[str]:
    """Sentences of real words and of made-up ones (syllables, so that there is something to merge)."""
    rng = random.Random(0)
    syllables = [a + b for a in "bcdfglmnprstv" for b in "aeiou"]
    words = (WORDS + " " + MORE).split()
    words += ["".join(rng.choices(syllables, k=rng.randrange(1, 5))) for _ in range(600)]
    return [" ".join(rng.choices(words, k=rng.randrange(3, 20))) for _ in range(2000)]


def train(**options: Any) -> sentencepiece.SentencePieceProcessor:
    """A small model with the given trainer options."""
    model = io.BytesIO()
    defaults = {"vocab_size": 600, "byte_fallback": True, "character_coverage": 0.9995, "num_threads": 1}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()), model_writer=model, minloglevel=2, **{**defaults, **options}
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def to_gguf(path: Path, processor: sentencepiece.SentencePieceProcessor, kind: str, **extra: Any) -> Path:
    """The model's pieces and rules under the keys that converters write."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(processor.serialized_model_proto())
    rules = proto.normalizer_spec
    values: dict[str, Any] = {
        "ggml.model": kind,
        "ggml.tokens": [p.piece for p in proto.pieces],
        "ggml.scores": [float(p.score) for p in proto.pieces],
        "ggml.token_type": [int(p.type) for p in proto.pieces],
        "ggml.bos_token_id": processor.bos_id(),
        "ggml.eos_token_id": processor.eos_id(),
        "ggml.unknown_token_id": processor.unk_id(),
        "ggml.add_space_prefix": rules.add_dummy_prefix,
        "ggml.remove_extra_whitespaces": rules.remove_extra_whitespaces,
        "ggml.add_bos_token": False,
        "ggml.add_eos_token": False,
        **extra,
    }
    if rules.precompiled_charsmap:
        values["ggml.precompiled_charsmap"] = rules.precompiled_charsmap
    return write_vocab(path, values)


def texts(seed: int) -> list[str]:
    """Corpus-like and nasty texts, without the names of control tokens: SentencePiece reads those as plain text."""
    all_texts = [*NASTY, *corpus()[:200], *random_texts(seed, 400)]
    return [t for t in all_texts if not any(s in t for s in ("<s>", "</s>", "<unk>", "<0x"))]


def loses_a_mark(text: str) -> bool:
    """A compatibility character with a combining mark after it: the tokenizers library's character map drops it."""
    pairs = itertools.pairwise(text)
    return any(unicodedata.normalize("NFKC", a) != a and unicodedata.category(b)[0] == "M" for a, b in pairs)


USER = ["<sep>", "foo_bar", "foo", "\n\n", "\n\n\n", "▁▁", "▁▁▁", "▁▁▁▁", "x+y"]

IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}

BPE = {
    "llama": {**IDENTITY},
    "no prefix": {**IDENTITY, "add_dummy_prefix": False},
    "whitespace removed": {"normalization_rule_name": "identity", "remove_extra_whitespaces": True},
    "no byte fallback": {**IDENTITY, "byte_fallback": False},
    "digits split, wide pieces": {**IDENTITY, "split_digits": True, "allow_whitespace_only_pieces": True},
    "user symbols": {**IDENTITY, "user_defined_symbols": USER},
    "user symbols, no prefix": {**IDENTITY, "add_dummy_prefix": False, "user_defined_symbols": USER},
}

UNIGRAM = {
    # No runs: several cuts of a run into user symbols tie exactly, and rounding decides.
    "user symbols": {**IDENTITY, "user_defined_symbols": ["<sep>", "foo_bar", "foo", "x+y"]},
    "t5": {"normalization_rule_name": "nmt_nfkc", "byte_fallback": False},
    "nfkc, bytes": {"normalization_rule_name": "nfkc"},
    "identity": {**IDENTITY},
    "no prefix": {**IDENTITY, "add_dummy_prefix": False},
}


def check(rebuilt: Tokenizer, processor: sentencepiece.SentencePieceProcessor, seed: int) -> None:
    has_map = "Precompiled" in str(rebuilt.normalizer)
    for text in texts(seed):
        if has_map and loses_a_mark(text):
            continue
        assert rebuilt.encode(text).ids == processor.encode(text), repr(text)


@pytest.mark.parametrize("name", BPE)
def test_bpe(name: str, tmp_path: Path, cache: Path) -> None:
    processor = train(model_type="bpe", **BPE[name])
    check(rebuild(to_gguf(tmp_path / "m.gguf", processor, "llama")), processor, 7)


@pytest.mark.parametrize("name", UNIGRAM)
def test_unigram(name: str, tmp_path: Path, cache: Path) -> None:
    processor = train(model_type="unigram", **UNIGRAM[name])
    check(rebuild(to_gguf(tmp_path / "m.gguf", processor, "t5")), processor, 8)


@pytest.mark.parametrize(("model_type", "kind"), [("bpe", "llama"), ("unigram", "t5")])
def test_decoding(model_type: str, kind: str, tmp_path: Path, cache: Path) -> None:
    processor = train(model_type=model_type, **IDENTITY)
    rebuilt = rebuild(to_gguf(tmp_path / "m.gguf", processor, kind))
    for text in texts(9):
        ids = processor.encode(text)
        assert rebuilt.decode(ids) == processor.decode(ids), repr(text)


@pytest.mark.parametrize(("flag", "expected"), [(None, [1]), (True, [1]), (False, [])])
def test_bos_flag(flag: bool | None, expected: list[int], tmp_path: Path, cache: Path) -> None:
    """SentencePiece BPE models add BOS unless the file says no."""
    processor = train(model_type="bpe", **IDENTITY)
    path = to_gguf(tmp_path / "m.gguf", processor, "llama")
    path = with_flags(path, tmp_path / "n.gguf", {} if flag is None else {"ggml.add_bos_token": flag})
    assert rebuild(path).encode("hello").ids == expected + processor.encode("hello")


def with_flags(path: Path, target: Path, values: dict[str, Any]) -> Path:
    """The same vocabulary with only the given flags of add_bos/add_eos."""
    meta = open_gguf(path).metadata
    kept = {k.removeprefix("tokenizer."): v for k, v in meta.items() if k.startswith("tokenizer.")}
    for key in ("ggml.add_bos_token", "ggml.add_eos_token"):
        kept.pop(key)
    return write_vocab(target, {**kept, **values})


def test_listed_merges_win_over_scores(tmp_path: Path, cache: Path) -> None:
    tokens = ["<unk>", "a", "b", "c", "ab", "bc", "abc"]
    values = {"ggml.model": "llama", "ggml.tokens": tokens, "ggml.token_type": [2, 1, 1, 1, 1, 1, 1]}
    values |= {"ggml.add_space_prefix": False, "ggml.add_bos_token": False, "ggml.scores": [0.0] * 7}
    for merges, expected in ((["a b"], ["ab", "c"]), (["b c"], ["a", "bc"]), (["b c", "a bc"], ["abc"])):
        path = write_vocab(tmp_path / f"{len(expected)}{expected[0]}.gguf", {**values, "ggml.merges": merges})
        assert rebuild(path).encode("abc").tokens == expected


def test_eos_flag(tmp_path: Path, cache: Path) -> None:
    processor = train(model_type="unigram", **IDENTITY)
    path = to_gguf(tmp_path / "m.gguf", processor, "t5", **{"ggml.add_eos_token": True})
    assert rebuild(path).encode("hello").ids == [*processor.encode("hello"), 2]


def test_special_tokens_are_found_and_each_part_gets_its_blank(tmp_path: Path, cache: Path) -> None:
    processor = train(model_type="bpe", **IDENTITY)
    rebuilt = rebuild(to_gguf(tmp_path / "m.gguf", processor, "llama"))
    assert rebuilt.encode("<s>the</s>of").ids == [1, *processor.encode("the"), 2, *processor.encode("of")]
