"""Worker that carries out operators' requests from the data directory: one per process, for all partitions.

Requests for one sink are carried out one after another, in the order in which they were made; those for other
sinks concurrently. A request for a sink that is detached or stopped waits until it can be carried out. A
partition that is not open is opened for its requests, which its opening carries out, and closed again.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Protocol

import anyio

from delta_prop.delivery.operator_requests import (
    OperatorRequest,
    RequestPlace,
    read_requests,
    refuse_request,
    remove_refusals,
    remove_request,
)
from delta_prop_wire.errors import Refused, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from anyio.abc import TaskGroup

    from delta_prop.delivery.request_executor import RequestExecutor
    from delta_prop.platform.ports import World
    from delta_prop_broker.disk import Disk

logger = logging.getLogger("delta_prop")

POLL_S = 1.0
OPENINGS_MAX = 4
"""Maximum partitions that are being opened for requests at a time."""
REOPEN_S = 30.0
"""Seconds until a partition that could not be opened is tried again."""
OTHER_LOG = "the stream was deleted, or its log was replaced: repeat the command"


class RequestPartitions(Protocol):
    """The partitions of a process."""

    def executors(self) -> Iterable[RequestExecutor]:
        """Return those of the open partitions."""

    def find_executor(self, place: RequestPlace) -> RequestExecutor | None:
        """Return that of a partition if it is open."""

    def can_open(self, place: RequestPlace) -> bool:
        """Return True if a partition, which is not open, can be opened for requests.

        Raises Refused if it does not exist, so that no process will carry them out.
        """

    async def read_log_id(self, place: RequestPlace) -> str | None:
        """Return the id of a partition's log; None if it has none yet. Raises LogCorrupted, OSError."""

    async def open_for_requests(self, place: RequestPlace) -> None:
        """Open a partition, which carries out its requests, and close it if nobody else uses it."""


class OnePartition:
    """The partition of a program that has no other; requests for others wait for a process that has them."""

    def __init__(self, executor: RequestExecutor) -> None:
        self._executor = executor

    def executors(self) -> Iterable[RequestExecutor]:
        return (self._executor,)

    def find_executor(self, place: RequestPlace) -> RequestExecutor | None:
        return self._executor if place == self._executor.place else None

    def can_open(self, place: RequestPlace) -> bool:
        return False

    async def read_log_id(self, place: RequestPlace) -> str | None:
        raise AssertionError(place)

    async def open_for_requests(self, place: RequestPlace) -> None:
        raise AssertionError(place)


class OperatorWorker:
    """Carries out requests. A request is removed once the cursors that it changed are stored durably."""

    def __init__(self, disk: Disk, partitions: RequestPartitions, world: World) -> None:
        """`disk`: the data directory."""
        self._disk = disk
        self._partitions = partitions
        self._threads = world.new_threads()
        self._busy_sinks: set[tuple[RequestPlace, str]] = set()
        """Those for which a request is being carried out."""
        self._opening: set[RequestPlace] = set()
        self._openings = anyio.Semaphore(OPENINGS_MAX)
        self._done: set[str] = set()
        """Paths of requests that are carried out, but perhaps not removed."""
        self._opened_at: dict[str, float] = {}
        """By the path of a request that waits: its partition is not opened for it before this time."""

    async def begin(self) -> None:
        """Remove old reports, and files that cannot be parsed."""
        with suppress(OSError):  # old reports do no harm
            await self._threads.run(partial(remove_refusals, self._disk))
        try:
            await self._read()
        except OSError as error:
            _warn_unreadable(error)

    async def carry_out_earlier(self, executor: RequestExecutor) -> None:
        """Carry out earlier requests for a partition that opens, as far as they need no attached sink."""
        try:
            requests = await self._read()
            own = {path: each for path, each in requests.items() if each.place == executor.place}
            await self._carry_out_all(executor, own, None)
        except OSError as error:
            _warn_unreadable(error)

    async def run(self) -> None:
        """Poll for requests once a second, until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                await anyio.sleep(POLL_S)
                for executor in self._partitions.executors():
                    try:
                        await executor.tidy()
                    except OSError as error:
                        logger.warning("files of forgotten sinks stay for now (%s)", error)
                try:
                    await self.poll(tasks)
                except OSError as error:
                    _warn_unreadable(error)

    async def poll(self, tasks: TaskGroup) -> None:
        """Carry out the waiting requests. Raises OSError."""
        requests = await self._read()
        self._done.intersection_update(requests)
        self._opened_at = {path: at for path, at in self._opened_at.items() if path in requests}
        by_place: dict[RequestPlace, dict[str, OperatorRequest]] = {}
        for path, request in requests.items():
            by_place.setdefault(request.place, {})[path] = request
        for place, waiting in by_place.items():
            executor = self._partitions.find_executor(place)
            if executor is not None:
                await self._carry_out_all(executor, waiting, tasks)
            else:
                await self._begin_opening(place, waiting, tasks)

    async def _read(self) -> dict[str, OperatorRequest]:
        """Return the requests by path, oldest first; remove files that cannot be parsed. Raises OSError."""
        requests = await self._threads.run(partial(read_requests, self._disk))
        for path in [path for path, request in requests.items() if request is None]:
            logger.warning("%s is not a request, so it is removed", path)
            await self._threads.run(partial(remove_request, self._disk, path))
        return {path: request for path, request in requests.items() if request is not None}

    # --- partitions that are not open

    async def _begin_opening(
        self, place: RequestPlace, waiting: Mapping[str, OperatorRequest], tasks: TaskGroup
    ) -> None:
        """Open a partition for its requests, in a task of its own."""
        try:
            can_open = self._partitions.can_open(place)
        except Refused as error:
            for path, request in waiting.items():
                await self._refuse(path, request, error)
            return
        now = anyio.current_time()
        due = {path: each for path, each in waiting.items() if self._opened_at.get(path, 0.0) <= now}
        if can_open and due and place not in self._opening:
            self._opening.add(place)
            tasks.start_soon(self._open, place, due)

    async def _open(self, place: RequestPlace, due: Mapping[str, OperatorRequest]) -> None:
        retry_at = inf  # what waits afterwards needs an attached sink, so others will open the partition
        try:
            async with self._openings:
                log_id = await self._partitions.read_log_id(place)
                if any(request.log_id == log_id for request in due.values()):
                    await self._partitions.open_for_requests(place)
                else:
                    for path, request in due.items():
                        await self._refuse(path, request, UsageError(OTHER_LOG))
        except Exception as failure:  # of one partition, which must not end the requests for others
            logger.warning("partition %s cannot be opened for operators' requests: %s", place, failure)
            retry_at = anyio.current_time() + REOPEN_S
        finally:
            self._opening.discard(place)
        self._opened_at |= dict.fromkeys(due, retry_at)

    # --- open partitions

    async def _carry_out_all(
        self, executor: RequestExecutor, waiting: Mapping[str, OperatorRequest], tasks: TaskGroup | None
    ) -> None:
        """Carry out requests for one partition; without `tasks`, only those done at once."""
        # a later request for a sink waits for the earlier one
        blocked_sinks = {sink for place, sink in self._busy_sinks if place == executor.place}
        for path, request in waiting.items():
            if request.log_id != executor.log_id:
                await self._refuse(path, request, UsageError(OTHER_LOG))
            elif request.verb == "reset-group":
                await self._carry_out(executor, path, request)
            elif request.sink not in blocked_sinks:
                done = False
                if not executor.needs_attached(request):
                    done = await self._carry_out(executor, path, request)
                elif tasks is not None:
                    self._busy_sinks.add((executor.place, request.sink))
                    tasks.start_soon(self._carry_out_later, executor, path, request)
                if not done:
                    blocked_sinks.add(request.sink)

    async def _carry_out_later(self, executor: RequestExecutor, path: str, request: OperatorRequest) -> None:
        try:
            await self._carry_out(executor, path, request)
        finally:
            self._busy_sinks.discard((executor.place, request.sink))

    async def _carry_out(self, executor: RequestExecutor, path: str, request: OperatorRequest) -> bool:
        """Return True if the request is done, durably."""
        try:
            if path not in self._done and not await executor.execute(request):
                return False
            self._done.add(path)
            await self._threads.run(partial(remove_request, self._disk, path))
        except TimeoutError:
            return False
        except (Refused, UsageError) as error:
            await self._refuse(path, request, error)
        except OSError as error:
            logger.warning("%s cannot be carried out, or removed (%s); the service retries", path, error)
            return False
        return True

    async def _refuse(self, path: str, request: OperatorRequest, error: Refused | UsageError) -> None:
        logger.warning(
            "the requested %s of %r in partition %s was refused: %s",
            request.verb, request.sink, request.place, error,
        )  # fmt: skip
        try:
            await self._threads.run(partial(refuse_request, self._disk, path, str(error)))
        except OSError as failure:
            logger.warning("%s cannot be removed (%s); the service retries", path, failure)


def _warn_unreadable(error: OSError) -> None:
    logger.warning("operators' requests cannot be read (%s); the service retries", error)
