"""Whose key a request brings. Keys are known by their hashes, and every one is compared, in constant time."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from starlette.datastructures import Headers

from octavo.server.tenants.spec import key_hash, read_keys_file
from octavo.server.tenants.tenant import Clock, Tenant

DEFAULT = "default"
"""The tenant of `--api-key`, and of everybody where no key is needed."""


class Keyring:
    """Tenants by key.

    Args:
        keys: Keys of the default tenant.
        path: A keys file (spec.py). ConfigError when it can't be used.
    """

    def __init__(self, keys: Sequence[str] = (), path: str | None = None, *, clock: Clock = time.monotonic) -> None:
        self._own = [key_hash(key) for key in keys]
        self._path = None if path is None else Path(path)
        self._clock = clock
        self.everybody = Tenant(DEFAULT)
        self.tenants: dict[str, Tenant] = {}
        self._hashes: list[tuple[bytes, Tenant]] = []
        self.reload()

    @property
    def needs_key(self) -> bool:
        return bool(self._hashes)

    def reload(self) -> int:
        """Read the keys file again; the number of its tenants. On ConfigError everything stays as it was.

        What tenants have used is kept, also of those that are gone (they may come back).
        """
        specs = {} if self._path is None else read_keys_file(self._path)
        hashes = [(digest, self.everybody) for digest in self._own]
        for name, spec in specs.items():
            tenant = self.tenants.get(name)
            if tenant is None:
                tenant = self.tenants[name] = Tenant(name, spec, self._clock)
            else:
                tenant.apply(spec)
            hashes += [(digest, tenant) for digest in spec.hashes()]
        self._hashes = hashes
        return len(specs)

    def all(self) -> Iterable[Tenant]:
        """Every tenant there is or was."""
        return [self.everybody, *self.tenants.values()]

    def find(self, headers: Headers) -> Tenant | None:
        """Who calls: by `Authorization: Bearer KEY` or `x-api-key: KEY`; None for a wrong or missing key."""
        if not self._hashes:
            return self.everybody
        scheme, _, token = headers.get("authorization", "").partition(" ")
        bearer = token if scheme.lower() == "bearer" else ""
        given = [hashlib.sha256(key.strip().encode()).digest() for key in (bearer, headers.get("x-api-key", ""))]
        found = [tenant for key in given for known, tenant in self._hashes if hmac.compare_digest(key, known)]
        return found[0] if found else None
