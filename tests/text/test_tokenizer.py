"""Octavo's tokenizer against the `tokenizers` package, on one file of each kind."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path

import pytest
from trained_tokenizers import SPECIALS, TRAINING_TEXT, Pair, byte_level

from octavo import _core

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  blanks\n\nand lines\t",
    "café cafe\u0301 你好 日本語 🙂 👩‍👩‍👧",
    "a<s>b</s> <|im_end|>two words two  words",
    "\x00\x7f\u2028\ufeff",
    "don't 1234567 <0x41> ▁▁",
    TRAINING_TEXT,
]


def random_texts(seed: int, count: int) -> list[str]:
    r = random.Random(seed)
    return ["".join(r.choices(TRAINING_TEXT + "🤖ßя ", k=r.randrange(60))) for _ in range(count)]


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_ids_are_the_references(pair: Pair, add_special_tokens: bool) -> None:
    texts = TEXTS + random_texts(1, 200)
    want = [pair.reference.encode(text, add_special_tokens=add_special_tokens).ids for text in texts]
    assert [pair.ours.encode(text, add_special_tokens) for text in texts] == want
    assert pair.ours.encode_batch(texts, add_special_tokens) == want


@pytest.mark.parametrize("skip", [True, False])
def test_text_is_the_references(pair: Pair, skip: bool) -> None:
    r = random.Random(2)
    lists = [pair.reference.encode(text).ids for text in TEXTS + random_texts(3, 200)]
    lists += [[r.randrange(pair.ours.vocab_size + 3) for _ in range(r.randrange(12))] for _ in range(500)]
    for ids in lists:
        assert pair.ours.decode(ids, skip) == pair.reference.decode(ids, skip_special_tokens=skip), ids


def test_bytes_of_tokens_joined_are_the_text(pairs: dict[str, Pair]) -> None:
    for kind in ("byte_level", "sentencepiece_bpe"):
        ours = pairs[kind].ours
        for text in [text for text in TEXTS if "<s>" not in text] + random_texts(4, 100):
            joined = b"".join(ours.token_bytes(i) for i in ours.encode(text, add_special_tokens=False))
            want = text if kind == "byte_level" else f" {text}".replace("▁", " ") if text else ""
            assert joined.decode() == want


def test_names_and_sizes(pair: Pair) -> None:
    ours, reference = pair.ours, pair.reference
    assert ours.vocab_size == max(reference.get_vocab().values()) + 1
    assert ours.special_token_ids() == sorted(pair.special_ids())
    for token in [*SPECIALS, "a", "no such token"]:
        assert ours.token_to_id(token) == reference.token_to_id(token)
    for token_id in (0, 5, ours.vocab_size - 1, ours.vocab_size, 2**32 - 1):
        assert ours.id_to_token(token_id) == reference.id_to_token(token_id)
    assert ours.token_bytes(2**32 - 1) == b""


def test_truncation_and_padding_of_the_file_are_ignored() -> None:
    reference = byte_level()
    want = reference.encode("a long enough text").ids
    reference.enable_truncation(3)
    reference.enable_padding(length=50)
    assert _core.Tokenizer.from_json(reference.to_str().encode()).encode("a long enough text") == want


def test_a_file_is_read(tmp_path: Path, pairs: dict[str, Pair]) -> None:
    path = tmp_path / "tokenizer.json"
    pairs["unigram"].reference.save(str(path))
    assert _core.Tokenizer.from_file(str(path)).encode("a page") == pairs["unigram"].ours.encode("a page")


def test_bad_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        _core.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for body in (b"", b"{}", b"\xff\xfe", b'{"version": "1.0"', b"[1, 2]"):
        with pytest.raises(ValueError, match="not a tokenizer"):
            _core.Tokenizer.from_json(body)
    spoken = json.loads(byte_level().to_str())
    spoken["decoder"] = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
    with pytest.raises(ValueError, match="decoder CTC is not supported"):
        _core.Tokenizer.from_json(json.dumps(spoken).encode())


def test_bad_arguments_are_told(pairs: dict[str, Pair]) -> None:
    ours = pairs["byte_level"].ours
    with pytest.raises(UnicodeEncodeError):
        ours.encode("half a pair: \ud83d")
    with pytest.raises(OverflowError):
        ours.decode([-1])


def test_other_threads_run_meanwhile(pairs: dict[str, Pair]) -> None:
    """With the GIL held, this thread would stand still for almost all the time that the other one takes."""
    ours = pairs["byte_level"].ours
    text = TRAINING_TEXT * 500
    thread = threading.Thread(target=ours.encode_batch, args=([text, text],))
    start = last = time.perf_counter()
    longest = 0.0
    thread.start()
    while thread.is_alive():
        now = time.perf_counter()
        longest = max(longest, now - last)
        last = now
    assert longest < (time.perf_counter() - start) / 2
