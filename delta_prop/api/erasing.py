"""Erasing a vector: deletes it, and removes from all files what they have of it.

The rows that the log has of the vector, its delete included, are replaced by a snapshot that has no tombstone
of it; then checkpoints, quarantines and sinks forget it. A crash on the way leaves the vector as it was, or
deleted: erase it again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

import anyio

from delta_prop.delivery.redelivery import ForgetRequest
from delta_prop_broker.segments.paths import JOBS
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.delivery.request_executor import StoredJobs
    from delta_prop.delivery.sink_manager import SinkManager
    from delta_prop.delivery.sink_runtime import SinkRuntime
    from delta_prop.partition.partition import Partition
    from delta_prop.partition.storage.storage import Storage

POLL_S = 0.1
"""Seconds between two looks at whether the rows are gone."""


async def erase_vector(
    partition: Partition,
    sinks: SinkManager,
    vector: tuple[str, str],
    *,
    jobs: StoredJobs | None,
    delete: Callable[[], Awaitable[object]],
    timeout_s: float,
) -> None:
    """Erase a vector (namespace, vector id) of a partition. `delete` publishes its delete, durably.

    `jobs`: of the server; None without one, when no file of jobs may be there.

    Raises Refused (CONFLICT: it was written again; PROCESSING_FAILED: not done in time), UsageError, OSError.
    """
    storage = partition.storage
    if storage is None or not storage.log.settings.compact:
        raise UsageError(
            "erase: only a log on disk with compaction replaces its rows by a snapshot; without one, rows go "
            "when they are older than retention_s: delete the vector, and wait, or truncate the log"
        )
    await _check_jobs(partition, jobs)
    erasure = _Erasure(partition, storage, sinks, vector)
    storage.log.begin_erase(*vector)
    try:
        with anyio.fail_after(timeout_s):
            await erasure.run(delete)
            if jobs is not None:
                await jobs.forget_vector(vector[1])
    except TimeoutError:
        raise Refused(
            ErrorCode.PROCESSING_FAILED,
            f"vector {vector[1]!r} of namespace {vector[0]!r} is not erased after {timeout_s:g} s: "
            f"{erasure.waits_for}; correct that, and erase it again",
            retry_after_ms=1_000,
        ) from None
    finally:
        storage.log.end_erase(*vector)


async def _check_jobs(partition: Partition, jobs: StoredJobs | None) -> None:
    """Check that no staged job may have the vector, before it is deleted. Raises Refused, UsageError."""
    if jobs is not None:
        jobs.check_erasable()
        return
    assert partition.disk is not None
    list_jobs: Callable[[], list[str]] = partial(partition.disk.list, JOBS)
    if await partition.world.new_threads().run(list_jobs):
        raise UsageError(
            "erase: the directory has files of a server's jobs, which may name the vector: erase it in the "
            "server, with `delta-prop streams erase`"
        )


class _Erasure:
    """One vector that is being erased. `waits_for`: the reason why it is not done."""

    def __init__(
        self, partition: Partition, storage: Storage, sinks: SinkManager, vector: tuple[str, str]
    ) -> None:
        self.waits_for = "its delete is not acknowledged"
        self._partition = partition
        self._storage = storage
        self._sinks = sinks
        self._vector = vector

    async def run(self, delete: Callable[[], Awaitable[object]]) -> None:
        """Go through all steps. Raises Refused, OSError."""
        await delete()
        end = self._storage.replace_rows()
        for runtime in self._stored_sinks():
            self.waits_for = f"sink {runtime.name!r} has not applied the delete, before offset {end}"
            await runtime.feed.wait(end, committed=True)
        await self._poll(partial(self._is_replayed_from, end))
        await self._poll(partial(self._are_rows_removed, end))
        await self._poll(self._is_checkpoint_replaced)
        for runtime in self._stored_sinks():
            self.waits_for = f"sink {runtime.name!r} has not removed it from its files"
            request = ForgetRequest([self._vector], self._storage.log.tombstones_below)
            runtime.feed.add_request(request)
            await request.wait()

    def _stored_sinks(self) -> list[SinkRuntime]:
        """Return the attached sinks, without subscriptions, which have no files."""
        return [runtime for runtime in self._sinks.runtimes.values() if runtime.cursor is not None]

    def _quarantined_offset(self, runtime: SinkRuntime) -> int | None:
        """Return the offset of a quarantined delta of a batch that has one of the vector."""
        for record in runtime.feed.quarantine.records():
            batch = record.logged.batch
            if self._vector in zip(batch.namespaces, batch.keys, strict=True):
                return record.offset
        return None

    async def _poll(self, is_done: Callable[[], Awaitable[bool]]) -> None:
        while True:
            if await is_done():
                return
            await anyio.sleep(POLL_S)

    async def _is_replayed_from(self, end: int) -> bool:
        """Have a checkpoint written, so that a start replays no row below `end`; return False on failure."""
        self.waits_for = "no checkpoint could be written"
        checkpointer, log = self._storage.checkpointer, self._storage.log
        if checkpointer is not None and (log.needed_from or 0) < end:
            await checkpointer.write()
        return (log.needed_from or 0) >= end

    async def _is_checkpoint_replaced(self) -> bool:
        """Have the checkpoints replaced; return False if that failed."""
        self.waits_for = "no checkpoint could be written"
        checkpointer = self._storage.checkpointer
        return checkpointer is not None and await checkpointer.forget(*self._vector)

    async def _are_rows_removed(self, end: int) -> bool:
        """Return True if no file of the log has rows below `end`, and no sink may need or hold them."""
        log, cursors = self._storage.log, self._sinks.cursors
        if away := sorted(cursors.names - self._sinks.runtimes.keys()):
            self.waits_for = f"sink {away[0]!r} is detached, and may have it: attach it, or forget it"
            return False
        for runtime in self._stored_sinks():
            if (offset := self._quarantined_offset(runtime)) is not None:
                self.waits_for = f"sink {runtime.name!r} has offset {offset} in quarantine: replay or drop it"
                return False
        self.waits_for = f"the log still has rows below offset {end}"
        if log.start_offset < end:
            self._storage.remove_replaced()
            return False
        return not await self._partition.world.new_threads().run(partial(log.has_files_of, end))
