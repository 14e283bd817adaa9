"""The contract between the delivery loop and a sink: anything that spends deltas.

A sink is opened, handed deliveries in log order by one task, and closed. What it may count on:

*Order.* Deliveries come in log order, each starting where the one before ended or later (control rows
and rows of other topics leave gaps). `apply` is never called while another `apply` of the same sink runs.

*Repeats.* After a failure, a cancelled `apply` or a restart, deliveries may come again, cut differently.
Applying one twice must have the effect of applying it once: a row at or below the last offset that its
vector holds, of the same log, is a repeat; so is a row whose dot the vector already has.

*Forwarded rows.* What another service accepted (`logged.source` is replica) may sort, by `logged.key(row)`,
before a row of its vector that came earlier; and where `logged.known_ids` is not none, it may be its twin,
which has the same id under another dot. A sink that keeps states folds such a vector again, in canonical
order, of twins the first. `must_fold_again` tells whether a row is such; the rows of its vector behind it are
then no more applied on top. Before `apply` returns, `fold_again` gives the states of all these vectors, from
`SinkContext.history`. A sink of changes gets each row once.

*Replays.* A row that was set aside after a `RejectDelta` may be delivered again later, when an operator says
so, in a delivery marked `late`: behind rows of other vectors with higher offsets, but of its own vector
nothing that lies behind it has come in between. So a sink tells repeats by vector, not by one offset.
Late deliveries come in calls of their own. They move no cursor, as rows beside them in their batch may not
have come yet; and what one has brought comes never again, so a sink that keeps its own cursor makes it
durable before `apply` returns.

*A return* of `apply` means: every row of every delivery is applied and visible to the sink's readers.
It does not mean durable; a sink that keeps its own cursor reports that with `SinkContext.committed`.

*The event loop.* `apply` runs on the event loop that everybody shares, so what blocks goes to a thread:
`SinkContext.threads`, whose calls a cancelled `apply` waits for, or `own_thread`. A call longer than
`apply_s_max` is cancelled and comes again with less; what a thread does then ends when it returns.

*At once.* A sink that hardly ever waits may have `apply_now(deliveries)`, no coroutine, beside `apply` in the
same class. The delivery loop may call it in its place, from within the very publish that brought the deltas.
True means what a return of `apply` means. False, or whatever it raises: the same deliveries come again by
`apply`, which says what is wrong; so what it has done by then must be nothing, or as after a repeat.

*Failure.* `apply` may raise three things, each with one remedy. `TryAgain`: it may pass; what lies below
`done_offset` is applied, the rest is delivered again later. `RejectDelta`: this one delta can never be
applied; everything before it is; it is set aside in the sink's quarantine and the rest is delivered again,
but for what comes behind it: later rows of its vector, and those that name it as parent.
`StopSink`: nothing more can be applied before someone acts; the cursor stays, the reason is shown.
Any other exception is treated as `TryAgain`, counted as a defect. After a failure calls bring less, at last
one delta alone, and twice as much after each success; a delta that fails on and on by itself is named.

*Rebuilding.* A sink that can take whole states in place of the deltas that made them has the methods of
`Rebuilds`. It is rebuilt where it has fallen behind what the log still holds, or where its owner says so:
`begin_rebuild` makes void what it holds, `take_states` brings every vector's state as of one offset of the
log, `end_rebuild` makes that its data, with a cursor at that offset; deliveries go on from there.
Readers may see the old data until the end, or what there is of the new. A rebuild that does not come to its
end, for whatever reason, is begun again from the beginning, never gone on with; so a sink with a cursor of
its own remembers durably that one was begun, and says so when it is opened.

*Background.* A sink with work of its own between deliveries has a method `background()`, which the
delivery loop's owner runs beside the loop from after `open` until before `aclose`, and cancels. What such
work has still before it can be told by a method `backlog()`; producers are slowed down as it nears its bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from delta_prop_wire.errors import DeltaPropError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    import numpy as np
    from numpy.typing import NDArray

    from delta_prop_sinks.ports import Clock, Threads
    from delta_prop_wire.batch import Batch, LoggedBatch
    from delta_prop_wire.cursor import Cursor
    from delta_prop_wire.delta import Head
    from delta_prop_wire.states import StateRow


@dataclass(slots=True, eq=False)
class Delivery:
    """A batch from the log for one sink; `rows` are those its topics match, ascending, None for all.

    Never changed: it may be kept, and others may have it too.

    `late`: these rows come out of the sink's quarantine, behind rows with higher offsets.
    `end`: the batch is delivered up to this offset only, the rest comes later; None: all of it.
    """

    logged: LoggedBatch
    rows: NDArray[np.intp] | None = None
    late: bool = False
    end: int | None = None

    @property
    def batch(self) -> Batch:
        """The batch as its producer encoded it."""
        return self.logged.batch

    @property
    def count(self) -> int:
        """How many rows are meant."""
        return self.logged.batch.count if self.rows is None else len(self.rows)

    @property
    def first_offset(self) -> int:
        """The offset of the batch's first row, whether it is meant or not."""
        return self.logged.offset

    @property
    def next_offset(self) -> int:
        """The offset behind the batch, or its part: where a sink that has applied it reads on."""
        return self.logged.next_offset if self.end is None else self.end


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """How far a sink's own data reaches, and the highest Lamport number among it.

    A sink that holds nothing yet names offset 0 of the log it is opened beside. `rebuilding`: a rebuild was
    begun and did not come to its end, so what the sink holds is void, whatever the cursor says.
    `reach`: where some of its data may be ahead of the cursor, the offset behind the last delta that may be
    among them, of the cursor's log and epoch; a log that ends before it does not fit.
    """

    cursor: Cursor
    lamport: int
    rebuilding: bool = False
    reach: int = 0


class SinkContext(Protocol):
    """What the delivery loop lends a sink from `open` to `aclose`."""

    @property
    def log_id(self) -> bytes:
        """The log that deliveries come from."""
        ...

    @property
    def epoch(self) -> int:
        """That log's epoch."""
        ...

    @property
    def log_start(self) -> int:
        """The oldest offset of which the log tells, by a delta or by a state; 0 while nothing is lost."""
        ...

    @property
    def topics(self) -> frozenset[str]:
        """What the sink asked for, in text form."""
        ...

    @property
    def clock(self) -> Clock:
        """Elapsed and wall time."""
        ...

    @property
    def threads(self) -> Threads:
        """A thread of this sink's own."""
        ...

    def own_thread(self) -> AbstractAsyncContextManager[Threads]:
        """A new thread, as long as the scope lasts. Its end waits for no call: one that runs goes on, and who
        waited for it is told that its thread was given up.
        """
        ...

    def background_thread(self) -> AbstractAsyncContextManager[Threads]:
        """A new thread of low priority, as long as the scope lasts; for long work within `background`."""
        ...

    def committed(self, next_offset: int) -> None:
        """Tell that everything below `next_offset` is durable in the sink, its own cursor with it."""
        ...

    def first_missing(self, watermarks: Mapping[int, int]) -> int | None:
        """Where the first delta stands that a log lacks which has each origin's up to this counter.

        None where it lacks nothing, as far as is known here.
        """
        ...

    def go_back(self, offset: int) -> None:
        """Have deliveries go on from an offset once the present call has raised TryAgain. Only for a sink
        whose cursor the service keeps. Raises Refused where the log no longer has it.
        """
        ...

    def dimension(self, namespace: str) -> int | None:
        """How many numbers the vectors of a namespace have, as its first one in the log fixed it; None where
        none has. One that was forwarded may have another number of them.
        """
        ...

    def history(self, vectors: Collection[tuple[str, str]]) -> AsyncIterator[tuple[LoggedBatch, int]]:
        """The deltas that the log still holds of vectors (namespace, id), in log order, as (batch, row).

        The log is read once for all of them, in pieces, between which the event loop goes on. Where it starts
        later than at 0, each vector's state comes first (`batch.is_state`): what came before. Raises TryAgain
        where the log lets go of what is being read.
        """
        ...


class Sink(Protocol):
    """Anything that spends deltas; the module's docstring is the contract."""

    @property
    def name(self) -> str:
        """What operators call it; unique within one service."""
        ...

    async def open(self, context: SinkContext) -> ResumePoint | None:
        """Get ready. None: the broker keeps the cursor. Raises StopSink or UsageError."""
        ...

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Apply all rows, in order. Raises TryAgain, RejectDelta or StopSink."""
        ...

    async def aclose(self) -> None:
        """Finish what is begun, under a deadline of its own, and let go of everything. Idempotent.

        Raises TryAgain where something could not be finished; everything is let go of all the same.
        """
        ...

    def statistics(self) -> object:
        """A frozen snapshot of the sink's numbers."""
        ...


@runtime_checkable
class HasBackground(Protocol):
    """A sink with work between deliveries."""

    async def background(self) -> None:
        """Run until cancelled. A failure in here is reported by the next `apply`, not raised."""
        ...


@dataclass(frozen=True, slots=True)
class Backlog:
    """How many applied rows a sink has still to work on, and how many it lets come together at most.

    `before`: of both, what stood there when the sink was opened; nobody is slowed down for it.
    """

    rows: int
    rows_max: int
    before: int = 0


@runtime_checkable
class HasBacklog(Protocol):
    """A sink whose background work may fall behind. Near its bound it paces producers; `apply` keeps it."""

    def backlog(self) -> Backlog:
        """Now. Cheap: asked ten times a second."""
        ...


@runtime_checkable
class TakesControlRows(Protocol):
    """A sink that is delivered a log's control rows too, which only fill places: all of it, as it lies."""

    control_rows: bool


@runtime_checkable
class TakesManyAtOnce(Protocol):
    """A sink whose calls may take long whatever they bring: behind, it gets up to so many deltas in one."""

    @property
    def deltas_a_call(self) -> int:
        """Of the next call; without effect below what every sink gets."""
        ...


@runtime_checkable
class HoldsVectors(Protocol):
    """A sink whose vectors outlive the log: what it holds counts as known when deltas are admitted."""

    def dimensions(self) -> Mapping[str, int]:
        """The dimension of each namespace of which it holds a vector."""
        ...

    def head(self, namespace: str, vector_id: str) -> Head | None:
        """The last dot of a vector and whether it is there, None where the sink has it not at hand."""
        ...


@runtime_checkable
class Rebuilds(Protocol):
    """A sink that can be rebuilt from states. Of its failures TryAgain and StopSink mean what they mean for
    `apply`, but that a call that failed has done nothing that counts: it comes again as it was.
    """

    async def begin_rebuild(self, offset: int) -> None:
        """What the sink holds is void, durably so: states as of `offset` follow. Also the second time."""
        ...

    async def take_states(self, rows: Sequence[StateRow]) -> None:
        """Some vectors' states, each vector once, in no particular order; the same rows may come again.

        A state that is not alive is a tombstone, or deltas without effect alone.
        """
        ...

    async def end_rebuild(self, offset: int, lamport: int) -> None:
        """All states were brought. They and the cursor, `offset` of the present log, are the sink's data now,
        at once and as durable as its own cursor; `lamport` is the highest Lamport number among them.
        """
        ...


class SinkFailure(DeltaPropError):
    """Root of what `apply` raises on purpose."""

    def __init__(self, reason: str) -> None:
        self.reason = reason if isinstance(reason, str) and reason else f"no reason given ({reason!r:.80})"
        super().__init__(self.reason)


class TryAgain(SinkFailure):
    """A passing failure. What lies below `done_offset` is applied (None: nothing of this call)."""

    def __init__(self, reason: str, done_offset: int | None = None) -> None:
        super().__init__(reason)
        if done_offset is not None:
            _check_offset("done_offset", done_offset)
        self.done_offset = done_offset


class RejectDelta(SinkFailure):
    """The delta at `offset` can never be applied here; everything before it is."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(reason)
        _check_offset("offset", offset)
        self.offset = offset


class StopSink(SinkFailure):
    """The sink cannot go on until someone acts; the reason holds the cure."""


def _check_offset(field: str, offset: object) -> None:
    if isinstance(offset, bool) or not isinstance(offset, int):
        raise TypeError(f"{field}: {offset!r:.80} is not a whole number: give an offset of the log")
