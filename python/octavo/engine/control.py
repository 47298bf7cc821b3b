"""What parent and engine process say to each other besides frames: JSON lines over a socket pair.

Parent to child: the start message, later "stop"; child to parent: progress, then ready or the error that prevented it.
The end of the stream tells each of the other's death. Requests and outputs go through the frame socket (Rust).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from octavo.config import ENGINE_SECTIONS, EngineConfig
from octavo.errors import ConfigError, ModelError, OctavoError

ERRORS: dict[str, type[OctavoError]] = {"ConfigError": ConfigError, "ModelError": ModelError}


def encode(kind: str, **values: Any) -> bytes:
    """One message as a line."""
    return json.dumps({"kind": kind, **values}).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class Start:
    """What the child is told first."""

    config: EngineConfig
    socket_path: str
    """Where it serves frames."""
    log_level: int
    """The parent's: the least severe of the standard library's levels that is shown."""
    log_format: str = "text"

    def encode(self) -> bytes:
        return encode("start", **asdict(self))

    @classmethod
    def decode(cls, line: bytes) -> Start:
        message = json.loads(line)
        sections = {name: ENGINE_SECTIONS[name](**values) for name, values in message["config"].items()}
        return cls(EngineConfig(**sections), message["socket_path"], message["log_level"], message["log_format"])


def error_message(error: Exception) -> bytes:
    """An error before readiness; anything but an `OctavoError` is Octavo's own fault and keeps its class's name."""
    if isinstance(error, OctavoError):
        return encode("error", error=type(error).__name__, text=str(error), exit_code=error.exit_code)
    return encode("error", error="", text=f"the engine could not start: {type(error).__name__}: {error}", exit_code=1)


def read_error(message: dict[str, Any]) -> OctavoError:
    """The same error in the parent."""
    error = ERRORS.get(message["error"], OctavoError)(message["text"])
    error.exit_code = message["exit_code"]
    return error
