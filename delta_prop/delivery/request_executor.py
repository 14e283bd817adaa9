"""Carries out operators' requests in one open partition, and removes what forgotten sinks have left there."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

import anyio

from delta_prop.delivery.group_cursor import GroupBusy, reset_group
from delta_prop.delivery.operator_requests import OperatorRequest, RequestPlace
from delta_prop.delivery.redelivery import ReplayRequest

if TYPE_CHECKING:
    from delta_prop.delivery.sink_manager import SinkManager
    from delta_prop.partition.partition import Partition
    from delta_prop_broker.disk import Disk

logger = logging.getLogger("delta_prop")

_REQUEST_TIMEOUT_S = 30.0


class StoredJobs(Protocol):
    """The jobs of a server, whose files may have a vector that is to be erased."""

    def check_erasable(self) -> None:
        """Check that no staged part may have the vector. Raises Refused."""

    async def forget_vector(self, vector_id: str) -> None:
        """Remove its id from all files, durably. Raises Refused, OSError."""


class RequestExecutor:
    """Carries out the requests for one partition. `place`: which one it is; `log_id`: of its log."""

    def __init__(self, partition: Partition, sinks: SinkManager, place: RequestPlace, root: Disk) -> None:
        """`partition`: with a log on disk; `root`: the data directory, which has the requests."""
        assert partition.disk is not None
        self.place = place
        self.log_id = partition.log.log_id.hex()
        self._disk = partition.disk
        self._sinks = sinks
        self._threads = partition.world.new_threads()
        sinks.quarantines.requests_disk = root
        self.reset_group: Callable[[str, int], Awaitable[bool]] | None = None
        """Set by a server: moves the cursor of a group that is open in it; False if it is not open there."""
        self.jobs: StoredJobs | None = None
        """Set by a server: its jobs in this partition."""

    def needs_attached(self, request: OperatorRequest) -> bool:
        """True if the request waits for a sink that is attached, so that it may take long."""
        is_quick = request.verb in ("pause", "resume", "rebuild", "reset-group")
        return not is_quick and request.sink in self._sinks.runtimes

    async def tidy(self) -> None:
        """Remove the files of sinks that were forgotten, and the requests for them. Raises OSError."""
        if self._sinks.quarantines.has_forgotten:
            await self._sinks.quarantines.tidy()

    async def execute(self, request: OperatorRequest) -> bool:
        """Return True if the request is done, durably; False if it must wait.

        Raises Refused, UsageError, TimeoutError, OSError.
        """
        if not await self._execute(request):
            return False
        await self._sinks.cursors.write()
        return True

    async def _execute(self, request: OperatorRequest) -> bool:
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
        return await self._replay(request)

    async def _replay(self, request: OperatorRequest) -> bool:
        runtime = self._sinks.runtimes.get(request.sink)
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
                request.verb, request.sink, answer.applied, answer.dropped, answer.left,
            )  # fmt: skip
            return True
        return False

    async def _reset_group(self, name: str, offset: int) -> bool:
        """Reset a group where it is open, else in its file; False if another process reads it."""
        if self.reset_group is not None and await self.reset_group(name, offset):
            return True
        log_id = bytes.fromhex(self.log_id)
        try:
            await self._threads.run(partial(reset_group, self._disk, name, log_id, offset))
        except GroupBusy:
            return False
        return True
