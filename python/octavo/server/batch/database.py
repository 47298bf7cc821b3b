"""The SQLite file that holds files and batches, used by one thread of its own so that nothing waits in the event loop.

Not here: what is read and written (files.py, table.py).
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from octavo.errors import ConfigError

T = TypeVar("T")

NAME = "batches.sqlite3"
VERSION = 1
SCHEMA = """
CREATE TABLE file (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, filename TEXT NOT NULL,
    purpose TEXT NOT NULL, num_bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER
);
CREATE TABLE chunk (
    file INTEGER NOT NULL REFERENCES file(seq) ON DELETE CASCADE, number INTEGER NOT NULL, data BLOB NOT NULL
);
CREATE UNIQUE INDEX chunk_of_file ON chunk(file, number);
CREATE TABLE batch (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, status TEXT NOT NULL,
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    output_expires_s INTEGER, object TEXT NOT NULL
);
CREATE TABLE item (
    batch INTEGER NOT NULL REFERENCES batch(seq) ON DELETE CASCADE, number INTEGER NOT NULL, custom_id TEXT NOT NULL,
    body TEXT NOT NULL, state INTEGER NOT NULL DEFAULT 0, line TEXT
);
CREATE UNIQUE INDEX item_of_batch ON item(batch, number);
CREATE UNIQUE INDEX item_by_custom_id ON item(batch, custom_id);
"""


class Database:
    """Opens (or makes) the file in a folder and holds it alone.

    Raises:
        ConfigError: The folder can't be used, the file is no such database, or another server holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._thread = ThreadPoolExecutor(1, "octavo-batch")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(folder / NAME, timeout=0.0, check_same_thread=False)
            self._open()
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise ConfigError(f"--batch-dir: {folder} is used by another server", "batch_dir") from error
            raise ConfigError(f"--batch-dir: can't open {folder / NAME}: {error}", "batch_dir") from error
        except FileExistsError as error:
            raise ConfigError(f"--batch-dir: {folder} is a file, not a folder", "batch_dir") from error
        except (OSError, sqlite3.DatabaseError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"--batch-dir: can't use {folder}: {reason}", "batch_dir") from error

    def _open(self) -> None:
        connection = self._connection
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("BEGIN EXCLUSIVE")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        connection.commit()
        if version == 0:
            connection.executescript(f"BEGIN;{SCHEMA}PRAGMA user_version = {VERSION};COMMIT;")
        elif version != VERSION:
            raise sqlite3.DatabaseError(f"{NAME} has version {version}, this server writes {VERSION}")

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do work on the connection, as one transaction."""

        def transaction() -> T:
            with self._connection:
                return work(self._connection)

        return await asyncio.get_running_loop().run_in_executor(self._thread, transaction)

    def close(self) -> None:
        """Wait for the work in hand, then let go of the file."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._connection.close()
