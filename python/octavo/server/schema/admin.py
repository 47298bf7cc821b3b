"""Bodies of the /admin routes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest:
    """The call to end, by its `x-request-id` or by the id of its answer."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequest:
    """Take no more calls; with `exit`, end like on SIGTERM."""

    exit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsRequest:
    """What is to change; see `Settings`."""

    log_level: str | None = None
    log_requests: bool | None = None
    log_prompts: bool | None = None
    drain_timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRequest:
    """An empty body, or an object without meaning."""
