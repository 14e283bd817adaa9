"""An offer: the deltas of one call, which share one outcome.

Pure values and small transitions. An offer has no dots until a batch is made that holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgpack
import numpy as np

from delta_prop.calls.argument_checks import with_parents
from delta_prop.calls.outcomes import PublishAck
from delta_prop_wire.delta import Delta, Dot, Priority, Source, create, dense
from delta_prop_wire.delta import Kind as _Kind
from delta_prop_wire.errors import Refused
from delta_prop_wire.slicing import deltas_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from delta_prop.client.sequence_sender import UnackedBatch
    from delta_prop_wire.block import Block

ROW_OVERHEAD_BYTES = 64
"""Approximate bytes of a row besides its name and content."""


class OutcomeListener(Protocol):
    """The caller of an offer."""

    def on_outcome(self, outcome: PublishAck | Refused) -> None:
        """Note the outcome. It must not block."""
        ...


class PendingDot:
    """The dot of an offer's last row. `counter`: 0 until drawn; `is_removed`: it will never be drawn."""

    __slots__ = ("counter", "is_removed", "origin")

    def __init__(self, origin: int) -> None:
        self.origin = origin
        self.counter = 0
        self.is_removed = False

    @property
    def is_pending(self) -> bool:
        """True until the counter is drawn or given up; offers that depend on it wait."""
        return self.counter == 0 and not self.is_removed


class Columns(NamedTuple):
    """Complete vectors, one per row of `matrix`."""

    ids: Sequence[str]
    matrix: NDArray[np.float32]
    namespace: str
    kind: _Kind

    def deltas(self) -> list[Delta]:
        """Return the same vectors as deltas."""
        make = create if self.kind is _Kind.CREATE else dense
        rows = zip(self.ids, self.matrix, strict=True)
        return [Delta(vector_id, make(row), self.namespace) for vector_id, row in rows]


class Offer:
    """Deltas of one priority. `listener` is notified once, of the outcome.

    `after`: the deltas that must come first, by pending dot, dot or id. `predecessors`: pending dots of
    earlier offers that change the same vectors, but are sent by other senders. `counter`: the counter of the
    first row, if the caller numbers its deltas. `is_single`: it shares a batch with no other offer.
    `is_awaited`: its caller waits for the outcome, at most `publish_timeout_s`. `is_opaque_only`:
    `validate.is_opaque_only` is true of each delta.
    """

    __slots__ = (
        "after",
        "columns",
        "count",
        "counter",
        "deltas",
        "done",
        "has_ids",
        "is_awaited",
        "is_dropped",
        "is_opaque_only",
        "is_single",
        "listener",
        "offered_at",
        "pending_dot",
        "predecessors",
        "priority",
        "refusal",
        "size",
        "source",
        "unacked_batch",
    )

    def __init__(
        self,
        priority: Priority,
        deltas: Sequence[Delta],
        listener: OutcomeListener,
        *,
        columns: Columns | Block | None = None,
        after: Sequence[PendingDot | Dot | bytes] = (),
        counter: int | None = None,
        is_opaque_only: bool = False,
    ) -> None:
        self.priority = priority
        self.deltas: Sequence[Delta] = deltas
        self.columns: Columns | Block | None = columns
        self.listener = listener
        self.after = after
        self.predecessors: Sequence[PendingDot] = ()
        self.counter = counter
        if columns is None:
            self.count, self.size = len(deltas), _estimate_size(deltas)
        elif isinstance(columns, Columns):
            self.count = len(columns.ids)
            self.size = columns.matrix.nbytes + ROW_OVERHEAD_BYTES * self.count
        else:
            self.count, self.size = columns.count, columns.size
        self.has_ids = bool(deltas) and deltas[0].id is not None
        self.source = deltas[0].source if deltas else Source.LOCAL  # used where no hello names the source
        self.is_single = columns is not None or any(delta.expect is not None for delta in deltas)
        self.offered_at = 0.0  # when the call was made
        self.pending_dot = PendingDot(0)
        self.unacked_batch: UnackedBatch | None = None
        self.refusal: Refused | None = None  # the last one, even if it no longer applies
        self.is_dropped = False
        self.is_awaited = False
        self.is_opaque_only = is_opaque_only
        self.done = False

    @property
    def calls(self) -> int:
        """The number of calls in the offer."""
        return 1

    @property
    def is_block(self) -> bool:
        """True if the offer is a block, whose rows are not decoded here."""
        return not isinstance(self.columns, Columns | None)

    @property
    def decoded_deltas(self) -> Sequence[Delta]:
        """The deltas of the offer, also of columns and blocks, as long as no batch holds them."""
        if self.columns is None:
            return self.deltas
        if isinstance(self.columns, Columns):
            return self.columns.deltas()
        return list(deltas_of(self.columns.encode(origin=0, base=1)))

    @property
    def is_ready(self) -> bool:
        """True if all deltas that must come first have their dots."""
        for dot in self.predecessors:
            if dot.is_pending:
                return False
        return not any(isinstance(one, PendingDot) and one.is_pending for one in self.after)

    def parents(self) -> list[Dot | bytes]:
        """Return the dots and ids of the deltas that must come first, without those of the same origin.

        The order of counters already puts those first.
        """
        names: list[Dot | bytes] = []
        for cause in self.after:
            if not isinstance(cause, PendingDot):
                names.append(cause)
            elif cause.counter and cause.origin != self.pending_dot.origin:
                names.append(Dot(cause.origin, cause.counter))
        return names

    def mark_encoded(self, unacked: UnackedBatch) -> None:
        """Note that a batch holds these deltas: drop them here."""
        self.unacked_batch = unacked
        self.deltas, self.columns = (), None

    def settle(self, outcome: PublishAck | Refused) -> None:
        """Report the outcome."""
        assert not self.done, "settled twice"
        self.done = True
        self.deltas, self.columns, self.unacked_batch = (), None, None
        self.listener.on_outcome(outcome)


def make_offer(
    priority: Priority,
    deltas: Sequence[Delta],
    listener: OutcomeListener,
    after: Sequence[PendingDot | Dot | bytes],
    *,
    columns: Columns | Block | None,
    counter: int | None,
    opaque_only: bool,
) -> Offer:
    """Return the offer of a call; known names in `after` become parents. Raises InvalidDelta."""
    parents = [cause for cause in after if not isinstance(cause, PendingDot)]
    return Offer(
        priority,
        with_parents(deltas, parents) if len(deltas) and parents else deltas,
        listener,
        columns=columns,
        after=[cause for cause in after if isinstance(cause, PendingDot)],
        counter=counter,
        is_opaque_only=opaque_only and not after,
    )


class OutcomeJoiner:
    """Joins the outcomes of an offer's first and last rows, which are sent in two batches, into one."""

    def __init__(self, offer: Offer) -> None:
        self._offer = offer
        self._outcomes: list[PublishAck | Refused | None] = [None, None]

    def on_part_outcome(self, index: int, outcome: PublishAck | Refused) -> None:
        """Note the outcome of the first rows (index 0) or of the last rows (1); settle after both."""
        self._outcomes[index] = outcome
        first, second = self._outcomes
        if first is not None and second is not None:
            self._offer.settle(self._join(first, second))

    def _join(self, first: PublishAck | Refused, second: PublishAck | Refused) -> PublishAck | Refused:
        if not isinstance(first, PublishAck):
            return first
        if not isinstance(second, PublishAck):
            return second
        rows = [*first.row_acks(), *second.row_acks()]
        if any(not ack.duplicate for ack in rows):
            return PublishAck.of_rows(rows, second.level)
        duplicates = {row: ack.offset for row, ack in enumerate(rows)}
        return PublishAck(first.offset, first.dot, len(rows), second.level, duplicates)


class PartListener:
    """Listener of one of the two offers that replace a split one."""

    __slots__ = ("_index", "_joiner")

    def __init__(self, joiner: OutcomeJoiner, index: int) -> None:
        self._joiner = joiner
        self._index = index

    def on_outcome(self, outcome: PublishAck | Refused) -> None:
        """Note the outcome of the part."""
        self._joiner.on_part_outcome(self._index, outcome)


def _estimate_size(deltas: Sequence[Delta]) -> int:
    """Estimate the bytes that these deltas take in a batch, rather too many than too few."""
    size = 0
    for delta in deltas:
        operation = delta.operation
        size += ROW_OVERHEAD_BYTES + 3 * len(delta.vector_id) + len(operation.data)
        if operation.values is not None:
            size += operation.values.nbytes
        if operation.indices is not None:
            size += operation.indices.nbytes
        if delta.metadata is not None:
            size += len(msgpack.packb(dict(delta.metadata)))
        if delta.parents or delta.topics:
            size += 24 * len(delta.parents) + sum(8 + 3 * len(topic) for topic in delta.topics)
    return size
