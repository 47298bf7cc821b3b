"""SmolLM2's tokenizer, rebuilt from the GGUF, against Transformers' reading of the same file.

Transformers forgets that SmolLM cuts digits one by one; the reference gets that step back.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from nasty_text import NASTY, random_texts
from tokenizers import Tokenizer, pre_tokenizers

from octavo import _core
from octavo.models import tokenizer_gguf
from octavo.models.gguf_file import GGUFFile

SPECIAL_TEXTS = [
    "<|im_start|>user\nhi 42<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><|endoftext|>",
    "a<|im_end|>b <|im_end|> c",
    "<|im_start|>1<|im_end|>2",
    "<|im_star|> <|im_start",
]


@pytest.fixture(scope="module")
def folder(real_file: GGUFFile) -> Path:
    built = tokenizer_gguf.build_folder(real_file)
    assert built is not None
    return built


@pytest.fixture(scope="module")
def reference(real_path: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    backend: Tokenizer = AutoTokenizer.from_pretrained(real_path.parent, gguf_file=real_path.name).backend_tokenizer
    assert "Digits" not in backend.to_str()
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), backend.pre_tokenizer])
    return backend


def test_ids_equal_transformers(folder: Path, reference: Tokenizer) -> None:
    rebuilt = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in [*NASTY, *SPECIAL_TEXTS, *random_texts(1, 3000)]:
        assert rebuilt.encode(text).ids == reference.encode(text).ids, repr(text)


def test_text_comes_back(folder: Path) -> None:
    rebuilt = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in [*NASTY, *SPECIAL_TEXTS, *random_texts(2, 500)]:
        assert rebuilt.decode(rebuilt.encode(text).ids, skip_special_tokens=False) == text


def test_the_engine_tokenizer_gives_the_same_ids(folder: Path, reference: Tokenizer) -> None:
    engine = _core.Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [*NASTY, *SPECIAL_TEXTS, *random_texts(3, 500)]
    assert engine.encode_batch(texts) == [reference.encode(text).ids for text in texts]


def test_digits_are_single_tokens(folder: Path) -> None:
    rebuilt = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = rebuilt.encode("year 2024, 12").tokens
    assert tokens == ["year", "Ġ", "2", "0", "2", "4", ",", "Ġ", "1", "2"]


def test_config_and_template(folder: Path, real_file: GGUFFile) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["bos_token"] == "<|im_start|>"
    assert config["eos_token"] == "<|im_end|>"
    assert config["add_bos_token"] is False
    template = (folder / "chat_template.jinja").read_text()
    assert template == real_file.metadata["tokenizer.chat_template"]


def test_second_build_reads_the_cache(real_file: GGUFFile, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tokenizer_gguf.build_folder(real_file)
    monkeypatch.setattr(tokenizer_gguf, "_write", None)
    assert tokenizer_gguf.build_folder(real_file) == first
    assert first is not None
    assert first.parent.parent == cache


def test_quick_and_without_transformers_or_torch(real_path: Path, cache: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from octavo.models.gguf_file import open_gguf; from octavo.models.tokenizer_gguf import build_folder\n"
        "start = time.perf_counter(); build_folder(open_gguf(Path(sys.argv[1]))); spent = time.perf_counter() - start\n"
        "assert not {'transformers', 'torch'} & set(sys.modules), 'heavy import'\n"
        "print(spent)"
    )
    out = subprocess.run([sys.executable, "-c", program, str(real_path)], check=True, capture_output=True, text=True)
    assert float(out.stdout) < 1.0
