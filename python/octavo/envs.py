"""The environment variables that Octavo reads, all of them. Nothing else touches `os.environ`.

Options of a run are flags, not variables; these are for what must be known before flags are parsed.
"""

from __future__ import annotations

import os
from pathlib import Path

from octavo.errors import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error")
KNOWN = {
    "OCTAVO_CACHE": "Folder for downloaded models and converted tokenizers (default: ~/.cache/octavo).",
    "OCTAVO_LOG_LEVEL": "debug, info, warning or error (default: info); --log-level wins.",
    "OCTAVO_API_KEY": "Key that clients must send; --api-key wins.",
    "OCTAVO_ADMIN_KEY": "Key of the /admin routes; --admin-key wins.",
}


def check() -> None:
    """Raise `ConfigError` for an `OCTAVO_*` variable that does not exist (a typo would be silent otherwise)."""
    for name in os.environ:
        if name.startswith("OCTAVO_") and name not in KNOWN:
            raise ConfigError(f"unknown environment variable {name}; known: {', '.join(KNOWN)}")


def cache_dir() -> Path:
    """Where downloads are kept."""
    base = os.environ.get("OCTAVO_CACHE")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "octavo"


def cache_error(folder: Path, error: OSError) -> ConfigError:
    """What to say when a folder of the cache can't be written to."""
    reason = error.strerror or str(error)
    return ConfigError(f"{folder}: nothing can be kept there: {reason}; set OCTAVO_CACHE to another folder")


def kernel_cache_dir() -> Path:
    """Where Triton keeps compiled kernels."""
    home = Path(os.environ.get("TRITON_HOME", Path.home()))
    return Path(os.environ.get("TRITON_CACHE_DIR", home / ".triton" / "cache"))


def log_level() -> str | None:
    """What stands for --log-level where that is not given."""
    level = os.environ.get("OCTAVO_LOG_LEVEL") or None
    if level not in (None, *LOG_LEVELS):
        raise ConfigError(f"OCTAVO_LOG_LEVEL: {level!r} is not one of {', '.join(LOG_LEVELS)}")
    return level


def api_key() -> str | None:
    return os.environ.get("OCTAVO_API_KEY") or None


def admin_key() -> str | None:
    return os.environ.get("OCTAVO_ADMIN_KEY") or None


def keep_cupti() -> None:
    """Have torch's profiler leave CUPTI in place once it was started: CUDA graphs that outlive its end crash with the
    next start, or at exit (torch sets the same for graphs of its own)."""
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")


def child(**extra: str) -> dict[str, str]:
    """The environment of a child process: this one's, with `extra` set."""
    return {**os.environ, **extra}
