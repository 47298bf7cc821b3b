"""What a keys file says: tenants, their keys (or hashes of them), limits, weights. Read once, checked strictly.

A file is TOML or JSON with one table a tenant:

    [tenants.research]
    keys = ["sk-…", "sha256:64 hex digits"]
    requests_per_minute = 60

Not here: which request belongs to whom (keyring.py) and what has been used (tenant.py).
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from octavo.config import nearest
from octavo.errors import ConfigError, RequestError
from octavo.server.schema.parse import parse

MAX_TENANTS = 10_000
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_HASH = re.compile(r"sha256:([0-9a-fA-F]{64})")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSpec:
    """One tenant.

    Attributes:
        keys: API keys as they are sent, or `sha256:` and the hash in hex.
        requests_per_minute, tokens_per_minute: Average rates; a minute's worth may come at once. Tokens are those of
            prompts and outputs. None: no limit.
        max_concurrent: Calls in flight; None: no limit.
        max_tokens: Most output tokens of one sequence; None: no limit but the context.
        weight: Share of the engine beside other tenants that wait, 0.01 to 1000.
        priority: The most urgent priority that requests may claim (lower is more urgent); None: any.
    """

    keys: list[str]
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    max_tokens: int | None = None
    weight: float = 1.0
    priority: int | None = None

    def check(self, path: str) -> None:
        """Ranges, as `ConfigError`."""
        if not self.keys:
            raise ConfigError(f"{path}.keys: at least one key is needed", "api_keys_file")
        if any(not key.strip() for key in self.keys):
            raise ConfigError(f"{path}.keys: a key is empty", "api_keys_file")
        for name in ("requests_per_minute", "tokens_per_minute", "max_concurrent", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{path}.{name}: {value} is below 1", "api_keys_file")
        if not 0.01 <= self.weight <= 1000:
            raise ConfigError(f"{path}.weight: {self.weight} is not within 0.01 and 1000", "api_keys_file")
        if self.priority is not None and not -(2**31) <= self.priority < 2**31:
            raise ConfigError(f"{path}.priority: {self.priority} is no 32-bit integer", "api_keys_file")

    def hashes(self) -> list[bytes]:
        """SHA-256 of every key."""
        return [key_hash(key) for key in self.keys]


def key_hash(key: str) -> bytes:
    """A key's SHA-256; a key that is written as a hash is that hash."""
    found = _HASH.fullmatch(key.strip())
    return bytes.fromhex(found[1]) if found else hashlib.sha256(key.strip().encode()).digest()


def read_keys_file(path: Path) -> dict[str, TenantSpec]:
    """Tenants by name. `ConfigError` says what is wrong, and never quotes a key."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--api-keys-file: {path} can't be read: {reason}", "api_keys_file") from None
    try:
        document = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        place = re.search(r"line \d+", str(error))
        where = f" ({place[0]})" if place else ""
        raise ConfigError(f"--api-keys-file: {path} is not valid {kind}{where}", "api_keys_file") from None
    tables = document.get("tenants") if isinstance(document, dict) else None
    if not isinstance(tables, dict) or not tables:
        raise ConfigError(f"--api-keys-file: {path} has no tables [tenants.NAME]", "api_keys_file")
    if len(tables) > MAX_TENANTS:
        raise ConfigError(f"--api-keys-file: {path} has more than {MAX_TENANTS} tenants", "api_keys_file")
    specs = {name: _read_tenant(name, table) for name, table in tables.items()}
    _check_distinct(specs)
    return specs


def _read_tenant(name: str, table: object) -> TenantSpec:
    path = f"--api-keys-file: tenants.{name[:64]}"
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{path}: names have 1 to 64 letters, digits and . _ @ -", "api_keys_file")
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path} is not a table", "api_keys_file")
    known = [field.name for field in fields(TenantSpec)]
    for key in table:
        if key not in known:
            raise ConfigError(f"{path}: unknown entry {key!r}{nearest(key, known)}", "api_keys_file")
    values: Mapping[str, Any] = table
    try:
        spec = parse(TenantSpec, values)
    except RequestError as error:
        detail = "is missing or is no list of strings" if error.param and error.param.startswith("keys") else str(error)
        raise ConfigError(f"{path}: {'keys ' if detail[:2] == 'is' else ''}{detail}", "api_keys_file") from None
    spec.check(path)
    return spec


def _check_distinct(specs: Mapping[str, TenantSpec]) -> None:
    owners: dict[bytes, str] = {}
    for name, spec in specs.items():
        for digest in spec.hashes():
            owner = owners.setdefault(digest, name)
            if owner != name:
                raise ConfigError(f"--api-keys-file: {owner} and {name} have a key in common", "api_keys_file")
