"""The storage sink: the latest state of every vector in a SQLite file, its cursor in the same transaction.

Rows, each row's last delta, the cursor and the highest Lamport number move together, synced; so each
delta has its effect in the file exactly once, whatever crashes. By default changes are written behind:
visible to `get` at once, durable within `flush_s`; `mode="through"` commits before `apply` returns.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

import anyio
import anyio.lowlevel
import numpy as np

from delta_prop_sinks.bounds import (
    check_above_zero,
    check_at_least,
    check_kind,
    check_path,
    check_sink_name,
    check_texts,
)
from delta_prop_sinks.resident import Resident
from delta_prop_sinks.sink import RejectDelta, ResumePoint, SinkFailure, StopSink, TryAgain
from delta_prop_sinks.storage_file import FileFailed, FileLost, StorageFile
from delta_prop_sinks.storage_imaging import Imaging
from delta_prop_sinks.storage_rows import Gathered, dirty, dirty_groups
from delta_prop_wire.algebra import State
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from delta_prop_sinks.sink import Delivery, SinkContext
    from delta_prop_sinks.storage_file import ImageName
    from delta_prop_sinks.storage_rows import Stored
    from delta_prop_sinks.table import Table
    from delta_prop_wire.delta import Head
    from delta_prop_wire.states import StateRow


T = TypeVar("T")

_PAGE_ROWS = 1000
_IDLE_S = 2.0


@dataclass(frozen=True, slots=True)
class StorageStatistics:
    """How far the file is behind, and what was written. `failure`: why the last flush failed, if it did.

    `image`: none, or what became of the columns kept beside the file for a fast start.
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
    """Keeps vectors in the file at `path`, one process at a time.

    `flush_s` is the pause between flushes of `background`; where nobody runs that, `apply` flushes after
    `rows_unflushed_max` rows. Hand the same `resident` to an index and both read one copy of the vectors;
    then attach this sink first.

    From `image_rows_min` rows on an image of all rows is kept beside the file, so that a start need not read
    them one by one. It is written at the close, and every `image_s` seconds at most, when a quarter of the
    rows has changed; it takes the vectors' own bytes and some 50 a row, twice that while it is written.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        name: str = "storage",
        resident: Resident | None = None,
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
            raise UsageError(f'mode {mode!r} is not "behind" or "through"')
        check_above_zero(flush_s=flush_s, close_s=close_s)
        check_at_least(1, rows_unflushed_max=rows_unflushed_max, wal_bytes_max=wal_bytes_max)
        check_at_least(1, image_rows_min=image_rows_min)
        check_at_least(0, image_s=image_s)
        self.name = check_sink_name(name)
        self.mode = mode
        self.flush_s = flush_s
        self.rows_unflushed_max = rows_unflushed_max
        self.close_s = close_s
        self.resident = Resident() if resident is None else check_kind("resident", resident, Resident)
        if self.resident.stored:
            raise UsageError("the resident vectors have a storage sink already: give this one its own")
        self.resident.stored = True
        self.image_s = image_s
        self._file = StorageFile(path, wal_bytes_max=wal_bytes_max)
        self._imaging = Imaging(self._file, self.resident, rows_min=image_rows_min)
        self._context: SinkContext | None = None
        self._applied = self._committed = 0
        self._reach = 0  # deltas below may be in rows of the file, though its cursor is lower
        self._unflushed = 0
        self._backgrounds = 0
        self._failure: str | None = None
        self._commits = self._written = self._read_back = 0
        self._flush_s = 0.0
        self._wal_idle = True
        self._work = anyio.Event()
        self._flushing = anyio.Lock()

    # --- the contract

    def check_file(self) -> None:
        """Check that the file can be this sink's; nothing is changed. Raises UsageError."""
        self._file.check_header()

    async def open(self, context: SinkContext) -> ResumePoint:
        """Open or create the file and load its rows, as far as they fit. Raises UsageError, StopSink."""
        resident, file = self.resident, self._file
        try:
            opened = await self._run(context, lambda: file.connect(context.log_id))
            resident.enter(context)
            resident.note_past(opened.lamport_before)
            resident.lamport = max(resident.lamport, opened.lamport)
            self._context = context
            if not await self._imaging.load(opened, context.log_id, _Thread(self, context)):
                await self._load(context)
        except BaseException as error:
            self._context = None
            await self._let_go(context)
            if isinstance(error, SinkFailure):
                raise StopSink(error.reason) from error
            raise
        cursor = opened.cursor or Cursor(context.log_id, context.epoch, 0)
        void = opened.rebuilding or resident.void
        same = cursor.log_id == context.log_id and not void
        self._applied = self._committed = cursor.next_offset if same else 0
        self._reach = opened.reach if same else 0
        resident.opened(self._applied)
        return ResumePoint(cursor, opened.lamport, void, self._reach)

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Fold; in `through` mode commit. Raises TryAgain while the file cannot be used, StopSink where it is
        damaged or gone, RejectDelta.
        """
        context = self._opened()
        if self._failure is not None:
            await self.flush()
        await self._read_back_missing(deliveries, context)
        resident = self.resident
        try:
            await resident.apply(deliveries, context)
        except RejectDelta as rejected:
            await self._keep_prefix(rejected, now=self.mode == "through" or deliveries[-1].late)
            raise
        late = deliveries[-1].late
        if not late:  # a late row tells nothing of those below it
            self._applied = max(self._applied, deliveries[-1].next_offset)
        self._work.set()
        # What the quarantine lets go of lies below the cursor, so nobody brings it again.
        if late or self.mode == "through" or (not self._backgrounds and self._is_due(deliveries)):
            await self.flush()
        if resident.is_full:
            await self._make_room()

    def apply_now(self, deliveries: Sequence[Delivery]) -> bool:
        """Fold what is written behind, of vectors that are in memory and have room there."""
        context, resident = self._context, self.resident
        if (
            context is None
            or self._failure is not None
            or self.mode == "through"
            or not (self._backgrounds and resident.complete)
            or deliveries[-1].late
            or resident.is_full
        ):
            return False
        if not resident.apply_now(deliveries, context):
            return False
        self._applied = max(self._applied, deliveries[-1].next_offset)
        self._work.set()
        return True

    @property
    def deltas_a_call(self) -> int:
        """Many, while what comes has vectors folded again."""
        return self.resident.deltas_a_call

    async def begin_rebuild(self, offset: int) -> None:
        """The file's rows are void from here on, whatever crashes; readers see them until the new ones are
        whole. Raises TryAgain, StopSink.
        """
        context = self._opened()
        async with self._flushing:
            with anyio.CancelScope(shield=True):
                await self._run(context, self._file.begin_rebuild)
            self._imaging.begin_rebuild()
            self.resident.begin_rebuild(context)

    async def take_states(self, rows: Sequence[StateRow]) -> None:
        """Write rows beside the void ones. Raises TryAgain, StopSink."""
        context = self._opened()

        def write() -> None:
            self._file.take_states(rows)
            self._file.checkpoint()

        with anyio.CancelScope(shield=True):
            await self._run(context, write)
        self._wal_idle = False

    async def end_rebuild(self, offset: int, lamport: int) -> None:
        """The new rows take the place of the void ones, in one transaction; then they are loaded.

        Where an index shares the vectors, old and new ones are in memory until all is loaded.
        Raises TryAgain, StopSink.
        """
        context, resident = self._opened(), self.resident
        cursor = Cursor(context.log_id, context.epoch, offset)
        async with self._flushing:
            if self._file.rebuilding:
                with anyio.CancelScope(shield=True):
                    await self._run(context, lambda: self._file.end_rebuild(cursor, lamport))
            resident.clear(aside=resident.pinned)
            whole = await self._load(context)
            resident.take_over()
            resident.complete = whole
            resident.end_rebuild(context, offset, lamport)
            self._imaging.end_rebuild()
            self._applied = self._committed = self._reach = offset
        context.committed(offset)

    async def background(self) -> None:
        """Flush every `flush_s` while there is something to flush; tidy up the file when there is not."""
        self._backgrounds += 1
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._write_images)
                await self._flush_again_and_again()
        finally:
            self._backgrounds -= 1

    async def _flush_again_and_again(self) -> None:
        while True:
            with anyio.move_on_after(_IDLE_S):
                await self._work.wait()
            if not self._work.is_set():
                await self._tidy()
                await self._work.wait()
            # A flush may take long where much has changed: rest as long, so that half the time is free.
            await anyio.sleep(max(self.flush_s, self._flush_s))
            self._work = anyio.Event()
            try:
                await self.flush()
            except SinkFailure:  # noted; the next apply tells it
                self._work.set()

    async def _write_images(self) -> None:
        """Write an image whenever enough has changed, `image_s` after the one before at the earliest."""
        context = self._opened()
        while True:
            await self._imaging.wanted.wait()
            async with context.background_thread() as thread:
                await self._imaging.write(thread, context.log_id)
            self._work.set()
            await anyio.sleep(self.image_s)

    async def aclose(self) -> None:
        """Write what is not yet written, within `close_s`, and close the file.

        Raises TryAgain where not all was written; the file is closed all the same, its cursor right.
        """
        context, self._context = self._context, None
        if context is None:
            return
        with anyio.CancelScope(shield=True):
            try:
                with anyio.move_on_after(self.close_s):
                    await self._flush(context)
                    if self._imaging.worth_while_at_close():
                        await self._imaging.write(context.threads, context.log_id)
                        await self._flush(context)
            except StopSink as failure:
                raise TryAgain(failure.reason) from failure
            finally:
                self.resident.abandon_rebuild(context)
                await self._let_go(context)
        if self._committed < self._applied:
            raise TryAgain(
                f"{self._file.path} was closed after {self.close_s} s, at offset {self._committed} of "
                f"{self._applied}: the rest is delivered again, or raise close_s"
            )

    def statistics(self) -> StorageStatistics:
        """A snapshot of the sink's numbers."""
        return StorageStatistics(
            applied_offset=self._applied,
            committed_offset=self._committed,
            dirty_rows=sum(int(np.count_nonzero(dirty(table))) for table in self.resident.tables.values()),
            commits=self._commits,
            rows_written=self._written,
            rows_read_back=self._read_back,
            wal_bytes=self._file.wal_bytes,
            failure=self._failure,
            last_flush_s=self._flush_s,
            image=self._imaging.state,
        )

    # --- for readers

    async def get(self, namespace: str, vector_id: str) -> State | None:
        """A vector's state as of the last apply, a tombstone (not alive) included; None: never heard of."""
        context = self._opened()
        state = self.resident.state(namespace, vector_id)
        if state is not None:
            return state
        check_texts(namespace=namespace, vector_id=vector_id)
        if self.resident.complete:
            return None
        rows = await self._run(context, lambda: self._file.read([(namespace, vector_id)]))
        # While the file was read, an apply may have brought the vector back and changed it.
        state = self.resident.state(namespace, vector_id)
        return state if state is not None or not rows else rows[0].state

    def dimensions(self) -> dict[str, int]:
        """The dimension of each namespace of which a vector was resident."""
        return self.resident.dimensions()

    def head(self, namespace: str, vector_id: str) -> Head | None:
        """The last dot of a vector and whether it is there, None where it is not resident."""
        return self.resident.head(namespace, vector_id)

    async def rows(self) -> AsyncIterator[tuple[str, str, State]]:
        """Everything that the file holds, in order of namespace and vector id; after a flush, everything."""
        context, after = self._opened(), None
        while True:
            page = await self._run(context, partial(self._file.page, after, _PAGE_ROWS))
            for row in page:
                yield row.namespace, row.vector_id, row.state
            if len(page) < _PAGE_ROWS:
                return
            after = (page[-1].namespace, page[-1].vector_id)

    async def flush(self) -> None:
        """Write all that is applied, with its cursor. Raises TryAgain where the file cannot be written."""
        await self._flush(self._opened())

    # --- writing

    async def _flush(self, context: SinkContext) -> None:
        async with self._flushing:
            if self._file.rebuilding or self.resident.void:
                return  # what memory holds is void, and so is the file
            applied = self._applied
            touched = self.resident.take_touched()
            groups = dirty_groups(touched)
            image = self._imaging.take_ready()
            if not groups and applied == self._committed and image is None:
                return
            started = context.clock.now()
            try:
                # Rows may be ahead of the cursor, never behind: it moves with the last transaction.
                for group in groups[:-1]:
                    await self._commit(context, group, self._committed)
                    await anyio.lowlevel.checkpoint_if_cancelled()
                await self._commit(context, groups[-1] if groups else (), applied, image)
            except BaseException:
                self.resident.touched.update(touched)
                raise
            if image is not None:
                await self._imaging.named(image, _Thread(self, context))
            self._flush_s = context.clock.now() - started
            self._committed = applied
            context.committed(applied)

    async def _commit(
        self,
        context: SinkContext,
        group: Sequence[tuple[Table, NDArray[np.intp]]],
        next_offset: int,
        image: ImageName | None = None,
    ) -> None:
        parts = [Gathered(table, slots) for table, slots in group]
        # These rows are as they are now, whatever the cursor says: later deltas may have come meanwhile.
        cursor, lamport = Cursor(context.log_id, context.epoch, next_offset), self.resident.lamport
        reach = self._reach = max(self._reach, self._applied)

        def write() -> int:
            written = self._file.commit(parts, cursor, lamport, reach=reach, image=image)
            self._file.checkpoint()
            return written

        try:
            with anyio.CancelScope(shield=True):
                written = await self._run(context, write)
        except BaseException as error:
            for part in parts:
                part.failed()
            if isinstance(error, SinkFailure):
                self._failure = error.reason
            raise
        for part in parts:
            part.done()
        self._failure = None
        self._written += written
        self._imaging.note_written(written)
        self._commits += 1
        self._wal_idle = False

    async def _tidy(self) -> None:
        context = self._context
        if context is None or self._wal_idle:
            return
        async with self._flushing:
            self._wal_idle = True
            with anyio.CancelScope(shield=True), suppress(SinkFailure):
                await self._run(context, partial(self._file.checkpoint, idle=True))

    async def _keep_prefix(self, rejected: RejectDelta, *, now: bool) -> None:
        """What stands before a rejected delta is applied: it is written as if nothing came behind it."""
        self._applied = max(self._applied, rejected.offset)
        self._work.set()
        if now:
            try:
                await self.flush()
            except TryAgain as failure:
                raise TryAgain(failure.reason, done_offset=rejected.offset) from failure

    # --- on the thread

    async def _run(self, context: SinkContext, function: Callable[[], T]) -> T:
        """Do something with the file. Raises TryAgain, or StopSink where the file is damaged or gone."""

        def use() -> T:
            with self._file.used():
                return function()

        try:
            return await context.threads.run(use)
        except FileLost as error:
            raise StopSink(str(error)) from error
        except FileFailed as error:
            raise TryAgain(str(error)) from error
        except OSError as error:
            raise TryAgain(f"{self._file.path} cannot be used: {error}") from error

    async def _let_go(self, context: SinkContext) -> None:
        """Close the file, here if need be: nobody could open it again."""
        with anyio.CancelScope(shield=True):
            try:
                await context.threads.run(self._file.close)
            except Exception:  # the thread's, since closing raises none
                self._file.close()

    # --- reading back

    async def _load(self, context: SinkContext) -> bool:
        """Bring the file's rows into memory, as many as fit; whether these are all."""
        resident, after = self.resident, None
        while True:
            blocks, after = await self._run(
                context,
                partial(self._file.page_of_blocks, after, _PAGE_ROWS),
            )
            for block in blocks:
                resident.load_block(block)
            if after is None:
                return True
            if resident.size > resident.resident_bytes_max // 8 * 7:
                resident.begin_partial()
                return False

    async def _read_back_missing(self, deliveries: Sequence[Delivery], context: SinkContext) -> None:
        missing = self.resident.missing(deliveries)
        if missing:
            rows = await self._run(context, lambda: self._file.read(missing))
            self._take(rows)
            self._read_back += len(rows)

    def _take(self, rows: Sequence[Stored]) -> None:
        for row in rows:
            self.resident.load(row.namespace, row.vector_id, row.checkpoint, row.offset)

    def _is_due(self, deliveries: Sequence[Delivery]) -> bool:
        """Whether many rows have come since the last flush; asked where no background flushes."""
        self._unflushed += sum(delivery.count for delivery in deliveries)
        due = self._unflushed >= self.rows_unflushed_max
        self._unflushed *= not due
        return due

    async def _make_room(self) -> None:
        resident = self.resident
        resident.evict()
        if resident.size > resident.resident_bytes_max and not resident.pinned:
            await self.flush()  # what is left is dirty
            resident.evict()

    def _opened(self) -> SinkContext:
        if self._context is None:
            raise UsageError(f"storage sink {self.name!r} is not open: attach it first")
        return self._context


class _Thread:
    """The sink's thread, with the failures of its file told as the sink tells them."""

    def __init__(self, sink: StorageSink, context: SinkContext) -> None:
        self._sink, self._context = sink, context

    async def run(self, function: Callable[[], T]) -> T:
        return await self._sink._run(self._context, function)
