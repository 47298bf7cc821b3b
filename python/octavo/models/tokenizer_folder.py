"""The tokenizer of a model folder: its tokenizer.json, or one converted once from an older format.

The conversion (SentencePiece's tokenizer.model, tiktoken files, tekken.json, GPT-2's vocab.json + merges.txt,
BERT's vocab.txt) is Transformers'; the result is kept in the cache. Not here: tokenizers inside .gguf files
(tokenizer_gguf.py).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from octavo import envs
from octavo.errors import ModelError

OLD_FORMATS = (
    "tekken.json",
    "tiktoken.model",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "merges.txt",
    "vocab.txt",
)
"""Files that hold a tokenizer in a form that has to be converted."""

READ_BY_CONVERSION = (*OLD_FORMATS, "vocab.json", "tokenizer_config.json", "special_tokens_map.json", "config.json")


def find(folder: Path) -> Path | None:
    """The folder that holds `folder`'s tokenizer.json: itself, or one in the cache. None when it has no tokenizer."""
    if (folder / "tokenizer.json").is_file():
        return folder
    if not any((folder / name).is_file() for name in OLD_FORMATS):
        return None
    digest = hashlib.blake2b(digest_size=16)
    for name in READ_BY_CONVERSION:
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    return cached(f"{folder.resolve().name}-{digest.hexdigest()}", lambda target: _convert(folder, target))


def cached(name: str, build: Callable[[Path], None]) -> Path:
    """The cache's tokenizer folder `name`, made by `build(folder)` when it is not there; never seen half done.

    ConfigError: the cache can't be written to.
    """
    target = envs.cache_dir() / "tokenizers" / name
    if (target / "tokenizer.json").is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".partial-", dir=target.parent))
    except OSError as error:
        raise envs.cache_error(target.parent, error) from error
    try:
        build(work)
        work.chmod(0o755)
        os.replace(work, target)
    except OSError as error:
        if not (target / "tokenizer.json").is_file():  # else another process was first, with the same content
            raise envs.cache_error(target.parent, error) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _convert(folder: Path, target: Path) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, use_fast=True, trust_remote_code=False)
        tokenizer.save_pretrained(target)
    except (ValueError, ImportError, OSError, KeyError) as e:
        raise ModelError(f"{folder}: its tokenizer can't be converted to tokenizer.json: {_one_line(e)}") from None
    if not (target / "tokenizer.json").is_file():
        raise ModelError(f"{folder}: its tokenizer has no form that can be written as tokenizer.json")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
