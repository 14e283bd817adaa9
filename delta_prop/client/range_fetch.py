"""Fetches a range of a log once: tracks the offsets received and what to request next.

Pure: `now` is an argument, frames come in and batches go out. Unlike a subscriber it ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from delta_prop.client.errors import Reconnect
from delta_prop.client.service_identity import ServiceIdentity
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import (
    Ack,
    BatchFrame,
    Credit,
    Frame,
    Heartbeat,
    Nack,
    Start,
    StartAt,
    Subscription,
    Welcome,
)
from delta_prop_wire.slicing import slice_rows
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.client.session import Session
    from delta_prop_wire.topics import Topic

CREDIT_BYTES = 8 * 1024 * 1024
"""Bytes that the service may send before they are read; as many again may be in the sockets' buffers."""
FAULTS_MAX = 5
"""Maximum number of reconnects for wrong checksums with no batch received in between."""
_SUBSCRIPTION = 1  # the number of the only subscription
_BATCH_DELTAS_MAX = 10_000


class RangeFetch:
    """The rows of `topics` at the offsets from `start` up to `end`, which is excluded.

    `log`: the id and the epoch of the expected log; None: those of the service that answers first.
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
        """All rows below this offset were received or match no topic."""
        self._end = end
        self._topics = tuple(topics)
        self._log = log
        self._service = ServiceIdentity(None if log is None else log[0])
        self._credit_bytes = credit_bytes
        self._spent_bytes = 0  # bytes received since the last grant of credit
        self._drain_request = 0  # the request that is answered after all available rows
        self._faults = 0

    @property
    def done(self) -> bool:
        """True once everything was received."""
        return self.received >= self._end

    def on_welcome(self, welcome: Welcome) -> None:
        """Note that a hello was answered. Raises UsageError if the service has another log."""
        self._service.check(welcome)

    def make_requests(self, session: Session) -> list[bytes]:
        """Return the requests for a new connection: for the missing rows, and for an answer after the last.

        Without the second request, trailing rows that match no topic would be reported a second later, by the
        next `processed`.
        """
        self._spent_bytes = 0
        credit = Credit(max(self._end - self.received, 1), self._credit_bytes)
        subscription = Subscription(
            _SUBSCRIPTION,
            self._topics,
            self._start(),
            credit,
            batch_deltas_max=_BATCH_DELTAS_MAX,
            wait_ms_max=1,
        )
        _, subscribe = session.request(subscription)
        self._drain_request, unsubscribe = session.unsubscribe(_SUBSCRIPTION, drain=True)
        return [subscribe, unsubscribe]

    def make_grant(self, session: Session) -> list[bytes]:
        """Return new credit, once half of it is used up."""
        if 2 * self._spent_bytes < self._credit_bytes:
            return []
        spent, self._spent_bytes = self._spent_bytes, 0
        return [session.connection.send(Ack(credit=Credit(0, spent)))]

    def on_frame(self, frame: Frame, size: int) -> Iterator[LoggedBatch]:
        """Handle a frame; yield the batches of its new and wanted rows. Raises Reconnect, Refused."""
        match frame:
            case BatchFrame():
                self._faults = 0
                self._spent_bytes += size
                yield from self._select_rows(frame)
            case Ack():
                self._on_ack(frame)
            case Heartbeat():
                self._advance_to(frame.processed)
            case Nack():
                self._on_nack(frame)

    # --- helpers

    def _start(self) -> Start:
        if self._log is None:
            return Start(StartAt.OFFSET, self.received)
        return Start(StartAt.CURSOR, Cursor(*self._log, self.received))

    def _on_ack(self, ack: Ack) -> None:
        if ack.subscribed is not None:
            start = ack.subscribed.start
            self._log = (start.log_id, start.epoch)
        self._advance_to(ack.processed)
        if ack.correlation_id == self._drain_request and not self.done:
            raise Refused(
                ErrorCode.BAD_REQUEST,
                f"offsets up to {self._end}: the log ends at {ack.processed}, as rows were lost in a disk "
                "failure or never existed: read up to there",
                details={"next_offset": ack.processed or 0},
            )

    def _advance_to(self, offset: int | None) -> None:
        if offset is not None:
            self.received = max(self.received, offset)

    def _select_rows(self, frame: BatchFrame) -> Iterator[LoggedBatch]:
        batch, stamp = frame.batch, frame.stamp
        assert stamp is not None, "the connection rejects a batch without a stamp"
        logged = LoggedBatch(batch, frame.sequence, stamp.lamport, stamp.source, known_ids=stamp.known_ids)
        first, last = logged.row_offset(0), logged.row_offset(batch.count - 1)
        before, self.received = self.received, max(self.received, last + 1)
        if batch.is_control or last < before or first >= self._end:
            return
        if first >= before and last < self._end:
            yield logged
        else:
            yield from _slice_range(logged, before, self._end)

    def _on_nack(self, nack: Nack) -> None:
        refusal = nack.refusal()
        is_corrupt = refusal.code is ErrorCode.CHECKSUM and self._faults < FAULTS_MAX
        self._faults += is_corrupt
        if is_corrupt or refusal.retryable:
            raise Reconnect((refusal.retry_after_ms or 0) / 1000, refusal)
        raise refusal


def _slice_range(logged: LoggedBatch, start: int, end: int) -> Iterator[LoggedBatch]:
    """Yield the rows of a batch from offset `start` up to `end`."""
    offsets = logged.batch.row_offsets
    if offsets is None:
        offsets = np.arange(logged.offset, logged.next_offset, dtype=np.uint64)
    rows = np.flatnonzero((offsets >= start) & (offsets < end))
    if not len(rows):
        return
    parts = slice_rows(logged, rows)
    for raw in parts[1::2]:
        batch = Batch(raw)
        assert batch.row_offsets is not None
        offset = int(batch.row_offsets[0])
        lamport = logged.lamport + offset - logged.offset
        yield LoggedBatch(batch, offset, lamport, logged.source, known_ids=logged.known_ids)
