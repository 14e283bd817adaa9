"""Offsets of a log that are to be read once: what of them has come, and what to ask for next.

Pure: `now` is an argument, frames come in and batches go out. Unlike a subscriber it ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from delta_prop.client.errors import Reconnect
from delta_prop.client.known_service import KnownService
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.cutting import cut
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import Ack, BatchFrame, Credit, Heartbeat, Nack, Start, StartAt, Subscription
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from delta_prop.client.session import Session
    from delta_prop_wire.frames import Frame, Welcome
    from delta_prop_wire.topics import Topic

CREDIT_BYTES = 8 * 1024 * 1024
"""What may be under way; as much again lies in the sockets' buffers."""
FAULTS_MAX = 5
_NUMBER = 1  # of the only subscription
_BATCH_DELTAS_MAX = 10_000


class WantedRange:
    """The offsets from `start` up to `end`, which is left out; of these what the topics ask for.

    `log`: the id and the epoch of the log that the offsets are of; None: of whichever answers first.
    """

    def __init__(
        self,
        start: int,
        end: int,
        topics: Sequence[Topic],
        *,
        log: tuple[bytes, int] | None = None,
        credit_bytes: int = CREDIT_BYTES,
    ) -> None:
        self.received = start
        """Everything below came, or is none of our business."""
        self._end = end
        self._topics = tuple(topics)
        self._log = log
        self._service = KnownService(None if log is None else log[0])
        self._credit_bytes = credit_bytes
        self._spent_bytes = 0  # since the last grant
        self._drain = 0  # the request that is answered behind all that there is
        self._faults = 0

    @property
    def done(self) -> bool:
        """Whether all has come."""
        return self.received >= self._end

    def welcomed(self, welcome: Welcome) -> None:
        """A hello was answered. Raises UsageError where it is another log."""
        self._service.check(welcome)

    def requests(self, session: Session) -> list[bytes]:
        """What to ask for on a new connection: what is missing, and to be told at once when that has come.

        Else only the next `dealt_with` would tell it of rows at the end that are not ours, a second later.
        """
        self._spent_bytes = 0
        credit = Credit(max(self._end - self.received, 1), self._credit_bytes)
        subscription = Subscription(
            _NUMBER, self._topics, self._start(), credit, batch_deltas_max=_BATCH_DELTAS_MAX, wait_ms_max=1
        )
        _, ask = session.request(subscription)
        self._drain, leave = session.unsubscribe(_NUMBER, drain=True)
        return [ask, leave]

    def grant(self, session: Session) -> list[bytes]:
        """New credit, once half of it is used up."""
        if 2 * self._spent_bytes < self._credit_bytes:
            return []
        spent, self._spent_bytes = self._spent_bytes, 0
        return [session.connection.send(Ack(credit=Credit(0, spent)))]

    def take_in(self, frame: Frame, size: int) -> Iterator[LoggedBatch]:
        """A frame came; the batches of what is new and wanted in it. Raises Reconnect, Refused."""
        match frame:
            case BatchFrame():
                self._faults = 0
                self._spent_bytes += size
                yield from self._wanted_of(frame)
            case Ack():
                self._noted(frame)
            case Heartbeat(processed=at):
                self._pass_to(at)
            case Nack():
                self._refused(frame)

    # --- helpers

    def _start(self) -> Start:
        if self._log is None:
            return Start(StartAt.OFFSET, self.received)
        return Start(StartAt.CURSOR, Cursor(*self._log, self.received))

    def _noted(self, ack: Ack) -> None:
        if ack.subscribed is not None:
            start = ack.subscribed.start
            self._log = (start.log_id, start.epoch)
        self._pass_to(ack.processed)
        if ack.correlation_id == self._drain and not self.done:
            raise Refused(
                ErrorCode.BAD_REQUEST,
                f"offsets up to {self._end} are asked for, and the log ends at {ack.processed}: what lay "
                "behind was lost with a failure of its disk, or never was",
                details={"next_offset": ack.processed or 0},
            )

    def _pass_to(self, offset: int | None) -> None:
        if offset is not None:
            self.received = max(self.received, offset)

    def _wanted_of(self, frame: BatchFrame) -> Iterator[LoggedBatch]:
        batch, stamp = frame.batch, frame.stamp
        assert stamp is not None, "the connection lets no other batch come"
        logged = LoggedBatch(batch, frame.sequence, stamp.lamport, stamp.source, known_ids=stamp.known_ids)
        first, last = logged.row_offset(0), logged.row_offset(batch.count - 1)
        before, self.received = self.received, max(self.received, last + 1)
        if batch.is_control or last < before or first >= self._end:
            return
        if first >= before and last < self._end:
            yield logged
        else:
            yield from _cut(logged, before, self._end)

    def _refused(self, nack: Nack) -> None:
        refusal = nack.refusal()
        damaged = refusal.code is ErrorCode.CHECKSUM and self._faults < FAULTS_MAX
        self._faults += damaged
        if damaged or refusal.retryable:
            raise Reconnect((refusal.retry_after_ms or 0) / 1000, refusal)
        raise refusal


def _cut(logged: LoggedBatch, begin: int, end: int) -> Iterator[LoggedBatch]:
    """Of a batch the rows from one offset up to another."""
    places = logged.batch.row_offsets
    if places is None:
        places = np.arange(logged.offset, logged.next_offset, dtype=np.uint64)
    rows = np.flatnonzero((places >= begin) & (places < end))
    if not len(rows):
        return
    parts = cut(logged, rows)
    for raw in parts[1::2]:
        batch = Batch(raw)
        assert batch.row_offsets is not None
        offset = int(batch.row_offsets[0])
        lamport = logged.lamport + offset - logged.offset
        yield LoggedBatch(batch, offset, lamport, logged.source, known_ids=logged.known_ids)
