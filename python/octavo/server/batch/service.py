"""Files and batches of one server: the database, what is stored in it, and the runner, built from the config."""

from __future__ import annotations

import time
from pathlib import Path

from starlette.types import ASGIApp

from octavo.server.batch.database import Database
from octavo.server.batch.files import Clock, FileStore
from octavo.server.batch.runner import BatchRunner
from octavo.server.batch.table import BatchTable
from octavo.server.context import ServerContext


class Batches:
    """Opened with the app; `close` at the end.

    Args:
        folder: Where the database is. ConfigError when it can't be used.
        app: The endpoints that batches may call, without the gate.
        endpoints: Their paths.
    """

    def __init__(
        self, context: ServerContext, folder: Path, app: ASGIApp, endpoints: list[str], clock: Clock = time.time
    ) -> None:
        config = context.config
        self.app = app
        self.endpoints = endpoints
        self._database = Database(folder)
        self.files = FileStore(self._database, config.batch_storage_bytes, clock)
        self.table = BatchTable(
            self._database, clock, max_requests=config.batch_max_requests, max_line_bytes=config.max_body_bytes
        )
        self.runner = BatchRunner(context, app, self.table, clock, config.batch_concurrency)

    def close(self) -> None:
        self.runner.close()
        self._database.close()
