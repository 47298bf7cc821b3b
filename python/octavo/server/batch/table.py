"""Batches and their requests in the database.

Every change of a batch is one transaction, so that a restart finds it whole.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.server.batch.database import Database
from octavo.server.batch.files import Clock, not_found, read_lines, write_file
from octavo.server.batch.lines import LineError, Request, UsageSum, parse_lines, unanswered_line
from octavo.server.errors import ApiError

PENDING, COMPLETED, FAILED = 0, 1, 2
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
MAX_OPEN = 256
PAGE = 256
OUTPUT_EXPIRES_S = 30 * 24 * 3600
_COLUMNS = "seq, id, owner, status, total, completed, failed, output_expires_s, object"
TIMES = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at")


@dataclass(slots=True)
class Batch:
    """A batch as it is stored; `object` holds what the API shows beside status and counts."""

    seq: int
    id: str
    owner: str
    status: str
    total: int
    completed: int
    failed: int
    output_expires_s: int | None
    object: dict[str, Any]

    @classmethod
    def of_row(cls, row: tuple[Any, ...]) -> Batch:
        seq, name, owner, status, total, completed, failed, expires_s, made = row
        return cls(seq, name, owner, status, total, completed, failed, expires_s, json.loads(made))

    def shown(self) -> dict[str, Any]:
        """The batch object of the API."""
        counts = {"total": self.total, "completed": self.completed, "failed": self.failed}
        return {**self.object, "status": self.status, "request_counts": counts}


def _get(connection: sqlite3.Connection, name: str, owner: str | None) -> Batch:
    row = connection.execute(f"SELECT {_COLUMNS} FROM batch WHERE id = ?", (name,)).fetchone()
    if row is None or owner not in (None, row[2]):
        raise not_found("batch", name)
    return Batch.of_row(row)


def _set(connection: sqlite3.Connection, batch: Batch, status: str, **fields: Any) -> Batch:
    """Move a batch to another status."""
    batch.status = status
    batch.object.update(fields)
    connection.execute(
        "UPDATE batch SET status = ?, total = ?, object = ? WHERE seq = ?",
        (status, batch.total, json.dumps(batch.object), batch.seq),
    )
    return batch


class BatchTable:
    """What can happen to batches.

    Args:
        max_requests: Of one batch.
        max_line_bytes: Of one request.
    """

    def __init__(self, database: Database, clock: Clock, *, max_requests: int, max_line_bytes: int) -> None:
        self._database = database
        self._clock = clock
        self._max_requests = max_requests
        self._max_line_bytes = max_line_bytes

    def _now(self) -> int:
        return int(self._clock())

    async def create(
        self,
        *,
        owner: str,
        endpoint: str,
        input_file_id: str,
        window: str,
        window_s: int,
        metadata: Mapping[str, str] | None,
        output_expires_s: int | None,
    ) -> Batch:
        """A new batch, "validating". `ApiError` when the file is not there or too many batches are open."""
        now = self._now()
        name = f"batch_{secrets.token_hex(16)}"
        made = {
            "id": name,
            "object": "batch",
            "endpoint": endpoint,
            "errors": None,
            "input_file_id": input_file_id,
            "completion_window": window,
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": now + window_s,
            **dict.fromkeys(TIMES),
            "usage": None,
            "metadata": dict(metadata) if metadata else None,
        }

        def work(connection: sqlite3.Connection) -> Batch:
            file = connection.execute("SELECT owner FROM file WHERE id = ?", (input_file_id,)).fetchone()
            if file is None or file[0] != owner:
                message = f"no file {input_file_id[:80]!r}"
                raise ApiError(400, message, param="input_file_id", code="invalid_input_file")
            query = f"SELECT count(*) FROM batch WHERE owner = ? AND status IN {OPEN}"
            if connection.execute(query, (owner,)).fetchone()[0] >= MAX_OPEN:
                raise ApiError(
                    429, f"{MAX_OPEN} batches are open already", kind="rate_limit_error", code="too_many_batches"
                )
            connection.execute(
                "INSERT INTO batch (id, owner, status, output_expires_s, object) VALUES (?, ?, 'validating', ?, ?)",
                (name, owner, output_expires_s, json.dumps(made)),
            )
            return _get(connection, name, owner)

        return await self._database.run(work)

    async def get(self, name: str, owner: str | None = None) -> Batch:
        """A batch; 404 for another owner's."""
        return await self._database.run(lambda connection: _get(connection, name, owner))

    async def page(self, owner: str, *, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        """(the newest batches first, whether there are more)."""

        def work(connection: sqlite3.Connection) -> tuple[list[Batch], bool]:
            below = _get(connection, after, owner).seq if after is not None else 2**62
            query = f"SELECT {_COLUMNS} FROM batch WHERE owner = ? AND seq < ? ORDER BY seq DESC LIMIT ?"
            rows = connection.execute(query, (owner, below, limit + 1)).fetchall()
            return [Batch.of_row(row) for row in rows[:limit]], len(rows) > limit

        return await self._database.run(work)

    async def open(self) -> list[str]:
        """Ids of batches that have work left, the oldest first."""
        query = f"SELECT id FROM batch WHERE status IN {OPEN} ORDER BY seq"
        return await self._database.run(lambda connection: [row[0] for row in connection.execute(query)])

    async def validate(self, name: str) -> Batch:
        """Read the input file: requests into the table, or the batch has failed and says why."""

        def work(connection: sqlite3.Connection) -> Batch:
            batch = _get(connection, name, None)
            if batch.status != "validating":
                return batch
            endpoint, file_id = batch.object["endpoint"], batch.object["input_file_id"]
            errors: list[LineError] = []
            parsed = parse_lines(
                read_lines(connection, file_id, self._max_line_bytes),
                endpoint,
                max_requests=self._max_requests,
                max_line_bytes=self._max_line_bytes,
            )
            for found in parsed:
                if isinstance(found, LineError):
                    errors.append(found)
                    continue
                batch.total += 1
                connection.execute(
                    "INSERT INTO item (batch, number, custom_id, body) VALUES (?, ?, ?, ?)",
                    (batch.seq, found.number, found.custom_id, found.body),
                )
            if not errors:
                return _set(connection, batch, "in_progress", in_progress_at=self._now())
            connection.execute("DELETE FROM item WHERE batch = ?", (batch.seq,))
            batch.total = 0
            data = [error.shown() for error in errors]
            return _set(connection, batch, "failed", failed_at=self._now(), errors={"object": "list", "data": data})

        return await self._database.run(work)

    async def pending(self, batch: Batch, after: int) -> list[Request]:
        """The next page of requests that have no answer yet."""
        query = "SELECT number, custom_id, body FROM item WHERE batch = ? AND state = ? AND number > ? ORDER BY number"

        def work(connection: sqlite3.Connection) -> list[Request]:
            rows = connection.execute(f"{query} LIMIT ?", (batch.seq, PENDING, after, PAGE))
            return [Request(*row) for row in rows]

        return await self._database.run(work)

    async def record(self, batch: Batch, request: Request, *, ok: bool, line: str) -> None:
        """A request has its answer."""

        def work(connection: sqlite3.Connection) -> None:
            state, column = (COMPLETED, "completed") if ok else (FAILED, "failed")
            changed = connection.execute(
                "UPDATE item SET state = ?, line = ? WHERE batch = ? AND number = ? AND state = ?",
                (state, line, batch.seq, request.number, PENDING),
            ).rowcount
            connection.execute(f"UPDATE batch SET {column} = {column} + ? WHERE seq = ?", (changed, batch.seq))

        await self._database.run(work)

    async def begin_cancel(self, name: str, owner: str) -> Batch:
        """Ask for a batch's end; one that has ended stays as it is (400)."""

        def work(connection: sqlite3.Connection) -> Batch:
            batch = _get(connection, name, owner)
            if batch.status == "cancelling":
                return batch
            if batch.status not in OPEN:
                raise ApiError(409, f"the batch is {batch.status} already", code="batch_ended")
            return _set(connection, batch, "cancelling", cancelling_at=self._now())

        return await self._database.run(work)

    async def finish(self, name: str, status: str) -> Batch:
        """Write the output and error files, drop the requests, and end as `status`."""

        def work(connection: sqlite3.Connection) -> Batch:
            batch = _get(connection, name, None)
            usage = UsageSum()
            now = self._now()
            files = {
                "output_file_id": self._write(connection, batch, now, self._outputs(connection, batch, usage)),
                "error_file_id": self._write(connection, batch, now, self._errors(connection, batch, status)),
            }
            connection.execute("DELETE FROM item WHERE batch = ?", (batch.seq,))
            ended = {"finalizing_at": now, f"{status}_at": now, "usage": usage.shown()}
            return _set(connection, batch, status, **files, **ended)

        return await self._database.run(work)

    def _outputs(self, connection: sqlite3.Connection, batch: Batch, usage: UsageSum) -> Iterator[bytes]:
        query = "SELECT line FROM item WHERE batch = ? AND state = ? ORDER BY number"
        for (line,) in connection.execute(query, (batch.seq, COMPLETED)):
            usage.add(line)
            yield line.encode() + b"\n"

    def _errors(self, connection: sqlite3.Connection, batch: Batch, status: str) -> Iterator[bytes]:
        query = "SELECT number, custom_id, line FROM item WHERE batch = ? AND state != ? ORDER BY number"
        for number, custom_id, line in connection.execute(query, (batch.seq, COMPLETED)):
            yield (line or unanswered_line(batch.id, number, custom_id, status)).encode() + b"\n"

    def _write(self, connection: sqlite3.Connection, batch: Batch, now: int, lines: Iterator[bytes]) -> str | None:
        """A file of lines; None when there are none."""
        first = next(lines, None)
        if first is None:
            return None

        def all_lines() -> Iterator[bytes]:
            yield first
            yield from lines

        expires_s = batch.output_expires_s or OUTPUT_EXPIRES_S
        return write_file(
            connection,
            all_lines(),
            owner=batch.owner,
            filename=f"{batch.id}_output.jsonl",
            purpose="batch_output",
            created_at=now,
            expires_at=now + expires_s,
        )
