"""Bodies of POST /v1/batches, and the form fields of POST /v1/files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import RequestError
from octavo.server.schema.responses import check_metadata
from octavo.server.schema.unknown import parse_body

UNITS_S = {"m": 60, "h": 3600, "d": 24 * 3600}
MAX_WINDOW_S = 30 * 24 * 3600
LEAST_EXPIRES_S = 3600
MOST_EXPIRES_S = 30 * 24 * 3600
_WINDOW = re.compile(r"([1-9][0-9]{0,4})([mhd])")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpiresAfter:
    """When a file goes."""

    anchor: str
    seconds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadForm:
    """The fields of an upload's form; `expires_after[anchor]` and `expires_after[seconds]` may be there too."""

    file: str
    purpose: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """A batch to be run within `completion_window` (OpenAI's is "24h"; any number of m, h or d up to 30d is taken)."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, Any] | None = None
    output_expires_after: ExpiresAfter | None = None

    @property
    def window_s(self) -> int:
        match = _WINDOW.fullmatch(self.completion_window)
        return int(match[1]) * UNITS_S[match[2]] if match else 0

    @property
    def output_expires_s(self) -> int | None:
        return self.output_expires_after.seconds if self.output_expires_after is not None else None


def parse_batch(body: Mapping[str, Any], endpoints: Sequence[str]) -> BatchRequest:
    """Check a body. `RequestError` names the field at fault."""
    wanted = parse_body(BatchRequest, body)
    if wanted.endpoint not in endpoints:
        raise RequestError(f"endpoint must be one of {', '.join(endpoints)}", param="endpoint")
    if not 0 < wanted.window_s <= MAX_WINDOW_S:
        raise RequestError('completion_window must be like "24h", at most "30d"', param="completion_window")
    check_metadata(wanted.metadata or {})
    if wanted.output_expires_after is not None:
        _check_expiry(wanted.output_expires_after, "output_expires_after")
    return wanted


def parse_expiry(anchor: str | None, seconds: str | None) -> int | None:
    """`expires_after[anchor]` and `expires_after[seconds]` of a form, as seconds."""
    if anchor is None and seconds is None:
        return None
    if anchor is None or seconds is None or not re.fullmatch("[0-9]{1,9}", seconds):
        raise RequestError("expires_after needs anchor and seconds", param="expires_after")
    expiry = ExpiresAfter(anchor=anchor, seconds=int(seconds))
    _check_expiry(expiry, "expires_after")
    return expiry.seconds


def _check_expiry(expiry: ExpiresAfter, param: str) -> None:
    if expiry.anchor != "created_at":
        raise RequestError(f"{param}.anchor must be created_at", param=param)
    if not LEAST_EXPIRES_S <= expiry.seconds <= MOST_EXPIRES_S:
        raise RequestError(f"{param}.seconds must be between {LEAST_EXPIRES_S} and {MOST_EXPIRES_S}", param=param)
