"""One origin of a producer: the counters it draws, its batches without an outcome, and which go out again.

Pure. It neither sends nor waits: a handle in this process gives the batches to the pipeline, a client sends
them as frames. A batch is sent again under the same dots, before anything new, in the order of the counters.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import Generic, TypeVar

from delta_prop.producing.sent_clocks import SentClocks
from delta_prop_wire.batch import Batch
from delta_prop_wire.delta import AckLevel, Delta, Dot, Priority
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import COUNTER_MAX, ErrorCode

IN_FLIGHT_BYTES_MAX = 64 * 1024 * 1024
"""Maximum bytes of a producer's batches without an outcome."""


class SentBatch:
    """A batch that has its dots, and no outcome. `is_withdrawn`: it is to become a no-op, as its caller gave
    it up.
    """

    __slots__ = ("batch", "is_withdrawn")

    is_outcome_query = False
    """True if an earlier run of the producer sent these dots, and only their outcome is asked for."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.is_withdrawn = False

    @property
    def previous_counter(self) -> int:
        """The counter before the first row in its origin; a caller may have skipped those in between."""
        return self.batch.previous if self.batch.has_gaps else self.batch.base - 1


B = TypeVar("B", bound=SentBatch)


class OriginSequence(Generic[B]):
    """One origin, as a producer sees it. `watermark`: the service had processed the counters up to it at the
    last grant. `former_watermark`: that of the first grant; an earlier run sent the counters up to it.

    `next_counter`: the next one to draw; `previous_counter`: the last one in use before it. `unacked`: the
    batches without an outcome, by the counter of the first row. `retries`: those of them to send again.
    """

    def __init__(self, origin: int, priority: Priority) -> None:
        self.origin = origin
        self.priority = priority
        self.epoch = 0
        self.watermark = 0
        self.former_watermark = 0
        self._was_granted = False
        self.next_counter = 1
        self.previous_counter = 0
        self.clocks = SentClocks()
        self.unacked: dict[int, B] = {}
        self.retries: list[B] = []

    def grant(self, epoch: int, watermark: int) -> int:
        """Note a grant, or the watermark after a recovery of the log.

        Return the counter up to which the service has lost deltas that had an outcome, from the watermark on;
        the watermark itself, if it has lost none.
        """
        self.epoch, self.watermark = epoch, watermark
        if not self._was_granted:
            self._was_granted, self.former_watermark = True, watermark
            self.previous_counter, self.next_counter = watermark, watermark + 1
            return watermark
        self.next_counter = max(self.next_counter, watermark + 1)
        for sent in self.unacked.values():
            if sent.batch.last > watermark and not sent.is_outcome_query:
                return max(sent.previous_counter, watermark)
        return self.next_counter - 1

    def requeue(self) -> list[B]:
        """Have all batches without an outcome sent again; return them in order."""
        self.retries = sorted(self.unacked.values(), key=_base)
        return self.retries

    def encode(
        self,
        deltas: Sequence[Delta],
        *,
        base: int,
        clock: Sequence[Dot],
        level: AckLevel,
        epoch: int | None = None,
        previous: int = 0,
        counters: list[int] | None = None,
    ) -> Batch:
        """Encode deltas under the dots from `base` on, or under `counters`, which have gaps after `previous`.

        `epoch`: None for the granted one. Draws nothing.
        """
        return encode_batch(
            deltas,
            origin=self.origin,
            base=base,
            epoch=self.epoch if epoch is None else epoch,
            clock=clock,
            previous=0 if counters is None else previous,
            counters=counters,
            ack_level=level,
            priority=self.priority,
        )

    def draw(self, sent: B, clock: Sequence[Dot]) -> None:
        """Draw the dots of an encoded batch, which has this clock and waits for its outcome from now on."""
        batch = sent.batch
        if clock:
            self.clocks.on_drawn(clock)
        self.unacked[batch.base] = sent
        if not sent.is_outcome_query:
            self.previous_counter, self.next_counter = batch.last, batch.last + 1

    def remove(self, sent: B) -> None:
        """Remove a batch that has its outcome, or whose dots are used up."""
        del self.unacked[sent.batch.base]
        if sent.batch.clock:
            self.clocks.on_processed(sent.batch.clock)

    def add_retry(self, sent: B) -> None:
        """Have a batch sent again."""
        insort(self.retries, sent, key=_base)

    def take_retry(self, after: int = 0, until: int = COUNTER_MAX) -> B | None:
        """Take the first batch to send again that begins above `after` and up to `until`; None: there is
        none.
        """
        index = bisect_right(self.retries, after, key=_base) if after else 0
        if index < len(self.retries) and self.retries[index].batch.base <= until:
            return self.retries.pop(index)
        return None


def check_in_flight(name: str, unit: str, *, count: int, count_max: int, size: int, size_max: int) -> None:
    """Raise Refused (QUEUE_FULL) if a producer has too much without an outcome: `unit`s or bytes."""
    if count >= count_max or size >= size_max:
        raise Refused(
            ErrorCode.QUEUE_FULL,
            f"producer {name!r} has {count} of {count_max} {unit} and {size} of {size_max} bytes "
            "unacknowledged: await receipts first",
            retry_after_ms=10,
            details={"depth": count, "capacity": count_max},
        )


def _base(sent: SentBatch) -> int:
    return sent.batch.base
