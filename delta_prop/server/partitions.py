"""The partitions that a server serves: found by their names, opened at their first use, checked in requests.

A connection works with one partition at a time: the one that its hello names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from delta_prop.server.groups import Groups
from delta_prop.server.jobs import Jobs
from delta_prop.server.permissions import ALL_PERMISSIONS, Permissions
from delta_prop.server.server_context import ServicePressure
from delta_prop.server.stored_ranges import read_ranges
from delta_prop_broker.catalogue.catalogue import Catalogue
from delta_prop_broker.catalogue.stream import Stream, check_partition
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.errors import DeltaPropError, Refused, UsageError
from delta_prop_wire.frames import (
    Backpressure,
    PartitionRange,
    PressureLevel,
    StreamDescription,
)
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.stamp import DEFAULT_LOG, LogName

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from anyio.abc import TaskGroup

    from delta_prop.api.propagator import Propagator
    from delta_prop.delivery.backpressure.pacer import Pressure
    from delta_prop.delivery.sink_manager import SinkManager
    from delta_prop.partition.partition import Partition
    from delta_prop.platform.ports import Threads, World
    from delta_prop.server.settings import ServerSettings

OPEN_TIMEOUT_S = 60.0
"""Seconds for which a request waits for the opening of its partition."""
_RETRY_MS = 1_000


class ServedStreams(Protocol):
    """The streams behind a server: those of a data directory, or the one of a propagator."""

    @property
    def catalogue(self) -> Catalogue:
        """The streams that there are now."""

    @property
    def world(self) -> World:
        """The clock, the disk and the network of all partitions."""

    async def open_partition(self, stream: Stream, number: int) -> Propagator:
        """Return the propagator of a partition, opened if need be. Raises DeltaPropError, OSError."""

    async def release(self, name: LogName) -> None:
        """Close a partition that `open_partition` has returned, if nobody else uses it."""

    async def create(
        self,
        name: str,
        partitions: int = 1,
        *,
        settings: Mapping[str, Any] | None = None,
        if_not_exists: bool = False,
        dry_run: bool = False,
    ) -> Stream:
        """Create a stream. Raises Refused, UsageError, OSError."""

    async def alter(self, name: str, changes: Mapping[str, Any], *, dry_run: bool = False) -> Stream:
        """Change settings of a stream. Raises Refused, UsageError, OSError."""

    async def delete(self, name: str, *, dry_run: bool = False) -> Stream:
        """Delete a stream. Raises Refused, UsageError, OSError."""

    async def truncate(self, name: str, before: int, partition: int = 0, *, dry_run: bool = False) -> Stream:
        """Remove the rows of a partition below an offset. Raises Refused, UsageError, OSError."""

    async def erase(
        self,
        name: str,
        vector_id: str,
        namespace: str | None = None,
        *,
        timeout_s: float = 60.0,
        dry_run: bool = False,
    ) -> Stream:
        """Erase a vector from all files. Raises Refused, UsageError, OSError."""


class SingleStream:
    """The default stream of one propagator, which belongs to a program; there are no others."""

    def __init__(self, propagator: Propagator) -> None:
        self.catalogue = Catalogue()
        self._propagator = propagator

    @property
    def world(self) -> World:
        return self._propagator.internals().partition.world

    async def open_partition(self, stream: Stream, number: int) -> Propagator:
        check_partition(stream, number)
        return self._propagator

    async def release(self, name: LogName) -> None:
        """Do nothing: the propagator belongs to the program."""

    async def create(self, name: str, partitions: int = 1, **_options: Any) -> Stream:
        raise _unsupported()

    async def alter(self, name: str, changes: Mapping[str, Any], *, dry_run: bool = False) -> Stream:
        raise _unsupported()

    async def delete(self, name: str, *, dry_run: bool = False) -> Stream:
        raise _unsupported()

    async def truncate(self, name: str, before: int, partition: int = 0, *, dry_run: bool = False) -> Stream:
        raise _unsupported()

    async def erase(
        self,
        name: str,
        vector_id: str,
        namespace: str | None = None,
        *,
        timeout_s: float = 60.0,
        dry_run: bool = False,
    ) -> Stream:
        stream = self.catalogue.require(name)
        if not dry_run:
            await self._propagator.erase(vector_id, namespace, timeout_s=timeout_s)
        return stream


def _unsupported() -> UsageError:
    return UsageError(
        "streams: this service has one propagator, so only the default stream: serve the streams of a data "
        "directory (delta_prop.Streams, or `delta-prop serve`)"
    )


class PartitionClients(Protocol):
    """The connections of a server."""

    def send_pressure(self, served: ServedPartition, frame: Backpressure) -> None:
        """Send backpressure advice to those that work with a partition."""


@dataclass(slots=True, eq=False)
class ServedPartition:
    """An open partition, with what connections share about it. `used_at`: when a connection last used it."""

    name: LogName
    stream: str
    propagator: Propagator
    partition: Partition
    sinks: SinkManager
    groups: Groups
    jobs: Jobs
    pressure: ServicePressure
    used_at: float
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)

    async def run(self, clients: PartitionClients) -> None:
        """Run the tasks of the groups and the jobs, and report backpressure, until cancelled by `scope`."""
        try:
            with self.scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self.groups.run)
                    tasks.start_soon(self.jobs.run)
                    tasks.start_soon(self._report_pressure, clients)
        finally:
            self.ended.set()

    async def end(self) -> None:
        """End the tasks, once groups and jobs have stored what they know."""
        self.scope.cancel()
        await self.ended.wait()

    async def _report_pressure(self, clients: PartitionClients) -> None:
        last_level = PressureLevel.OK
        async for pressure in self.propagator.pressure_changes():
            self.pressure.level = pressure.level
            if pressure.level or last_level:
                clients.send_pressure(self, _make_backpressure(pressure, self.pressure.next_number()))
            last_level = pressure.level


def _make_backpressure(pressure: Pressure, number: int) -> Backpressure:
    return Backpressure(
        number,
        level=pressure.level,
        depth=pressure.depth,
        capacity=pressure.capacity,
        rate=pressure.rate_limit,
        retry_after_ms=pressure.retry_after_ms,
    )


class Partitions:
    """The partitions of one server. `streams`: where they come from; `default`: open from the start."""

    def __init__(self, streams: ServedStreams, settings: ServerSettings, clients: PartitionClients) -> None:
        self.streams = streams
        self.default: ServedPartition
        self.creating = anyio.Lock()
        """Held while a stream is created, so that the bounds of their number hold."""
        self._settings = settings
        self._clients = clients
        self._served: dict[LogName, ServedPartition] = {}
        self._opening: dict[LogName, anyio.Event] = {}
        self._tasks: TaskGroup
        self._threads: Threads  # reads the files of closed partitions

    async def start(self, tasks: TaskGroup) -> None:
        """Open the default partition; `tasks` own what partitions need. Raises as `open`."""
        self._tasks = tasks
        self._threads = self.streams.world.new_threads()
        self.default = await self.open(DEFAULT_LOG)

    # --- questions

    def all(self) -> list[ServedPartition]:
        """Return the open partitions, in the order of their names."""
        return [self._served[name] for name in sorted(self._served)]

    def find(self, name: LogName) -> ServedPartition | None:
        """Return a partition if it is open."""
        return self._served.get(name)

    def check(self, name: LogName) -> Stream:
        """Return the stream of a partition. Raises Refused (UNKNOWN_STREAM, WRONG_PARTITION)."""
        stream = self.streams.catalogue.find(name.stream)
        check_partition(stream, name.partition)
        return stream

    def describe(self, rights: Permissions = ALL_PERMISSIONS) -> list[StreamDescription]:
        """Describe all streams that a token may use, with the ranges of open partitions."""
        streams = self.streams.catalogue.streams.values()
        return [self.describe_one(stream) for stream in streams if rights.can_use_stream(stream.name)]

    def describe_one(self, stream: Stream) -> StreamDescription:
        """Describe a stream, with the ranges of its open partitions."""
        ranges = [_range_of(each) for each in self._open_partitions(stream)]
        return _description_of(stream, ranges)

    async def describe_fully(self, stream_name: str) -> StreamDescription:
        """Describe a stream, with the ranges of all partitions that were ever used.

        A closed one is read from its files; it is opened only if it was not closed cleanly. Raises Refused.
        """
        stream = self.streams.catalogue.require(stream_name)
        ranges = await self._stored_ranges(stream)
        current = self.streams.catalogue.require(stream_name)
        if current.stream_id != stream.stream_id:  # it was deleted meanwhile, and created anew
            ranges = {}
        ranges |= {each.partition: each for each in self.describe_one(current).partitions}
        return _description_of(current, [ranges[number] for number in sorted(ranges)])

    async def _stored_ranges(self, stream: Stream) -> dict[int, PartitionRange]:
        """Return the ranges of the partitions that have files, by number. Raises Refused."""
        disk = self.default.partition.disk
        if disk is None:
            return {}
        try:
            stored = await self._threads.run(partial(read_ranges, disk, stream))
        except OSError as error:
            raise Refused(
                ErrorCode.LOG_FAILED,
                f"stream {stream.name!r}: its directory cannot be read: {error}: try again, or ask the "
                "operator",
                retry_after_ms=_RETRY_MS,
            ) from None
        for number in stored.unclear:
            name = LogName(stream.stream_id, number)
            async with explain_open_failure(name):
                stored.ranges[number] = _range_of(await self.open(name))
        return stored.ranges

    def _open_partitions(self, stream: Stream) -> list[ServedPartition]:
        """Return the open partitions of a stream, in order; asks for each, or looks through all open ones."""
        if stream.partitions > len(self._served):
            names = sorted(name for name in self._served if name.stream == stream.stream_id)
            return [self._served[name] for name in names]
        served = [self._served.get(LogName(stream.stream_id, number)) for number in range(stream.partitions)]
        return [each for each in served if each is not None]

    # --- opening and closing

    async def open(self, name: LogName) -> ServedPartition:
        """Return a partition, opened if need be. Raises Refused, DeltaPropError, OSError."""
        stream = self.check(name)
        while (opening := self._opening.get(name)) is not None:
            await opening.wait()
        served = self._served.get(name)
        if served is not None:
            return served
        opening = self._opening[name] = anyio.Event()
        try:
            propagator = await self.streams.open_partition(stream, name.partition)
            internals = propagator.internals()
            partition = internals.partition
            served = ServedPartition(
                name,
                stream.name,
                propagator,
                partition,
                internals.sinks,
                Groups(partition.disk, partition.log, partition.world),
                Jobs(partition, self._settings),
                ServicePressure(),
                partition.world.clock.now(),
            )
            if internals.request_executor is not None:
                internals.request_executor.reset_group = served.groups.reset
                internals.request_executor.jobs = served.jobs
            self._served[name] = served
            self._tasks.start_soon(served.run, self._clients)
            return served
        finally:
            del self._opening[name]
            opening.set()

    def forget(self, name: LogName) -> ServedPartition | None:
        """Return a partition that closes; from now on a hello that names it waits until it opens again."""
        return self._served.pop(name, None)

    def close_unused(self, used: Set[LogName], now: float) -> None:
        """Close the partitions that no connection has worked with for `partition_idle_s`."""
        for name, served in self._served.items():
            if name in used or served is self.default or served.jobs.counts.active:
                served.used_at = now
            elif now - served.used_at > self._settings.partition_idle_s and name not in self._opening:
                self._opening[name] = anyio.Event()
                self._tasks.start_soon(self._close, name)

    async def _close(self, name: LogName) -> None:
        try:
            served = self.forget(name)
            if served is not None:
                await served.end()
            await self.streams.release(name)
        finally:
            self._opening.pop(name).set()


def _description_of(stream: Stream, ranges: Sequence[PartitionRange]) -> StreamDescription:
    return StreamDescription(
        stream.name, stream.stream_id, tuple(ranges), stream.partitions, stream.settings.to_json()
    )


def _range_of(served: ServedPartition) -> PartitionRange:
    log = served.partition.log
    end = Cursor(log.log_id, log.epoch, log.high_watermark)
    return PartitionRange(served.name.partition, log.start_offset, end)


@asynccontextmanager
async def explain_open_failure(name: LogName) -> AsyncIterator[None]:
    """Raise Refused (LOG_FAILED) for any reason why a partition does not open within its time."""
    cause: str
    try:
        with anyio.fail_after(OPEN_TIMEOUT_S):
            yield
        return
    except Refused:
        raise
    except TimeoutError:
        cause = f"it has not opened within {OPEN_TIMEOUT_S:g} s"
    except (DeltaPropError, OSError) as error:
        cause = str(error)
    raise Refused(
        ErrorCode.LOG_FAILED,
        f"partition {name.partition} of stream {name.stream} cannot be opened: {cause}: try again, or ask "
        "the operator",
        retry_after_ms=_RETRY_MS,
    )
