"""The storage sink: stores the latest state of every vector in a SQLite file, together with its cursor.

A flush writes changed rows, each row's last delta, the cursor and the highest Lamport number, synced, in one
or several transactions. The cursor moves with the last one, and a delta that its row includes already is
skipped; so each delta takes effect in the file exactly once, even after a crash. By default the sink uses
write-behind: changes are visible to `get` at once and durable within `flush_s`; `mode="through"` commits
before `apply` returns. `ResidentVectors` holds the states and folds the deltas.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import anyio
import anyio.lowlevel
import numpy as np
from numpy.typing import NDArray

from delta_prop_sinks.argument_checks import (
    check_above_zero,
    check_at_least,
    check_kind,
    check_path,
    check_sink_name,
    check_texts,
)
from delta_prop_sinks.image_manager import ImageManager
from delta_prop_sinks.resident import ResidentVectors
from delta_prop_sinks.sink import (
    Delivery,
    RejectDelta,
    ResumePoint,
    SinkContext,
    SinkFailure,
    StopSink,
    TryAgain,
)
from delta_prop_sinks.storage_file import ImageName, StorageFile, StorageFileError, StorageFileLost
from delta_prop_sinks.storage_rows import DirtyRows, StoredRow, dirty_groups, dirty_slots
from delta_prop_sinks.storage_tombstones import StoredTombstones
from delta_prop_sinks.vector_table import VectorTable
from delta_prop_wire.algebra import VectorState
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Head
from delta_prop_wire.errors import UsageError
from delta_prop_wire.state_rows import StateRow

T = TypeVar("T")

_PAGE_ROWS = 1000
_IDLE_S = 2.0
"""After this time without a change, the write-ahead log is checkpointed."""


@dataclass(frozen=True, slots=True)
class StorageStatistics:
    """The file's progress, and counts of writes. `failure`: the reason why the last flush failed, or None.

    `dirty_rows`: rows in memory that have changed since they were last collected for a write.
    `rows_read_back`: evicted rows that were read from the file again, because a delta changes them.
    `image`: the state of the image beside the file, from which a start is fast.
    """

    applied_offset: int
    committed_offset: int
    dirty_rows: int
    commits: int
    rows_written: int
    rows_read_back: int
    wal_bytes: int
    failure: str | None
    last_flush_s: float
    image: str


class StorageSink:
    """Stores vectors in the file at `path`, which one process may use at a time.

    `flush_s` is the pause between flushes of `background`; if no task runs that, `apply` flushes after
    `rows_unflushed_max` rows. Above `wal_bytes_max`, SQLite's write-ahead log is truncated. `close_s` limits
    the writes of `aclose`. To share one copy of the vectors with an index, give both the same `resident`
    and attach this sink first.

    From `image_rows_min` rows on, the sink writes an image of all rows beside the file, so that a start need
    not read them one by one. It writes one when it is closed, and, at most every `image_s` seconds, after a
    quarter of the rows has changed. An image takes the vectors' own bytes and
    some 50 bytes per row on the disk, twice that while a new one is written.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        name: str = "storage",
        resident: ResidentVectors | None = None,
        mode: Literal["behind", "through"] = "behind",
        flush_s: float = 0.1,
        rows_unflushed_max: int = 20_000,
        wal_bytes_max: int = 64 << 20,
        close_s: float = 10.0,
        image_rows_min: int = 100_000,
        image_s: float = 300.0,
    ) -> None:
        check_path(path)
        if mode not in ("behind", "through"):
            raise UsageError(f'mode {mode!r} is not "behind" or "through": give one of them')
        check_above_zero(flush_s=flush_s, close_s=close_s)
        check_at_least(1, rows_unflushed_max=rows_unflushed_max, wal_bytes_max=wal_bytes_max)
        check_at_least(1, image_rows_min=image_rows_min)
        check_at_least(0, image_s=image_s)
        self.name = check_sink_name(name)
        self.mode = mode
        self.flush_s = flush_s
        self.rows_unflushed_max = rows_unflushed_max
        self.close_s = close_s
        self.resident = (
            ResidentVectors() if resident is None else check_kind("resident", resident, ResidentVectors)
        )
        if self.resident.residency.stored:
            raise UsageError("the resident vectors have a storage sink already: give each sink its own")
        self.resident.residency.stored = True
        self.image_s = image_s
        self._file = StorageFile(path, wal_bytes_max=wal_bytes_max)
        self._image_manager = ImageManager(self._file, self.resident, rows_min=image_rows_min)
        self._context: SinkContext | None = None
        self._applied_offset = self._committed_offset = 0
        self._reach = 0  # rows of the file may include deltas up to this offset, though the cursor is lower
        self._unflushed_rows = 0
        self._background_count = 0
        self._failure: str | None = None
        self._commits = self._rows_written = self._rows_read_back = 0
        self._last_flush_s = 0.0
        self._wal_is_checkpointed = True
        self._work_ready = anyio.Event()
        self._flushing = anyio.Lock()

    def check_file(self) -> None:
        """Check that the file can be used by this sink; changes nothing. Raises UsageError."""
        self._file.check_header()

    async def open(self, context: SinkContext) -> ResumePoint:
        """Open or create the file and load the rows that fit into memory. Raises UsageError, StopSink."""
        resident, file = self.resident, self._file
        try:
            file_state = await self._run_on_file(context, lambda: file.connect(context.log_id))
            resident.enter(context)
            resident.note_lamport_before_log(file_state.lamport_before)
            resident.progress.note_lamport(file_state.lamport)
            self._context = context
            if not await self._image_manager.load(file_state, context.log_id, _FileThread(self, context)):
                await self._load(context)
        except BaseException as error:
            self._context = None
            await self._release(context)
            if isinstance(error, SinkFailure):
                raise StopSink(error.reason) from error
            raise
        cursor = file_state.cursor or Cursor(context.log_id, context.epoch, 0)
        is_invalid = file_state.rebuilding or resident.rebuilding
        is_same_log = cursor.log_id == context.log_id and not is_invalid
        self._applied_offset = self._committed_offset = cursor.next_offset if is_same_log else 0
        self._reach = file_state.reach if is_same_log else 0
        resident.note_loaded(self._applied_offset)
        return ResumePoint(cursor, file_state.lamport, is_invalid, self._reach)

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Fold the rows; in `through` mode, also commit them. Raises TryAgain while the file is unusable,
        StopSink if it is corrupted or deleted, and RejectDelta.
        """
        context = self._require_open()
        if self._failure is not None:
            await self.flush()
        await self._read_back_missing(deliveries, context)
        resident = self.resident
        try:
            await resident.apply(deliveries, context)
        except RejectDelta as rejected:
            await self._flush_prefix(rejected, now=self.mode == "through" or deliveries[-1].redelivered)
            raise
        is_redelivered = deliveries[-1].redelivered
        if not is_redelivered:  # a redelivered row does not show that the rows below it are applied
            self._applied_offset = max(self._applied_offset, deliveries[-1].next_offset)
        self._work_ready.set()
        # A row released from quarantine may be below the cursor: it would not come again after a crash.
        if (
            is_redelivered
            or self.mode == "through"
            or (not self._background_count and self._is_flush_due(deliveries))
        ):
            await self.flush()
        if resident.is_full:
            await self._evict()

    def apply_now(self, deliveries: Sequence[Delivery]) -> bool:
        """Fold and return True in write-behind mode, if memory holds all vectors and is not full."""
        context, resident = self._context, self.resident
        if (
            context is None
            or self._failure is not None
            or self.mode == "through"
            or not (self._background_count and resident.residency.complete)
            or deliveries[-1].redelivered
            or resident.is_full
        ):
            return False
        if not resident.apply_now(deliveries, context):
            return False
        self._applied_offset = max(self._applied_offset, deliveries[-1].next_offset)
        self._work_ready.set()
        return True

    @property
    def deltas_per_call(self) -> int:
        """A large number while deltas cause refolds, else 0."""
        return self.resident.deltas_per_call

    async def forget(self, erased: Sequence[tuple[str, str]], before: int) -> None:
        """Remove tombstones from memory and file, as `HoldsTombstones` says. Raises TryAgain, StopSink.

        All changes are flushed first, so that no delta is redelivered. If vectors are erased, the images are
        removed, and SQLite writes the whole file anew, on the sink's thread: 10 to 20 s per GB. Meanwhile it
        needs free space of twice the file's size: once beside it, once in the folder for temporary files. So
        erase many vectors in one call. If memory does not hold all vectors, `before` reads the whole file.
        """
        context = self._require_open()
        await self.flush()
        async with self._flushing:
            tombstones = StoredTombstones(
                self._file, self.resident, self._image_manager, _FileThread(self, context)
            )
            await tombstones.remove_before(before)
            await tombstones.erase(erased)
        self._wal_is_checkpointed = False
        self._work_ready.set()

    async def begin_rebuild(self, offset: int) -> None:
        """Invalidate the file's rows durably; readers still see them. Raises TryAgain, StopSink."""
        context = self._require_open()
        async with self._flushing:
            with anyio.CancelScope(shield=True):
                await self._run_on_file(context, self._file.begin_rebuild)
            self._image_manager.begin_rebuild()
            self.resident.begin_rebuild(context)

    async def load_states(self, rows: Sequence[StateRow]) -> None:
        """Write rows beside the invalidated ones. Raises TryAgain, StopSink."""
        context = self._require_open()

        def write() -> None:
            self._file.load_states(rows)
            self._file.checkpoint()

        with anyio.CancelScope(shield=True):
            await self._run_on_file(context, write)
        self._wal_is_checkpointed = False

    async def end_rebuild(self, offset: int, lamport: int) -> None:
        """Replace the invalidated rows by the new ones in one transaction, then load the new ones.

        If an index shares the vectors, memory holds old and new vectors until all are loaded.
        Raises TryAgain, StopSink.
        """
        context, resident = self._require_open(), self.resident
        cursor = Cursor(context.log_id, context.epoch, offset)
        async with self._flushing:
            if self._file.rebuilding:
                with anyio.CancelScope(shield=True):
                    await self._run_on_file(context, lambda: self._file.end_rebuild(cursor, lamport))
            resident.clear(staged=resident.pinned)
            is_complete = await self._load(context)
            resident.swap_in_staged()
            resident.residency.complete = is_complete
            resident.end_rebuild(context, offset, lamport)
            self._image_manager.end_rebuild()
            self._applied_offset = self._committed_offset = self._reach = offset
        context.committed(offset)

    async def background(self) -> None:
        """Flush every `flush_s` while there are changes; else checkpoint the write-ahead log."""
        context = self._require_open()
        self._background_count += 1
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._write_images, context)
                await self._flush_loop()
        finally:
            self._background_count -= 1

    async def _flush_loop(self) -> None:
        while True:
            with anyio.move_on_after(_IDLE_S):
                await self._work_ready.wait()
            if not self._work_ready.is_set():
                await self._checkpoint_wal()
                await self._work_ready.wait()
            # A flush of many changes may take long: pause for as long, so that half the time is free.
            await anyio.sleep(max(self.flush_s, self._last_flush_s))
            self._work_ready = anyio.Event()
            try:
                await self.flush()
            except SinkFailure:  # `_failure` holds it, and the next apply reports it
                self._work_ready.set()

    async def _write_images(self, context: SinkContext) -> None:
        """Write an image whenever enough rows have changed, `image_s` after the last one at the earliest."""
        while True:
            await self._image_manager.image_due.wait()
            async with context.background_thread() as thread:
                await self._image_manager.write(thread, context.log_id)
            self._work_ready.set()
            await anyio.sleep(self.image_s)

    async def aclose(self) -> None:
        """Write the remaining changes, within `close_s`, and close the file.

        Raises TryAgain if some were not written; the file is closed even then, and its cursor is correct.
        """
        context, self._context = self._context, None
        if context is None:
            return
        with anyio.CancelScope(shield=True):
            try:
                with anyio.move_on_after(self.close_s):
                    await self._flush(context)
                    if self._image_manager.is_due_at_close():
                        await self._image_manager.write(context.threads, context.log_id)
                        await self._flush(context)
            except StopSink as failure:
                raise TryAgain(failure.reason) from failure
            finally:
                self.resident.abandon_rebuild(context)
                await self._release(context)
        if self._committed_offset < self._applied_offset:
            raise TryAgain(
                f"{self._file.path} was closed after {self.close_s} s, at offset {self._committed_offset} of "
                f"{self._applied_offset}: the rest is redelivered; raise close_s to write all of it"
            )

    def statistics(self) -> StorageStatistics:
        """Return a snapshot of the sink's numbers."""
        return StorageStatistics(
            applied_offset=self._applied_offset,
            committed_offset=self._committed_offset,
            dirty_rows=sum(
                int(np.count_nonzero(dirty_slots(table))) for table in self.resident.tables.values()
            ),
            commits=self._commits,
            rows_written=self._rows_written,
            rows_read_back=self._rows_read_back,
            wal_bytes=self._file.wal_bytes,
            failure=self._failure,
            last_flush_s=self._last_flush_s,
            image=self._image_manager.state,
        )

    async def get(self, namespace: str, vector_id: str) -> VectorState | None:
        """Return a vector's state as of the last apply, also of a tombstone; None if it never had a delta."""
        context = self._require_open()
        state = self.resident.state(namespace, vector_id)
        if state is not None:
            return state
        check_texts(namespace=namespace, vector_id=vector_id)
        if self.resident.complete:
            return None
        rows = await self._run_on_file(context, lambda: self._file.read([(namespace, vector_id)]))
        # While the file was read, an apply may have loaded the vector and changed it.
        state = self.resident.state(namespace, vector_id)
        return state if state is not None or not rows else rows[0].state

    def dimensions(self) -> dict[str, int]:
        """Return the dimension of each namespace of which a vector was resident."""
        return self.resident.dimensions()

    def head(self, namespace: str, vector_id: str) -> Head | None:
        """Return a vector's last dot and True if it is alive; None if it is not resident."""
        return self.resident.head(namespace, vector_id)

    async def rows(self) -> AsyncIterator[tuple[str, str, VectorState]]:
        """Yield the file's rows, ordered by namespace and vector id; after a flush these are all vectors."""
        context, after = self._require_open(), None
        while True:
            page = await self._run_on_file(context, partial(self._file.page, after, _PAGE_ROWS))
            for row in page:
                yield row.namespace, row.vector_id, row.state
            if len(page) < _PAGE_ROWS:
                return
            after = (page[-1].namespace, page[-1].vector_id)

    async def flush(self) -> None:
        """Write all applied changes, with the cursor. Raises TryAgain if the file cannot be written."""
        await self._flush(self._require_open())

    async def _flush(self, context: SinkContext) -> None:
        async with self._flushing:
            if self._file.rebuilding or self.resident.rebuilding:
                return  # memory and file hold invalidated data
            applied = self._applied_offset
            touched = self.resident.take_touched()
            groups = dirty_groups(touched)
            image = self._image_manager.take_ready()
            if not groups and applied == self._committed_offset and image is None:
                return
            started = context.clock.now()
            try:
                # The cursor moves with the last transaction: rows may be ahead of it, but never lag it.
                for group in groups[:-1]:
                    await self._commit(context, group, self._committed_offset)
                    await anyio.lowlevel.checkpoint_if_cancelled()
                await self._commit(context, groups[-1] if groups else (), applied, image)
            except BaseException:
                self.resident.restore_touched(touched)
                raise
            if image is not None:
                await self._image_manager.note_named(image, _FileThread(self, context))
            self._last_flush_s = context.clock.now() - started
            self._committed_offset = applied
            context.committed(applied)

    async def _commit(
        self,
        context: SinkContext,
        group: Sequence[tuple[VectorTable, NDArray[np.intp]]],
        next_offset: int,
        image: ImageName | None = None,
    ) -> None:
        parts = [DirtyRows(table, slots) for table, slots in group]
        # The rows are written as they are now: they may include deltas after `next_offset`.
        cursor, lamport = Cursor(context.log_id, context.epoch, next_offset), self.resident.lamport
        reach = self._reach = max(self._reach, self._applied_offset)

        def write() -> int:
            written = self._file.commit(parts, cursor, lamport, reach=reach, image=image)
            self._file.checkpoint()
            return written

        try:
            with anyio.CancelScope(shield=True):
                written = await self._run_on_file(context, write)
        except BaseException as error:
            for part in parts:
                part.note_failed()
            if isinstance(error, SinkFailure):
                self._failure = error.reason
            raise
        for part in parts:
            part.note_committed()
        self._failure = None
        self._rows_written += written
        self._image_manager.note_written(written)
        self._commits += 1
        self._wal_is_checkpointed = False

    async def _checkpoint_wal(self) -> None:
        context = self._context
        if context is None or self._wal_is_checkpointed:
            return
        async with self._flushing:
            self._wal_is_checkpointed = True
            with anyio.CancelScope(shield=True), suppress(SinkFailure):
                await self._run_on_file(context, partial(self._file.checkpoint, idle=True))

    async def _flush_prefix(self, rejected: RejectDelta, *, now: bool) -> None:
        """Treat the rows before a rejected delta as applied; with `now`, write them at once."""
        self._applied_offset = max(self._applied_offset, rejected.offset)
        self._work_ready.set()
        if now:
            try:
                await self.flush()
            except TryAgain as failure:
                raise TryAgain(failure.reason, done_offset=rejected.offset) from failure

    async def _run_on_file(self, context: SinkContext, function: Callable[[], T]) -> T:
        """Run a function on the file's thread. Raises TryAgain; StopSink for a corrupted or deleted file."""

        def use() -> T:
            with self._file.use():
                return function()

        try:
            return await context.threads.run(use)
        except StorageFileLost as error:
            raise StopSink(str(error)) from error
        except StorageFileError as error:
            raise TryAgain(str(error)) from error
        except OSError as error:
            raise TryAgain(f"{self._file.path} cannot be used: {error}") from error

    async def _release(self, context: SinkContext) -> None:
        """Close the file, on the event loop if the thread fails: an open file would block the next open."""
        with anyio.CancelScope(shield=True):
            try:
                await context.threads.run(self._file.close)
            except Exception:  # the thread failed: closing the file raises nothing
                self._file.close()

    async def _load(self, context: SinkContext) -> bool:
        """Load the file's rows into memory, as many as fit; return True if these are all."""
        resident, after = self.resident, None
        while True:
            blocks, after = await self._run_on_file(
                context, partial(self._file.page_of_blocks, after, _PAGE_ROWS)
            )
            for block in blocks:
                resident.load_block(block)
            if after is None:
                return True
            if resident.size > resident.resident_bytes_max // 8 * 7:
                resident.residency.begin_partial(resident.resident_bytes_max)
                return False

    async def _read_back_missing(self, deliveries: Sequence[Delivery], context: SinkContext) -> None:
        missing = self.resident.missing(deliveries)
        if missing:
            rows = await self._run_on_file(context, lambda: self._file.read(missing))
            self._load_rows(rows)
            self._rows_read_back += len(rows)

    def _load_rows(self, rows: Sequence[StoredRow]) -> None:
        for row in rows:
            self.resident.load(row.namespace, row.vector_id, row.base, row.offset)

    def _is_flush_due(self, deliveries: Sequence[Delivery]) -> bool:
        """True if many rows have arrived since the last flush; called only if no background flushes."""
        self._unflushed_rows += sum(delivery.count for delivery in deliveries)
        is_due = self._unflushed_rows >= self.rows_unflushed_max
        self._unflushed_rows *= not is_due
        return is_due

    async def _evict(self) -> None:
        resident = self.resident
        resident.evict()
        if resident.size > resident.resident_bytes_max and not resident.pinned:
            await self.flush()  # the remaining rows are dirty, and can be evicted after a flush
            resident.evict()

    def _require_open(self) -> SinkContext:
        if self._context is None:
            raise UsageError(f"storage sink {self.name!r} is not open: attach it first")
        return self._context


class _FileThread:
    """The sink's thread, which raises file errors as the sink's failures."""

    def __init__(self, sink: StorageSink, context: SinkContext) -> None:
        self._sink, self._context = sink, context

    async def run(self, function: Callable[[], T]) -> T:
        return await self._sink._run_on_file(self._context, function)
