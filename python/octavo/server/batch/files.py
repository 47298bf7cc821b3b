"""Stored files: their objects as the API shows them, and their contents in chunks."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, BinaryIO

from octavo.server.batch.database import Database
from octavo.server.errors import ApiError

CHUNK_BYTES = 1024 * 1024
Clock = Callable[[], float]
_COLUMNS = "id, owner, filename, purpose, num_bytes, created_at, expires_at"


def not_found(kind: str, name: str) -> ApiError:
    return ApiError(404, f"no {kind} {name[:80]!r}", param="id", code="not_found")


def shown(row: tuple[Any, ...]) -> dict[str, Any]:
    """The file object of a row of `_COLUMNS`."""
    name, _, filename, purpose, num_bytes, created_at, expires_at = row
    return {
        "id": name,
        "object": "file",
        "bytes": num_bytes,
        "created_at": created_at,
        "expires_at": expires_at,
        "filename": filename,
        "purpose": purpose,
        "status": "processed",
    }


def write_file(
    connection: sqlite3.Connection,
    pieces: Iterable[bytes],
    *,
    owner: str,
    filename: str,
    purpose: str,
    created_at: int,
    expires_at: int | None,
) -> str:
    """Store a file within a transaction; its id."""
    name = f"file-{secrets.token_hex(16)}"
    values = (name, owner, filename, purpose, 0, created_at, expires_at)
    seq = connection.execute(f"INSERT INTO file ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)", values).lastrowid
    num_bytes = 0
    for number, piece in enumerate(_even(pieces)):
        num_bytes += len(piece)
        connection.execute("INSERT INTO chunk (file, number, data) VALUES (?, ?, ?)", (seq, number, piece))
    connection.execute("UPDATE file SET num_bytes = ? WHERE seq = ?", (num_bytes, seq))
    return name


def _even(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in chunks of about `CHUNK_BYTES`."""
    buffer = bytearray()
    for piece in pieces:
        buffer += piece
        if len(buffer) >= CHUNK_BYTES:
            yield bytes(buffer)
            buffer.clear()
    if buffer:
        yield bytes(buffer)


def read_lines(connection: sqlite3.Connection, name: str, max_line_bytes: int) -> Iterator[bytes]:
    """The lines of a stored file, without their ends; a line that is longer is the last one."""
    rest = b""
    query = "SELECT data FROM chunk JOIN file ON file.seq = chunk.file WHERE file.id = ? ORDER BY number"
    for (data,) in connection.execute(query, (name,)):
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
        if len(rest) > max_line_bytes:
            break
    if rest:
        yield rest


class FileStore:
    """Files of all owners; everybody sees only his own.

    Args:
        max_total_bytes: Over all stored files; more is refused.
    """

    def __init__(self, database: Database, max_total_bytes: int, clock: Clock) -> None:
        self._database = database
        self._max_total_bytes = max_total_bytes
        self._clock = clock

    async def add(
        self, source: BinaryIO, *, owner: str, filename: str, purpose: str, expires_s: int | None
    ) -> dict[str, Any]:
        """Store an upload; its object. `ApiError` (413) when there is no room for it."""
        now = int(self._clock())

        def work(connection: sqlite3.Connection) -> dict[str, Any]:
            source.seek(0, 2)
            stored = connection.execute("SELECT coalesce(sum(num_bytes), 0) FROM file").fetchone()[0]
            if stored + source.tell() > self._max_total_bytes:
                message = f"the server's store of files is full ({self._max_total_bytes} bytes, --batch-storage-bytes)"
                raise ApiError(413, message, code="storage_full")
            source.seek(0)
            name = write_file(
                connection,
                iter(lambda: source.read(CHUNK_BYTES), b""),
                owner=owner,
                filename=filename,
                purpose=purpose,
                created_at=now,
                expires_at=None if expires_s is None else now + expires_s,
            )
            return shown(_row(connection, name, owner))

        return await self._database.run(work)

    async def get(self, name: str, owner: str) -> dict[str, Any]:
        """A file's object; 404 for another's or an expired one."""
        await self.purge()
        return shown(await self._database.run(lambda connection: _row(connection, name, owner)))

    async def page(
        self, owner: str, *, after: str | None, limit: int, ascending: bool, purpose: str | None
    ) -> tuple[list[dict[str, Any]], bool]:
        """(objects in order of creation, whether there are more)."""
        await self.purge()
        order, beyond = ("ASC", ">") if ascending else ("DESC", "<")

        def work(connection: sqlite3.Connection) -> tuple[list[dict[str, Any]], bool]:
            clause, values = "owner = ?", [owner]
            if purpose is not None:
                clause, values = f"{clause} AND purpose = ?", [*values, purpose]
            if after is not None:
                _row(connection, after, owner)
                clause = f"{clause} AND seq {beyond} (SELECT seq FROM file WHERE id = ?)"
                values = [*values, after]
            query = f"SELECT {_COLUMNS} FROM file WHERE {clause} ORDER BY seq {order} LIMIT ?"
            rows = connection.execute(query, (*values, limit + 1)).fetchall()
            return [shown(row) for row in rows[:limit]], len(rows) > limit

        return await self._database.run(work)

    async def delete(self, name: str, owner: str) -> None:
        """Forget a file."""

        def work(connection: sqlite3.Connection) -> None:
            _row(connection, name, owner)
            connection.execute("DELETE FROM file WHERE id = ?", (name,))

        await self._database.run(work)

    async def content(self, name: str, owner: str) -> AsyncIterator[bytes]:
        """The file's bytes, chunk by chunk."""
        await self.get(name, owner)
        query = "SELECT data FROM chunk JOIN file ON file.seq = chunk.file WHERE file.id = ? AND number = ?"
        number = 0
        while True:

            def work(connection: sqlite3.Connection, at: int = number) -> Any:
                return connection.execute(query, (name, at)).fetchone()

            row = await self._database.run(work)
            if row is None:
                return
            yield row[0]
            number += 1

    async def purge(self) -> None:
        """Delete what has expired."""
        now = int(self._clock())
        await self._database.run(lambda c: c.execute("DELETE FROM file WHERE expires_at <= ?", (now,)).rowcount)


def _row(connection: sqlite3.Connection, name: str, owner: str) -> tuple[Any, ...]:
    query = f"SELECT {_COLUMNS} FROM file WHERE id = ? AND owner = ?"
    row: tuple[Any, ...] | None = connection.execute(query, (name, owner)).fetchone()
    if row is None:
        raise not_found("file", name)
    return row
