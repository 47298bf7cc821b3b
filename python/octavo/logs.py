"""How log lines look: text for people, or one JSON object a line. API and engine process set it up alike.

A record may carry more than its message: `log.info("…", extra={"fields": {...}})`. Fields are shown as JSON only.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any

TEXT = "%(levelname).1s %(asctime)s %(name)s: %(message)s"
FORMATS = ("text", "json")


class JsonFormatter(logging.Formatter):
    """{"time", "level", "logger", "message", …fields}; times in UTC."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(level: int | str, kind: str) -> None:
    """Set the process's logging up, once; `kind` is one of `FORMATS`."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if kind == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level, handlers=[handler])
    logging.captureWarnings(kind == "json")


def add_filter(added: logging.Filter) -> None:
    """All of this process's lines pass it."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(added)


def kind_in_use() -> str:
    """The format that this process logs in."""
    handlers = logging.getLogger().handlers
    return "json" if any(isinstance(handler.formatter, JsonFormatter) for handler in handlers) else "text"
