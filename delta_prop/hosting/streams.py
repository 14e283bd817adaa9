"""All streams of a data directory inside a program: `async with Streams(data=DIR) as streams:`.

Each partition is a propagator of its own, which is opened at its first use; that of the default stream at
once. A stream is listed in the catalogue before its files exist, and no longer once they are removed.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from delta_prop.api.propagator import Propagator
from delta_prop.api.settings import Settings, check_data
from delta_prop.calls.argument_checks import check_instance
from delta_prop.delivery.operator_requests import RequestPlace
from delta_prop.delivery.operator_worker import OperatorWorker
from delta_prop.hosting.hosted_partition import HostedPartition
from delta_prop.hosting.request_hosts import RequestHosts
from delta_prop.hosting.shared_threads import SharedThreads
from delta_prop.platform.world import real_world
from delta_prop_broker.catalogue.catalogue import Catalogue
from delta_prop_broker.catalogue.store import place_of, read_catalogue, remove_deleted, write_catalogue
from delta_prop_broker.catalogue.stream import (
    DEFAULT_ID,
    DEFAULT_STREAM,
    QUOTAS,
    Stream,
    StreamSettings,
    check_partition,
)
from delta_prop_broker.log.data_directory import DataDirectory
from delta_prop_sinks.argument_checks import check_texts
from delta_prop_wire.delta import namespace_of
from delta_prop_wire.errors import UsageError
from delta_prop_wire.murmur import partition_of
from delta_prop_wire.stamp import LogName

if TYPE_CHECKING:
    from delta_prop.platform.ports import World
    from delta_prop_broker.log.settings import LogSettings

logger = logging.getLogger("delta_prop")

_LIVE_SETTINGS = frozenset({"retention_s", "retention_bytes", "tombstone_retention_s", *QUOTAS})


class Streams:
    """The streams of one data directory, which no other process has open meanwhile.

    *Resources*: a task per open partition, and what its propagator owns; all end with the `async with`.
    `settings` and `log` hold for each partition; a stream's own settings replace some of those of its logs.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        data: str | Path,
        log: LogSettings | None = None,
        world: World | None = None,
    ) -> None:
        """Touches nothing; the directory `data` is created if it is missing."""
        settings = Settings() if settings is None else settings
        self.settings = check_instance("settings", settings, Settings, "delta_prop.Settings(…)")
        path, self._log_settings = check_data(data, log)
        if path is None:
            raise UsageError("data is None: streams are stored in a directory: give data=DIR")
        self._path = path
        self._custom_world = world
        self._catalogue_lock = anyio.Lock()
        self._partitions: dict[LogName, HostedPartition] = {}
        self._pinned: set[LogName] = set()  # those that `open` has returned
        self.on_close: Callable[[LogName], Awaitable[None]] | None = None
        """Set by a server: called before a partition of a deleted stream closes."""

    # --- opening and closing

    async def __aenter__(self) -> Streams:
        world = self._world = self._custom_world or real_world()
        self._threads = world.new_threads()
        open_directory = partial(
            DataDirectory.open,
            world.open_disk(self._path),
            reserve_bytes=self._log_settings.reserve_bytes,
            clock=world.clock,
        )
        self._data = await self._threads.run(open_directory)
        try:
            self._catalogue = await self._threads.run(self._read_catalogue)
        except BaseException:
            self._data.close()
            raise
        self._operator_worker = OperatorWorker(
            self._data.disk, RequestHosts(self, self._partitions, self._data.disk), world
        )
        self._operator_scope = anyio.CancelScope()
        self._shared_threads = SharedThreads(world)
        self._partition_world = await self._shared_threads.__aenter__()
        self._tasks = await anyio.create_task_group().__aenter__()
        try:
            await self._operator_worker.begin()
            await self.open_partition(self._catalogue.require(DEFAULT_STREAM), 0)
            self._tasks.start_soon(self._carry_out_requests)
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    def _read_catalogue(self) -> Catalogue:
        return remove_deleted(self._data.disk, read_catalogue(self._data.disk))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._operator_scope.cancel()
        partitions = list(self._partitions.values())
        try:
            with anyio.CancelScope(shield=True):
                for partition in partitions:
                    partition.begin_close()
                for partition in partitions:
                    await partition.closed.wait()
            self._tasks.cancel_scope.cancel()
            await self._tasks.__aexit__(None, None, None)
        finally:
            await self._shared_threads.__aexit__(kind, error, trace)
            self._data.close()
        failures = [partition.failure for partition in partitions if partition.failure is not None]
        if error is None and failures:
            raise (
                failures[0] if len(failures) == 1 else ExceptionGroup("partitions failed to close", failures)
            )

    async def _carry_out_requests(self) -> None:
        with self._operator_scope:
            await self._operator_worker.run()

    # --- the catalogue

    @property
    def world(self) -> World:
        """The clock, the disk and the network of all partitions."""
        return self._world

    @property
    def catalogue(self) -> Catalogue:
        """The streams that there are now."""
        return self._catalogue

    async def create(
        self,
        name: str,
        partitions: int = 1,
        *,
        settings: Mapping[str, Any] | None = None,
        if_not_exists: bool = False,
        dry_run: bool = False,
    ) -> Stream:
        """Create a stream; durable when this returns. `settings`: fields of StreamSettings, by name.

        `if_not_exists`: return the stream if it exists with as many partitions and these settings.
        `dry_run`: only check. Raises UsageError, OSError.
        """
        async with self._catalogue_lock:
            created = self._catalogue.create(
                name,
                partitions=partitions,
                settings=StreamSettings().changed(dict(settings or {})),
                now_us=self._world.clock.wall_us(),
                if_not_exists=if_not_exists,
            )
            await self._adopt(created, dry_run=dry_run)
            return created.require(name)

    async def alter(self, name: str, changes: Mapping[str, Any], *, dry_run: bool = False) -> Stream:
        """Change settings of a stream, by name; None resets one to the service's. Durable when this returns.

        Open partitions have a new retention at once; other settings come with their next opening, at once but
        for the default stream. Raises Refused (UNKNOWN_STREAM), UsageError, OSError.
        """
        async with self._catalogue_lock:
            altered = self._catalogue.alter(name, changes)
            await self._adopt(altered, dry_run=dry_run)
            stream = altered.require(name)
            if dry_run:
                return stream
            if stream.stream_id != DEFAULT_ID and not _LIVE_SETTINGS.issuperset(changes):
                with anyio.CancelScope(shield=True):
                    await self._close_partitions(stream)
            for number in range(stream.partitions):
                partition = self._partitions.get(LogName(stream.stream_id, number))
                if partition is not None:
                    partition.alter_retention(stream.settings.log_settings(self._log_settings))
            return stream

    async def delete(self, name: str, *, dry_run: bool = False) -> Stream:
        """Delete a stream with all its rows and cursors; return what it was.

        The stream is gone, durably, before its partitions close and its files are removed. Raises Refused
        (UNKNOWN_STREAM), UsageError, OSError.
        """
        async with self._catalogue_lock:
            stream = self._catalogue.require(name)
            await self._adopt(self._catalogue.delete(name), dry_run=dry_run)
            if not dry_run:
                with anyio.CancelScope(shield=True):
                    await self._close_partitions(stream)
                    self._catalogue = await self._threads.run(
                        partial(remove_deleted, self._data.disk, self._catalogue)
                    )
            return stream

    async def truncate(self, name: str, before: int, partition: int = 0, *, dry_run: bool = False) -> Stream:
        """Remove the rows of a partition below the offset `before`, in the background; return the stream.

        Whole segments are removed, once no sink needs them; a compacted stream keeps the latest state of each
        vector in its snapshot. Raises Refused (UNKNOWN_STREAM, WRONG_PARTITION), UsageError, OSError.
        """
        stream = self._catalogue.require(name)
        _, propagator = await self._hold(stream, partition, uses=0)  # it stays open for the removal
        storage = propagator.internals().partition.storage
        assert storage is not None
        if not dry_run:
            storage.truncate(before)
        return stream

    async def erase(
        self,
        name: str,
        vector_id: str,
        namespace: str | None = None,
        *,
        timeout_s: float = 60.0,
        dry_run: bool = False,
    ) -> Stream:
        """Delete a vector, and remove all that files of its partition have of it; return the stream.

        As `Propagator.erase`. Raises as that; Refused (UNKNOWN_STREAM).
        """
        async with self._partition_of(name, vector_id, namespace) as (stream, propagator):
            if not dry_run:
                await propagator.erase(vector_id, namespace, timeout_s=timeout_s)
            return stream

    async def has_vector(self, name: str, vector_id: str, namespace: str | None = None) -> bool | None:
        """Return True if the log of a stream has a vector, also a deleted one; None if it cannot be told.

        `namespace`: as in `erase`. Raises Refused (UNKNOWN_STREAM), LogCorrupted, FormatUnknown, OSError.
        """
        async with self._partition_of(name, vector_id, namespace) as (_, propagator):
            namespace = namespace or namespace_of(vector_id)
            if propagator.head(vector_id, namespace) is not None:
                return True
            vectors = propagator.internals().partition.pipeline.appender.vectors
            return None if vectors.is_incomplete(namespace) else False

    @asynccontextmanager
    async def _partition_of(
        self, name: str, vector_id: str, namespace: str | None
    ) -> AsyncIterator[tuple[Stream, Propagator]]:
        """Yield a stream, and the propagator of the partition of a vector, which stays open meanwhile."""
        check_texts(vector_id=vector_id)
        stream = self._catalogue.require(name)
        number = partition_of(namespace or namespace_of(vector_id), vector_id, stream.partitions)
        partition, propagator = await self._hold(stream, number)
        try:
            yield stream, propagator
        finally:
            await self._drop_user(LogName(stream.stream_id, number), partition)

    async def _adopt(self, catalogue: Catalogue, *, dry_run: bool) -> None:
        if catalogue is self._catalogue or dry_run:
            return
        with anyio.CancelScope(shield=True):  # the file and this object must say the same
            await self._threads.run(partial(write_catalogue, self._data.disk, catalogue))
            self._catalogue = catalogue

    async def _close_partitions(self, stream: Stream) -> None:
        for number in range(stream.partitions):
            name = LogName(stream.stream_id, number)
            partition = self._partitions.get(name)
            if partition is None:
                continue
            partition.is_leaving = True
            if self.on_close is not None:
                await self.on_close(name)
            partition.begin_close()
            await partition.closed.wait()

    # --- partitions

    async def open(self, stream: str = DEFAULT_STREAM, partition: int = 0) -> Propagator:
        """Return the propagator of a partition, opened at its first use; it closes with the streams.

        Raises Refused (UNKNOWN_STREAM, WRONG_PARTITION), LogCorrupted, FormatUnknown, OSError.
        """
        found = self._catalogue.require(stream)
        propagator = await self.open_partition(found, partition)
        self._pinned.add(LogName(found.stream_id, partition))
        return propagator

    async def open_partition(self, stream: Stream, number: int) -> Propagator:
        """Return the propagator of a partition of a stream of the catalogue, until `release`.

        Raises as `open`.
        """
        return (await self._hold(stream, number))[1]

    async def _hold(
        self, stream: Stream, number: int, *, uses: int = 1
    ) -> tuple[HostedPartition, Propagator]:
        """Return a partition, opened if need be, with as many more uses. Raises as `open`."""
        check_partition(stream, number)
        name = LogName(stream.stream_id, number)
        while True:
            while (partition := self._partitions.get(name)) is not None and partition.is_closing:
                await partition.closed.wait()  # two open logs would write the same files
                await anyio.lowlevel.checkpoint()
            stream = self._catalogue.find(stream.stream_id)  # it may have been altered or deleted meanwhile
            if partition is None:
                partition = self._partitions[name] = self._new_partition(stream, number)
                self._tasks.start_soon(self._host, name, partition)
            partition.users += uses
            propagator = None
            try:
                propagator = await partition.wait_open()
            finally:
                if propagator is None:
                    partition.users -= uses
            if propagator is not None:
                return partition, propagator

    def _new_partition(self, stream: Stream, number: int) -> HostedPartition:
        return HostedPartition(
            self._data,
            place_of(stream, number),
            request_place=RequestPlace(stream.name, number),
            worker=self._operator_worker,
            settings=self.settings,
            log_settings=stream.settings.log_settings(self._log_settings),
            world=self._partition_world,
        )

    async def release(self, name: LogName) -> None:
        """Close a partition that `open_partition` has returned, if nobody else uses it."""
        partition = self._partitions.get(name)
        if partition is not None:
            await self._drop_user(name, partition)

    async def _drop_user(self, name: LogName, partition: HostedPartition) -> None:
        partition.users -= 1
        if partition.users <= 0 and name not in self._pinned:
            partition.begin_close()
            await partition.closed.wait()

    async def _host(self, name: LogName, partition: HostedPartition) -> None:
        try:
            await partition.run()
        finally:
            if self._partitions.get(name) is partition:
                del self._partitions[name]

    def open_partitions(self) -> dict[LogName, Propagator]:
        """Return the open partitions by name, in order."""
        found = {name: partition.propagator for name, partition in sorted(self._partitions.items())}
        return {name: propagator for name, propagator in found.items() if propagator is not None}
