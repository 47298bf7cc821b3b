"""Every error that Octavo raises on purpose. The class says whose mistake it was; the message names the fix.

Users' mistakes are `ValueError`s. The server maps classes to HTTP statuses in one table (server/errors.py); the command
line prints `OctavoError`s as one line and exits with `exit_code`.
"""

from __future__ import annotations


class OctavoError(Exception):
    """Base of all errors below."""

    exit_code = 1


class ConfigError(OctavoError, ValueError):
    """A flag or keyword is unknown, has a bad value, or contradicts another one."""

    exit_code = 2

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelError(OctavoError, ValueError):
    """A model can't be found, read, or run: unknown path, corrupt file, missing tensor, unsupported architecture."""

    exit_code = 2


class RequestError(OctavoError, ValueError):
    """A request is invalid. `param` is the field's name in the API, where one field is at fault."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class OverloadError(OctavoError):
    """The queue is full, or the engine takes no more: the same request may succeed after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineError(OverloadError):
    """The request waited in the queue for longer than it may, and was not begun."""


class EngineDeadError(OctavoError):
    """The engine process ended while the request was in flight."""
