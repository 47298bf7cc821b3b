"""Lines of a batch's input file: what each must be, and what its line in the output or error file is."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import RequestError
from octavo.server.schema.parse import load_json

MAX_ERRORS = 100
# Fields of bodies that no batch can honour.
REFUSED = ("stream", "background")


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a batch; `body` is JSON."""

    number: int
    custom_id: str
    body: str


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a file can't be run; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None

    def shown(self) -> dict[str, Any]:
        return {"code": self.code, "line": self.line, "message": self.message, "param": self.param}


def parse_lines(
    lines: Iterable[bytes], endpoint: str, *, max_requests: int, max_line_bytes: int
) -> Iterator[Request | LineError]:
    """Requests and errors, in order; stops after `MAX_ERRORS` errors."""
    num_requests = num_errors = 0
    seen: set[str] = set()
    for i, line in enumerate(lines, 1):
        if not line.strip():
            continue
        num_requests += 1
        if num_requests > max_requests:
            yield LineError("too_many_requests", f"more than {max_requests} requests (--batch-max-requests)", i)
            return
        found = _parse(line, i, endpoint, seen, max_line_bytes)
        yield found
        num_errors += isinstance(found, LineError)
        if num_errors >= MAX_ERRORS:
            return
    if not num_requests:
        yield LineError("empty_file", "the input file holds no requests")


def _parse(line: bytes, number: int, endpoint: str, seen: set[str], max_bytes: int) -> Request | LineError:
    if len(line) > max_bytes:
        return LineError("line_too_long", f"the line has more than {max_bytes} bytes (--max-body-bytes)", number)
    try:
        value = load_json(line)
    except RequestError as error:
        return LineError("invalid_json_line", str(error).replace("the body", "the line"), number)
    custom_id, body = value.get("custom_id"), value.get("body")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= 512:
        return LineError("invalid_custom_id", "custom_id must be a string of 1 to 512 characters", number, "custom_id")
    if custom_id in seen:
        return LineError("duplicate_custom_id", f"the custom_id {custom_id!r} comes twice", number, "custom_id")
    seen.add(custom_id)
    if value.get("method") != "POST":
        return LineError("invalid_method", "method must be POST", number, "method")
    if value.get("url") != endpoint:
        return LineError("mismatched_url", f"url must be the batch's endpoint, {endpoint}", number, "url")
    if not isinstance(body, dict):
        return LineError("missing_body", "body must be an object", number, "body")
    for name in REFUSED:
        if body.get(name) not in (None, False):
            return LineError("unsupported_field", f"{name} can't be used in a batch", number, f"body.{name}")
    return Request(number, custom_id, json.dumps(body))


def answer_line(batch_id: str, request: Request, status: int, body: bytes, request_id: str) -> str:
    """The line of a request that was answered."""
    try:
        value: Any = json.loads(body)
    except ValueError:
        value = body.decode("utf-8", "replace")
    response = {"status_code": status, "request_id": request_id, "body": value}
    return _line(batch_id, request.number, request.custom_id, response, None)


def unanswered_line(batch_id: str, number: int, custom_id: str, status: str) -> str:
    """The line of a request that was not run, as its batch expired or was cancelled."""
    error = {"code": f"batch_{status}", "message": f"this request was not run: the batch was {status}"}
    return _line(batch_id, number, custom_id, None, error)


def _line(batch_id: str, number: int, custom_id: str, response: Any, error: Any) -> str:
    name = f"batch_req_{batch_id.removeprefix('batch_')}_{number}"
    return json.dumps({"id": name, "custom_id": custom_id, "response": response, "error": error})


class UsageSum:
    """Token usage of a batch, summed over the bodies of its answers."""

    def __init__(self) -> None:
        self.input = self.output = self.cached = self.reasoning = 0

    def add(self, line: str) -> None:
        """Count an output line; bodies of every endpoint, in either of OpenAI's forms."""
        body = json.loads(line)["response"]["body"]
        usage = (body.get("usage") if isinstance(body, dict) else None) or {}
        self.input += usage.get("prompt_tokens", usage.get("input_tokens", 0))
        self.output += usage.get("completion_tokens", usage.get("output_tokens", 0))
        self.cached += _detail(usage, ("prompt_tokens_details", "input_tokens_details"), "cached_tokens")
        self.reasoning += _detail(usage, ("completion_tokens_details", "output_tokens_details"), "reasoning_tokens")

    def shown(self) -> dict[str, Any]:
        return {
            "input_tokens": self.input,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.output,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.input + self.output,
        }


def _detail(usage: Mapping[str, Any], groups: tuple[str, ...], name: str) -> int:
    return sum((usage.get(group) or {}).get(name, 0) for group in groups)
