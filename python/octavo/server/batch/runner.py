"""Runs what batches ask for, through the app's own endpoints; goes on after a restart where it was.

Not here: when a request may start (room.py), what is written down (table.py).
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets

from starlette.types import ASGIApp

from octavo.server.batch.call import post
from octavo.server.batch.files import Clock
from octavo.server.batch.lines import Request, answer_line
from octavo.server.batch.room import Room
from octavo.server.batch.table import Batch, BatchTable
from octavo.server.context import ServerContext
from octavo.server.tenants.caller import Caller, calling
from octavo.server.tenants.tenant import Tenant

log = logging.getLogger("octavo.server")

PRIORITY = 1000
"""The least urgent that a request of a batch may be; a body may ask for less."""
TRY_AGAIN = (429, 503)
LONGEST_WAIT_S = 30.0


class BatchRunner:
    """One task a batch that has work left.

    Args:
        app: The endpoints, without the gate.
        most: Most requests in flight.
    """

    def __init__(self, context: ServerContext, app: ASGIApp, table: BatchTable, clock: Clock, most: int) -> None:
        self._context = context
        self._app = app
        self._table = table
        self._clock = clock
        self._room = Room(context, most)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._requests: dict[str, asyncio.Task[None]] = {}
        """By batch, the task that runs its requests."""
        self._cancelled: set[str] = set()

    async def resume(self) -> None:
        """Take up every batch that has work left."""
        for name in await self._table.open():
            self.take_up(name)

    def take_up(self, name: str) -> None:
        """Work on a batch until its end, unless that is done already."""
        if name in self._tasks:
            return
        task = asyncio.create_task(self._work(name))
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._tasks.pop(name, None))

    def cancel(self, name: str) -> None:
        """End a batch's requests; what has its answer is kept."""
        self._cancelled.add(name)
        running = self._requests.get(name)
        if running is not None:
            running.cancel()
        self.take_up(name)

    def close(self) -> None:
        """Stop; the database knows how far everything came."""
        for task in [*self._tasks.values(), *self._requests.values()]:
            task.cancel()

    async def _work(self, name: str) -> None:
        try:
            batch = await self._table.validate(name)
            if batch.status == "failed":
                return
            status = "cancelled" if batch.status == "cancelling" else await self._run(batch)
            await self._table.finish(name, status)
        except Exception:
            log.exception("batch %s stopped; it is taken up again at the next start", name)
        finally:
            self._cancelled.discard(name)

    async def _run(self, batch: Batch) -> str:
        """Run the requests; how the batch ended."""
        running = asyncio.create_task(self._run_requests(batch))
        self._requests[batch.id] = running
        if batch.id in self._cancelled:  # asked for while the file was read
            running.cancel()
        try:
            await asyncio.wait({running}, timeout=max(0.0, batch.object["expires_at"] - self._clock()))
            if running.done() and not running.cancelled():
                await running
                return "completed"
            running.cancel()
            await asyncio.wait({running})
            return "cancelled" if batch.id in self._cancelled else "expired"
        finally:
            running.cancel()
            self._requests.pop(batch.id, None)

    async def _run_requests(self, batch: Batch) -> None:
        after = -1
        tenant = self._context.keyring.tenants.get(batch.owner, self._context.keyring.everybody)
        async with asyncio.TaskGroup() as group:
            while page := await self._table.pending(batch, after):
                for request in page:
                    await self._room.enter()
                    group.create_task(self._run_request(batch, request, tenant))
                after = page[-1].number

    async def _run_request(self, batch: Batch, request: Request, tenant: Tenant) -> None:
        request_id = f"batch-{secrets.token_hex(12)}"
        body = json.loads(request.body)
        given = body.get("priority")
        body["priority"] = max(given, PRIORITY) if isinstance(given, int) else PRIORITY
        encoded = json.dumps(body).encode()
        wait_s = 1.0
        try:
            with calling(Caller(tenant, request_id)):
                while True:
                    answer = await post(self._app, batch.object["endpoint"], encoded, request_id)
                    if answer.status not in TRY_AGAIN:
                        break
                    await asyncio.sleep(wait_s)
                    wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        finally:
            self._room.leave()
        line = answer_line(batch.id, request, answer.status, answer.body, request_id)
        await self._table.record(batch, request, ok=answer.status < 400, line=line)
