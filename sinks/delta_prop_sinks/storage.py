"""The storage sink: the latest state of every vector in a SQLite file, its cursor in the same transaction.

Rows, each row's last delta, the cursor and the highest Lamport number move together, synced; so each
delta has its effect in the file exactly once, whatever crashes. By default changes are written behind:
visible to `get` at once, durable within `flush_s`; `mode="through"` commits before `apply` returns.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import anyio
import numpy as np

from delta_prop_sinks.chain import Checkpoint
from delta_prop_sinks.resident import Resident
from delta_prop_sinks.sink import ResumePoint, TryAgain
from delta_prop_sinks.storage_file import FileFailed, StorageFile, StoredRow
from delta_prop_sinks.table import ABSENT, DIRTY, FLYING, OPAQUE, VECTOR, unsigned
from delta_prop_wire.algebra import State
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from delta_prop_sinks.sink import Delivery, SinkContext
    from delta_prop_sinks.table import Table

ROWS_PER_COMMIT_MAX = 4096
_PAGE_ROWS = 1000
_IDLE_S = 2.0


@dataclass(frozen=True, slots=True)
class StorageStatistics:
    """How far the file is behind, and what was written. `failure`: why the last flush failed, if it did."""

    applied_offset: int
    committed_offset: int
    dirty_rows: int
    commits: int
    rows_written: int
    rows_read_back: int
    wal_bytes: int
    failure: str | None
    last_commit_s: float


class StorageSink:
    """Keeps vectors in the file at `path`, one process at a time.

    Hand the same `resident` to an index and both read one copy of the vectors; then attach this sink first.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        name: str = "storage",
        resident: Resident | None = None,
        mode: Literal["behind", "through"] = "behind",
        flush_s: float = 0.1,
        dirty_rows_max: int = 20_000,
        wal_bytes_max: int = 64 << 20,
        close_s: float = 10.0,
    ) -> None:
        if mode not in ("behind", "through"):
            raise UsageError(f'mode {mode!r} is not "behind" or "through"')
        if flush_s <= 0 or dirty_rows_max < 1:
            raise UsageError(
                f"flush_s {flush_s} must be above 0 and dirty_rows_max {dirty_rows_max} at least 1"
            )
        self.name = name
        self.mode = mode
        self.flush_s = flush_s
        self.dirty_rows_max = dirty_rows_max
        self.close_s = close_s
        self.resident = Resident() if resident is None else resident
        if self.resident.stored:
            raise UsageError("the resident vectors have a storage sink already: give this one its own")
        self.resident.stored = True
        self._file = StorageFile(path, wal_bytes_max=wal_bytes_max)
        self._context: SinkContext | None = None
        self._applied = self._committed = 0
        self._unflushed = 0
        self._failure: str | None = None
        self._commits = self._written = self._read_back = 0
        self._commit_s = 0.0
        self._wal_idle = True
        self._work = anyio.Event()
        self._flushing = anyio.Lock()

    # --- the contract

    async def open(self, context: SinkContext) -> ResumePoint:
        """Open or create the file and load its rows, as far as they fit. Raises UsageError, StopSink."""
        resident, file = self.resident, self._file
        opened = await context.threads.run(lambda: file.connect(context.log_id))
        try:
            resident.enter(context)
            resident.note_past(opened.lamport_before)
            resident.lamport = max(resident.lamport, opened.lamport)
            self._context = context
            await self._load(context)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await context.threads.run(file.close)
            self._context = None
            raise
        cursor = opened.cursor or Cursor(context.log_id, context.epoch, 0)
        self._applied = cursor.next_offset if cursor.log_id == context.log_id else 0
        self._committed = self._applied
        resident.opened(self._applied)
        return ResumePoint(cursor, opened.lamport)

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Fold; in `through` mode commit. Raises TryAgain while the file cannot be written."""
        context = self._opened()
        if self._failure is not None or self._unflushed >= self.dirty_rows_max:
            await self.flush()
        await self._read_back_missing(deliveries, context)
        resident = self.resident
        resident.apply(deliveries, context)
        self._applied = max(self._applied, deliveries[-1].next_offset)
        self._unflushed += sum(delivery.count for delivery in deliveries)
        if self.mode == "through":
            await self.flush()
        elif not self._work.is_set():
            self._work.set()
        if resident.size > resident.resident_bytes_max:
            await self._make_room()

    async def background(self) -> None:
        """Flush every `flush_s` while there is something to flush; tidy up the file when there is not."""
        while True:
            with anyio.move_on_after(_IDLE_S) as idle:
                await self._work.wait()
            if idle.cancelled_caught:
                await self._tidy()
                await self._work.wait()
            await anyio.sleep(self.flush_s)
            try:
                await self.flush()
            except TryAgain:
                continue  # noted; the next apply tells it

    async def aclose(self) -> None:
        """Write what is not yet written, within `close_s`, and close the file."""
        context, self._context = self._context, None
        if context is None:
            return
        with anyio.CancelScope(shield=True):
            try:
                with anyio.move_on_after(self.close_s):
                    await self._flush(context)
            finally:
                await context.threads.run(self._file.close)

    def statistics(self) -> StorageStatistics:
        """A snapshot of the sink's numbers."""
        return StorageStatistics(
            applied_offset=self._applied,
            committed_offset=self._committed,
            dirty_rows=sum(int(np.count_nonzero(_dirty(table))) for table in self.resident.tables.values()),
            commits=self._commits,
            rows_written=self._written,
            rows_read_back=self._read_back,
            wal_bytes=self._file.wal_bytes,
            failure=self._failure,
            last_commit_s=self._commit_s,
        )

    # --- for readers

    async def get(self, namespace: str, vector_id: str) -> State | None:
        """A vector's state as of the last apply, a tombstone (not alive) included; None: never heard of."""
        context = self._opened()
        state = self.resident.state(namespace, vector_id)
        if state is not None or self.resident.complete:
            return state
        rows = await context.threads.run(lambda: self._file.read([(namespace, vector_id)]))
        # While the file was read, an apply may have brought the vector back and changed it.
        state = self.resident.state(namespace, vector_id)
        return state if state is not None or not rows else _state(rows[0])

    async def rows(self) -> AsyncIterator[tuple[str, str, State]]:
        """Everything that the file holds, in order of namespace and vector id; after a flush, everything."""
        context, after = self._opened(), None
        while True:
            page = await context.threads.run(partial(self._file.page, after, _PAGE_ROWS))
            for row in page:
                yield row.namespace, row.vector_id, _state(row)
            if len(page) < _PAGE_ROWS:
                return
            after = (page[-1].namespace, page[-1].vector_id)

    async def flush(self) -> None:
        """Write all that is applied, with its cursor. Raises TryAgain where the file cannot be written."""
        await self._flush(self._opened())

    # --- writing

    async def _flush(self, context: SinkContext) -> None:
        async with self._flushing:
            self._work = anyio.Event()
            applied, lamport = self._applied, self.resident.lamport
            self._unflushed = 0
            dirty = [(table, _dirty(table).nonzero()[0]) for table in list(self.resident.tables.values())]
            parts = [
                (table, slots[at : at + ROWS_PER_COMMIT_MAX])
                for table, slots in dirty
                for at in range(0, len(slots), ROWS_PER_COMMIT_MAX)
            ]
            cursor = Cursor(context.log_id, context.epoch, applied)
            if not parts and applied == self._committed:
                return
            # Rows may be ahead of the cursor, never behind: it moves with the last transaction.
            for part in parts[:-1]:
                await self._commit(context, [part], None, lamport)
            await self._commit(context, parts[-1:], cursor, lamport)
            self._committed = applied
            context.committed(applied)

    async def _commit(
        self,
        context: SinkContext,
        parts: Sequence[tuple[Table, NDArray[np.intp]]],
        cursor: Cursor | None,
        lamport: int,
    ) -> None:
        gathered = [_Gathered(table, slots) for table, slots in parts]
        started = context.clock.now()

        def write() -> int:
            rows = sorted(row for part in gathered for row in part.rows())
            self._file.commit(rows, cursor, lamport)
            self._file.checkpoint()
            return len(rows)

        try:
            with anyio.CancelScope(shield=True):
                self._written += await context.threads.run(write)
        except BaseException as error:
            for part in gathered:
                part.failed()
            if not isinstance(error, FileFailed):
                raise
            self._failure = str(error)
            raise TryAgain(self._failure) from error
        for part in gathered:
            part.done()
        self._failure = None
        self._commits += 1
        self._wal_idle = False
        self._commit_s = context.clock.now() - started

    async def _tidy(self) -> None:
        context = self._context
        if context is None or self._wal_idle:
            return
        async with self._flushing:
            self._wal_idle = True
            with anyio.CancelScope(shield=True), suppress(FileFailed):
                await context.threads.run(partial(self._file.checkpoint, idle=True))

    # --- reading back

    async def _load(self, context: SinkContext) -> None:
        """Bring the file's rows into memory, as many as fit."""
        resident, after = self.resident, None
        while True:
            page = await context.threads.run(partial(self._file.page, after, _PAGE_ROWS))
            self._take(page)
            if len(page) < _PAGE_ROWS:
                return
            after = (page[-1].namespace, page[-1].vector_id)
            if resident.size > resident.resident_bytes_max // 8 * 7:
                resident.begin_partial()
                return

    async def _read_back_missing(self, deliveries: Sequence[Delivery], context: SinkContext) -> None:
        missing = self.resident.missing(deliveries)
        if missing:
            rows = await context.threads.run(lambda: self._file.read(missing))
            self._take(rows)
            self._read_back += len(rows)

    def _take(self, rows: Sequence[StoredRow]) -> None:
        for row in rows:
            self.resident.load(row.namespace, row.vector_id, _checkpoint(row), row.offset)

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


class _Gathered:
    """Rows taken out of a table on the loop, for the writing thread; their slots fly until it is done."""

    def __init__(self, table: Table, slots: NDArray[np.intp]) -> None:
        self._table, self._slots = table, slots
        self._forms = table.forms[slots].tolist()
        self._heads = table.heads[slots].tolist()
        self._values = None if table.matrix is None else table.matrix[slots]
        places = slots.tolist()
        self._ids = [str(table.ids[slot]) for slot in places]
        self._data = [table.data.get(slot) for slot in places]
        self._metadata = [table.metadata.get(slot) for slot in places]
        self._ignored = [table.ignored.get(slot, 0) for slot in places]
        table.marks[slots] = table.marks[slots] & ~np.uint8(DIRTY) | FLYING

    def rows(self) -> list[StoredRow]:
        """The rows as the file takes them. Touches nothing that the loop changes."""
        namespace, values = self._table.namespace, self._values
        rows = []
        for at, (form, head) in enumerate(zip(self._forms, self._heads, strict=True)):
            value = self._data[at]
            if form == VECTOR:
                assert values is not None
                value = values[at].tobytes()
            lamport, origin, counter, offset = head
            rows.append(
                StoredRow(
                    namespace,
                    self._ids[at],
                    form,
                    value,
                    self._metadata[at],
                    self._ignored[at],
                    lamport,
                    origin,
                    counter,
                    offset,
                )
            )
        return rows

    def done(self) -> None:
        """The rows are durable: they may be evicted, unless they have changed since."""
        self._table.marks[self._slots] &= ~np.uint8(FLYING)

    def failed(self) -> None:
        """The rows are as dirty as before."""
        self._table.marks[self._slots] = self._table.marks[self._slots] & ~np.uint8(FLYING) | DIRTY


def _dirty(table: Table) -> NDArray[np.bool_]:
    dirty: NDArray[np.bool_] = (table.marks[: table.used] & DIRTY) != 0
    return dirty


def _checkpoint(row: StoredRow) -> Checkpoint:
    key = (row.lamport, unsigned(row.origin), row.counter)
    vector = data = None
    if row.form == VECTOR and row.value is not None:
        vector = np.frombuffer(row.value, "<f4")
    elif row.form == OPAQUE:
        data = row.value
    return Checkpoint(key, row.form, vector, data, row.metadata, row.ignored)


def _state(row: StoredRow) -> State:
    known = _checkpoint(row)
    return State(
        alive=known.form != ABSENT,
        vector=known.vector,
        data=known.data,
        metadata=known.metadata or {},
        ignored=known.ignored,
        key=known.key,
    )
