"""The environment variables that Octavo reads, all of them. Nothing else touches `os.environ`.

Options of a run are flags, not variables; these are for what must be known before flags are parsed.
"""

from __future__ import annotations

import os
from pathlib import Path

from octavo.errors import ConfigError

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


def kernel_cache_dir() -> Path:
    """Where Triton keeps compiled kernels."""
    home = Path(os.environ.get("TRITON_HOME", Path.home()))
    return Path(os.environ.get("TRITON_CACHE_DIR", home / ".triton" / "cache"))


def log_level() -> str:
    return os.environ.get("OCTAVO_LOG_LEVEL", "info")


def api_key() -> str | None:
    return os.environ.get("OCTAVO_API_KEY") or None


def admin_key() -> str | None:
    return os.environ.get("OCTAVO_ADMIN_KEY") or None


def child(**extra: str) -> dict[str, str]:
    """The environment of a child process: this one's, with `extra` set."""
    return {**os.environ, **extra}
