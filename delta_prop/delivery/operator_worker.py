"""Worker that carries out operators' requests from the data directory, and removes files of forgotten sinks.

Requests for one sink are carried out one after another, in the order in which they were made; those for other
sinks concurrently. A request for a sink that is detached or stopped waits until it can be carried out.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import anyio
from anyio.abc import TaskGroup

from delta_prop.delivery.group_cursor import GroupBusy, reset_group
from delta_prop.delivery.operator_requests import (
    OperatorRequest,
    read_requests,
    refuse_request,
    remove_refusals,
    remove_request,
)
from delta_prop.delivery.redelivery import ReplayRequest
from delta_prop.delivery.sink_manager import SinkManager
from delta_prop.platform.ports import World
from delta_prop_broker.disk import Disk
from delta_prop_wire.errors import Refused, UsageError

logger = logging.getLogger("delta_prop")

POLL_S = 1.0
_REQUEST_TIMEOUT_S = 30.0


class OperatorWorker:
    """Carries out requests. A request is removed once the cursors that it changed are stored durably."""

    def __init__(self, disk: Disk, log_id: bytes, sinks: SinkManager, world: World) -> None:
        self._disk = disk
        self._log_id = log_id.hex()
        self._sinks = sinks
        self._threads = world.new_threads()
        self._busy_sinks: set[str] = set()  # sinks for which a request is being carried out
        self.reset_group: Callable[[str, int], Awaitable[bool]] | None = None
        """Set by a server: moves the cursor of a group that is open in it; False if it is not open there."""

    async def begin(self) -> None:
        """Carry out earlier requests, as far as they need no attached sink."""
        with suppress(OSError):  # old reports do no harm
            await self._threads.run(partial(remove_refusals, self._disk))
        await self._try_poll(None)

    async def run(self) -> None:
        """Poll for requests once a second, until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                await anyio.sleep(POLL_S)
                await self._try_poll(tasks)

    async def _try_poll(self, tasks: TaskGroup | None) -> None:
        """Poll for requests; log a disk failure, which the next poll retries."""
        try:
            await self._sinks.quarantines.tidy()
            await self.poll(tasks)
        except OSError as error:
            logger.warning("operators' requests cannot be read (%s); the service retries", error)

    async def poll(self, tasks: TaskGroup | None = None) -> None:
        """Carry out the waiting requests; without `tasks`, only those done at once. Raises OSError."""
        requests = await self._threads.run(partial(read_requests, self._disk))
        # a later request for a sink waits for the earlier one
        blocked_sinks: set[str] = set(self._busy_sinks)
        for path, request in requests.items():
            if request is None or request.log_id != self._log_id:
                logger.warning("%s is not a request to this log, so it is removed", path)
                await self._threads.run(partial(remove_request, self._disk, path))
            elif request.verb == "reset-group":
                await self._carry_out(path, request)
            elif request.sink not in blocked_sinks:
                if request.verb in ("pause", "resume", "rebuild") or request.sink not in self._sinks.runtimes:
                    done = await self._carry_out(path, request)
                else:
                    done = False
                    if tasks is not None:
                        self._busy_sinks.add(request.sink)
                        tasks.start_soon(self._carry_out_later, path, request)
                if not done:
                    blocked_sinks.add(request.sink)

    async def _carry_out_later(self, path: str, request: OperatorRequest) -> None:
        try:
            await self._carry_out(path, request)
        except OSError as error:
            logger.warning("%s was carried out, but cannot be removed: %s", path, error)
        finally:
            self._busy_sinks.discard(request.sink)

    async def _carry_out(self, path: str, request: OperatorRequest) -> bool:
        """Return True if the request is done, durably."""
        finish = partial(remove_request, self._disk, path)
        try:
            done = await self._execute(request)
        except TimeoutError:
            done = False
        except (Refused, UsageError) as error:
            logger.warning("the requested %s of %r was refused: %s", request.verb, request.sink, error)
            done, finish = True, partial(refuse_request, self._disk, path, str(error))
        if done:
            await self._sinks.cursors.write()
            await self._threads.run(finish)
        return done

    async def _execute(self, request: OperatorRequest) -> bool:
        """Return True if the request is done, False if it must wait. Raises Refused, UsageError."""
        sinks, name = self._sinks, request.sink
        if request.verb == "pause":
            sinks.pause(name)
            return True
        if request.verb == "resume":
            sinks.resume(name)
            return True
        if request.verb == "rebuild":
            sinks.rebuild(name)
            return True
        if request.verb == "reset":
            await sinks.reset(name, request.offsets[0], _REQUEST_TIMEOUT_S)
            return True
        if request.verb == "reset-group":
            return await self._reset_group(name, request.offsets[0])
        runtime = sinks.runtimes.get(name)
        if runtime is None or runtime.is_closing:
            return False
        feed = runtime.feed
        if not feed.can_answer:
            return False
        replay = ReplayRequest(frozenset(request.offsets) or None, drop=request.verb == "drop")
        feed.add_request(replay)
        with anyio.move_on_after(_REQUEST_TIMEOUT_S):
            answer = await replay.wait()
            logger.info(
                "the requested %s of sink %r is done: %d applied, %d dropped, %d left in its quarantine",
                request.verb, name, answer.applied, answer.dropped, answer.left,
            )  # fmt: skip
            return True
        return False

    async def _reset_group(self, name: str, offset: int) -> bool:
        """Reset a group where it is open, else in its file; False if another process reads it."""
        if self.reset_group is not None and await self.reset_group(name, offset):
            return True
        log_id = bytes.fromhex(self._log_id)
        try:
            await self._threads.run(partial(reset_group, self._disk, name, log_id, offset))
        except GroupBusy:
            return False
        return True
