"""Carries out what operators ask through the data directory, and removes what forgotten sinks left there.

Requests for one sink are carried out one after the other, in the order in which they were made; those for
others at the same time. What cannot be done now, as the sink is away or stands, stays until it can.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import anyio

from delta_prop.group_places import GroupBusy, reset_group
from delta_prop.operator_requests import read_requests, refuse_request, remove_refusals, remove_request
from delta_prop.route.late import ReplayRequest
from delta_prop_wire.errors import Refused, UsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskGroup

    from delta_prop.attachments import Attachments
    from delta_prop.operator_requests import OperatorRequest
    from delta_prop.ports import World
    from delta_prop_broker.disk import Disk

logger = logging.getLogger("delta_prop")

LOOK_S = 1.0
_PATIENCE_S = 30.0


class Operating:
    """`keep_cursors` writes down how far sinks are: that is durable before a request is removed."""

    def __init__(
        self,
        disk: Disk,
        log_id: bytes,
        sinks: Attachments,
        world: World,
        keep_cursors: Callable[[], Awaitable[None]],
    ) -> None:
        self._disk = disk
        self._log_id = log_id.hex()
        self._sinks = sinks
        self._threads = world.new_threads()
        self._keep_cursors = keep_cursors
        self._busy: set[str] = set()  # sinks for which a request is being carried out
        self.reset_group: Callable[[str, int], Awaitable[bool]] | None = None
        """Moves a group that a server here has, which sets this; False where it has it not."""

    async def begin(self) -> None:
        """Do what was asked before the service was there, as far as that needs no attached sink."""
        with suppress(OSError):  # they are in nobody's way
            await self._threads.run(partial(remove_refusals, self._disk))
        await self._try_to_look(None)

    async def run(self) -> None:
        """Look once a second, until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                await anyio.sleep(LOOK_S)
                await self._try_to_look(tasks)

    async def _try_to_look(self, tasks: TaskGroup | None) -> None:
        """Where the disk fails that is told, and tried again a second later."""
        try:
            await self._sinks.quarantines.tidy()
            await self.look(tasks)
        except OSError as error:
            logger.warning("what operators ask for cannot be seen to, which is tried again: %s", error)

    async def look(self, tasks: TaskGroup | None = None) -> None:
        """Carry out what is asked for; without `tasks` only what is done at once. Raises OSError."""
        found = await self._threads.run(partial(read_requests, self._disk))
        passed: set[str] = set(self._busy)  # what comes later for a sink waits for what came first
        for path, request in found.items():
            if request is None or request.log_id != self._log_id:
                logger.warning("%s is no request to this log, and is removed", path)
                await self._threads.run(partial(remove_request, self._disk, path))
            elif request.verb == "reset-group":
                await self._carry_out(path, request)
            elif request.sink not in passed:
                if request.verb in ("pause", "resume", "rebuild") or request.sink not in self._sinks.attached:
                    done = await self._carry_out(path, request)
                else:
                    done = False
                    if tasks is not None:
                        self._busy.add(request.sink)
                        tasks.start_soon(self._in_its_time, path, request)
                if not done:
                    passed.add(request.sink)

    async def _in_its_time(self, path: str, request: OperatorRequest) -> None:
        try:
            await self._carry_out(path, request)
        except OSError as error:
            logger.warning("%s was carried out, and cannot be removed: %s", path, error)
        finally:
            self._busy.discard(request.sink)

    async def _carry_out(self, path: str, request: OperatorRequest) -> bool:
        """Whether it is done, durably."""
        end = partial(remove_request, self._disk, path)
        try:
            done = await self._do(request)
        except TimeoutError:
            done = False
        except (Refused, UsageError) as error:
            logger.warning("%s of %r, as asked, was not done: %s", request.verb, request.sink, error)
            done, end = True, partial(refuse_request, self._disk, path, str(error))
        if done:
            await self._keep_cursors()
            await self._threads.run(end)
        return done

    async def _do(self, request: OperatorRequest) -> bool:
        """Whether it is done; else it stays. Raises Refused, UsageError where it cannot be."""
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
            await sinks.reset(name, request.offsets[0], _PATIENCE_S)
            return True
        if request.verb == "reset-group":
            return await self._reset_group(name, request.offsets[0])
        attached = sinks.attached.get(name)
        if attached is None or attached.closing:
            return False
        feed = attached.require_feed()
        if not feed.answers:
            return False
        asked = ReplayRequest(frozenset(request.offsets) or None, drop=request.verb == "drop")
        feed.request(asked)
        with anyio.move_on_after(_PATIENCE_S):
            answer = await asked.wait()
            logger.info(
                "%s of sink %r, as asked: %d applied, %d dropped, %d left in its quarantine",
                request.verb, name, answer.applied, answer.dropped, answer.left,
            )  # fmt: skip
            return True
        return False

    async def _reset_group(self, name: str, offset: int) -> bool:
        """Have it moved by the server here that has it, else in its file; later if it is read elsewhere."""
        if self.reset_group is not None and await self.reset_group(name, offset):
            return True
        log_id = bytes.fromhex(self._log_id)
        try:
            await self._threads.run(partial(reset_group, self._disk, name, log_id, offset))
        except GroupBusy:
            return False
        return True
