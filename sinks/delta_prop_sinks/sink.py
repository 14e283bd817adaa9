"""The contract between the delivery loop and a sink: anything that consumes deltas.

`Sink` is the contract, on one screen. A sink may implement these optional protocols beside it:

`Rebuildable`: loads full states in place of the deltas that made them. `HasBackground`: works between
deliveries. `HasBacklog`: reports how much of that work is left. `BulkSink`: gets more deltas per call while
it lags. `ControlRowSink`: also gets control rows. `VectorHolder`: reports the last delta of a vector.
`HoldsTombstones`: removes what is left of deleted vectors.

*Fast path.* A sink that seldom waits may define `apply_now(deliveries)`, a plain method, beside `apply` in
the same class. The delivery loop may call it instead, from within the publish that brought the deltas. It
returns True once all rows are applied. After False or any exception, the same deliveries are passed to
`apply`, which reports the error; so rows that `apply_now` has already applied must still take effect once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from delta_prop_wire.cursor import Cursor
from delta_prop_wire.errors import DeltaPropError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from delta_prop_sinks.ports import Clock, Threads
    from delta_prop_wire.batch import Batch, LoggedBatch
    from delta_prop_wire.delta import Head
    from delta_prop_wire.state_rows import StateRow


@dataclass(slots=True, eq=False)
class Delivery:
    """A batch from the log for one sink. `rows`: those that match its topics, ascending; None if all do.

    Immutable: a sink may store it, and other sinks may hold it too.

    `redelivered`: these rows were released from the sink's quarantine, and come after rows with higher
    offsets. `end`: the batch is delivered up to this offset, and the rest follows in another delivery; None
    if the whole batch is delivered.
    """

    logged: LoggedBatch
    rows: NDArray[np.intp] | None = None
    redelivered: bool = False
    end: int | None = None

    @property
    def batch(self) -> Batch:
        """The batch as its producer encoded it."""
        return self.logged.batch

    @property
    def count(self) -> int:
        """The number of rows to apply."""
        return self.logged.batch.count if self.rows is None else len(self.rows)

    @property
    def first_offset(self) -> int:
        """The offset of the batch's first row, even if `rows` does not include that row."""
        return self.logged.offset

    @property
    def next_offset(self) -> int:
        """The offset after the batch, or `end`: a sink that has applied the delivery continues there."""
        return self.logged.next_offset if self.end is None else self.end


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The end of a sink's own data, and the highest Lamport number in it.

    A sink without data names offset 0 of the log that it is opened with. `rebuilding`: a rebuild was begun
    and not finished, so the sink's data is invalid, whatever the cursor says. `reach`: the end of the deltas
    that the data may contain, if that may be beyond the cursor: an offset in the cursor's log and epoch. A
    log that ends before it is not the sink's log.
    """

    cursor: Cursor
    lamport: int
    rebuilding: bool = False
    reach: int = 0


class SinkContext(Protocol):
    """The services that the delivery loop gives a sink from `open` to `aclose`."""

    @property
    def log_id(self) -> bytes:
        """The log that deliveries come from."""

    @property
    def epoch(self) -> int:
        """That log's epoch."""

    @property
    def log_start(self) -> int:
        """The oldest offset that the log still covers, by a delta or by a state; 0 while nothing is lost."""

    @property
    def topics(self) -> frozenset[str]:
        """The topics that the sink subscribed to, in text form."""

    @property
    def clock(self) -> Clock:
        """Elapsed and wall time."""

    @property
    def threads(self) -> Threads:
        """A thread of this sink's own."""

    def own_thread(self) -> AbstractAsyncContextManager[Threads]:
        """Open a new thread for the duration of the scope. The scope's end waits for no call: a running call
        continues, and its caller gets an error that says that the thread was abandoned.
        """

    def background_thread(self) -> AbstractAsyncContextManager[Threads]:
        """Open a new thread of low priority for the duration of the scope, for long work in `background`."""

    def committed(self, next_offset: int) -> None:
        """Report that everything below `next_offset` is durable in the sink, with the sink's own cursor."""

    def first_missing(self, watermarks: Mapping[int, int]) -> int | None:
        """Return the offset of the first delta that another log lacks, given its watermark for each origin.

        A watermark is the counter up to which none is missing. Return None if the other log lacks nothing, as
        far as is known here.
        """

    def rewind(self, offset: int) -> None:
        """Continue deliveries from an offset once the present call has raised TryAgain. Only for a sink whose
        cursor the service stores. Raises Refused if the log no longer has the offset.
        """

    def dimension(self, namespace: str) -> int | None:
        """Return the dimension of a namespace, which its first vector in the log fixed; None if it has no
        vector. A forwarded vector may have another dimension.
        """

    def history(self, vectors: Collection[tuple[str, str]]) -> AsyncIterator[tuple[LoggedBatch, int]]:
        """Yield the deltas that the log still holds of vectors (namespace, id) in log order: (batch, row).

        One pass reads the log for all of them, in pieces, and yields to the event loop between pieces. If the
        log starts above offset 0, each vector's state comes first (`batch.is_state`) in place of the deltas
        before it. Raises TryAgain if the log drops rows that are being read.
        """


class Sink(Protocol):
    """Consumes deltas: one task opens it, calls it with deliveries, and closes it. `check_sink` tests these
    rules.

    *Order.* Deliveries come in log order, with gaps where rows are for other sinks; calls never overlap.

    *Event loop.* The shared event loop makes all calls: run code that blocks on `SinkContext.threads`.

    *Return.* When `apply` returns, all rows are applied and readers see them. They need not be durable: a
    sink with its own cursor, which `open` returns, reports durability with `SinkContext.committed`.

    *Duplicates.* After a failure, a cancelled call or a restart, rows are redelivered in other batches and
    must take effect once. A row is a duplicate if its vector already has its offset or key, or a later one.

    *Failures.* `TryAgain`: the failure may pass; rows below `done_offset` are applied, and the rest is
    redelivered. `RejectDelta`: this row can never be applied, and all rows before it are; the row and its
    dependents go to the sink's quarantine, and the rest is redelivered. `StopSink`: no call follows until an
    operator acts; the cursor stays. Any other exception counts as a defect, and as `TryAgain`. After a
    failure, calls carry fewer deltas, then twice as many after each success; a single row that fails
    repeatedly is reported.

    *Cancellation* may come at any await; a call that exceeds `apply_timeout_s` is always cancelled. The call
    then took effect fully, partly or not at all; its rows are redelivered. The delivery loop waits for calls
    on `SinkContext.threads`: a transaction there commits fully or not at all.

    *Quarantine.* An operator releases rows from it. They are marked `redelivered` and come in calls of their
    own, each once, after rows with higher offsets, but never after a later row of the same vector; so detect
    duplicates by vector. They move no cursor, and a sink with its own cursor makes them durable before
    `apply` returns.

    *Forwarded rows*, of another service (`logged.source` is replica), may sort by `logged.key(row)` before an
    earlier row of their vector, or have the same id as an earlier row. A sink that stores states refolds such
    a vector in canonical order before `apply` returns: `must_fold_again` returns True for a row that needs
    it, and `fold_again` refolds all vectors of a call. A sink that stores changes gets each row once.
    """

    @property
    def name(self) -> str:
        """The name that operators see; unique within one service."""

    async def open(self, context: SinkContext) -> ResumePoint | None:
        """Prepare; return None if the service stores the cursor. Raises StopSink or UsageError."""

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Apply all rows, in order. Raises TryAgain, RejectDelta or StopSink."""

    async def aclose(self) -> None:
        """Finish the work begun, by the sink's own deadline, and release all resources. Idempotent.

        Raises TryAgain if something could not be finished; all resources are released even then.
        """

    def statistics(self) -> object:
        """Return a frozen snapshot of the sink's numbers."""


@runtime_checkable
class HasBackground(Protocol):
    """A sink with work between deliveries. The owner of the delivery loop runs `background` beside the loop,
    from the end of `open` to the start of `aclose`, and then cancels it.
    """

    async def background(self) -> None:
        """Run until cancelled. Raises nothing: after a failure here, the next `apply` reports it."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """The number of applied rows that a sink still has to work on, and its maximum.

    `before`: the part of `rows` and of `rows_max` that existed when the sink was opened; producers are not
    paced for it.
    """

    rows: int
    rows_max: int
    before: int = 0


@runtime_checkable
class HasBacklog(Protocol):
    """A sink whose background work may lag. Near `rows_max` producers are paced; `apply` enforces the
    maximum.
    """

    def backlog(self) -> Backlog:
        """Return the present backlog. Called ten times per second, so it must be cheap."""


@runtime_checkable
class ControlRowSink(Protocol):
    """A sink that also gets a log's control rows, which only fill offsets: the full log, unchanged."""

    control_rows: bool


@runtime_checkable
class BulkSink(Protocol):
    """A sink whose calls may take long even for few rows: while it lags, each call has more deltas."""

    @property
    def deltas_per_call(self) -> int:
        """The maximum number of deltas in the next call; a value below the default has no effect."""


@runtime_checkable
class VectorHolder(Protocol):
    """A sink whose vectors outlive the log: a vector that it holds is known to the service."""

    def dimensions(self) -> Mapping[str, int]:
        """Return the dimension of each namespace of which it holds a vector."""

    def head(self, namespace: str, vector_id: str) -> Head | None:
        """Return a vector's last dot and True if it is alive; None if it is not in memory."""


@runtime_checkable
class Rebuildable(Protocol):
    """A sink that can be rebuilt from states: if it lags below the log start, or on the owner's request.

    `begin_rebuild` invalidates the sink's data. Calls of `load_states` bring every vector's state as of one
    offset. `end_rebuild` makes these states the sink's data, with a cursor at that offset; deliveries
    continue from there. Until then, readers may see the old data or a part of the new. An unfinished rebuild
    starts over; so a sink with its own cursor records durably that a rebuild was begun, and reports it when
    it is opened. TryAgain and StopSink mean the same as for `apply`, but a failed call has no effect, and is
    repeated unchanged.
    """

    async def begin_rebuild(self, offset: int) -> None:
        """Invalidate the sink's data durably; the states as of `offset` follow. May be called twice."""

    async def load_states(self, rows: Sequence[StateRow]) -> None:
        """Load some vectors' states, each vector once, in any order; the same rows may be redelivered.

        A state that is not alive is a tombstone, or consists of deltas without effect.
        """

    async def end_rebuild(self, offset: int, lamport: int) -> None:
        """Replace the sink's data by the loaded states, and its cursor by `offset` of the present log.

        Both change atomically, and as durably as the sink's own cursor. All states were loaded; `lamport` is
        their highest Lamport number.
        """


@runtime_checkable
class HoldsTombstones(Protocol):
    """A sink that keeps a tombstone of each deleted vector: its id, and the key of its last delta.

    Without its tombstone a vector is unknown, and its next delta creates it anew, even one that sorts before
    the removed ones. So `forget` is called once no delta of these vectors can arrive that belongs below their
    delete; and no row that the sink has applied before the call is redelivered after it.
    """

    async def forget(self, erased: Sequence[tuple[str, str]], before: int) -> None:
        """Remove the tombstones of these vectors (namespace, vector id), and all tombstones whose last delta
        has an offset below `before`, or an unknown one, as it is of an earlier log. With 0, only the former.

        A vector that is alive stays, and an unknown one is no error. When the call returns, no file of the
        sink holds a byte of the id, the numbers, the data or the metadata that an erased vector had before
        its delete. The removal for `before` becomes durable with the sink's other data.

        Called after `open`, in turn with `apply` and the calls of a rebuild. TryAgain and StopSink mean the
        same as for `apply`. After a failure, a cancellation or a crash, the call is repeated; it may have
        taken effect fully or in part.
        """


class SinkFailure(DeltaPropError):
    """The base class of the errors that `apply` raises on purpose."""

    def __init__(self, reason: str) -> None:
        self.reason = reason if isinstance(reason, str) and reason else f"no reason given ({reason!r:.80})"
        super().__init__(self.reason)


class TryAgain(SinkFailure):
    """A passing failure. Rows below `done_offset` are applied; without it, no row of the call is."""

    def __init__(self, reason: str, done_offset: int | None = None) -> None:
        super().__init__(reason)
        if done_offset is not None:
            _check_offset("done_offset", done_offset)
        self.done_offset = done_offset


class RejectDelta(SinkFailure):
    """The delta at `offset` can never be applied here; all rows before it are applied."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(reason)
        _check_offset("offset", offset)
        self.offset = offset


class StopSink(SinkFailure):
    """The sink cannot continue until an operator acts; the reason names the fix."""


def _check_offset(field: str, offset: object) -> None:
    if isinstance(offset, bool) or not isinstance(offset, int):
        raise TypeError(f"{field}: {offset!r:.80} is not a whole number: give an offset of the log")
