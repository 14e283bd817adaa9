"""The state of a subscriber: its cursor, the received batches that are not taken yet, the processed offset.

Pure. Its rules: each offset is handed out once and in order, whatever is redelivered; the service never
sends more than was granted; nothing is acknowledged before the reader has processed it.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from delta_prop.client.delivered_batch import DeliveredBatch
from delta_prop.client.errors import Reconnect
from delta_prop.client.queries import Queries, Query
from delta_prop.client.seek import Seek, SeekStage, bounds_query, target_of
from delta_prop.client.service_identity import ServiceIdentity
from delta_prop_wire.credit_window import NO_CREDIT
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.frames import (
    Ack,
    Backpressure,
    BatchFrame,
    Credit,
    DeltaFrame,
    FoundOffsets,
    Frame,
    Heartbeat,
    Nack,
    PressureLevel,
    Start,
    StartAt,
    Subscribed,
    Subscription,
    Welcome,
)
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.client.session import Session
    from delta_prop_wire.stamp import LogName

logger = logging.getLogger("delta_prop.client")

ACK_INTERVAL_S = 0.1
"""Maximum delay until the processed offset is sent to a group, in seconds."""
CREDIT = Credit(20_000, 8 * 1024 * 1024)
FAULTS_MAX = 5
"""Maximum number of reconnects for wrong checksums with no batch received in between."""


@dataclass(slots=True)
class RequestOutcome:
    """The outcome of a request to add or remove topics."""

    done: bool = False
    refusal: Refused | None = None


class ConsumerState:
    """The state of one subscriber, over all its connections."""

    def __init__(self, first: Subscription, *, credit: Credit = CREDIT, log_id: bytes | None = None) -> None:
        if min(credit) < 1:
            raise UsageError(
                f"credit for {credit.deltas} deltas, {credit.bytes} bytes: give at least 1 of each"
            )
        self.failure: Refused | UsageError | None = None
        """The reason why nothing more comes, once all that was received is taken."""
        self.warning: Backpressure | None = None
        """The service's warning that this subscriber is close to the log start; None: it is not close."""
        self.log_end: int | None = None
        """The end of the log when the service answered."""
        self.started = False
        """True once the service has reported the start."""
        self.standing_by = False
        """True while another member reads for the group."""
        self.member: bytes | None = None
        """The identity of this member of its group, over all connections."""
        self._resets = 0  # how often operators reset the group's cursor, as last reported
        self.received = 0
        """All rows below this offset were received or match no topic."""
        self.queries = Queries()
        """The queries about the log."""
        self._seek: Seek | None = None
        self._credit = credit
        self._group = first.group
        self._start = first.start
        self._log: Cursor | None = None  # for its log id and epoch; the offset in it is not used
        self._service = ServiceIdentity(log_id)
        self._subscriptions: dict[int, Subscription] = {first.subscription: first}
        # request number to (number of its subscription, its outcome)
        self._pending_requests: dict[int, tuple[int, RequestOutcome]] = {}
        self._unsent_requests: deque[tuple[int, RequestOutcome]] = deque()
        self._subscribed = False  # on this connection
        self._credit_request: int | None = None  # the request on this connection that grants the credit
        self._batches: deque[DeliveredBatch] = deque()
        self._next_row = 0  # the next row of the first batch in `_batches`
        self._buffered_deltas = self._buffered_bytes = 0
        # the credit that the service may still use; below 0 after a frame that exceeded it
        self._remaining_credit = Credit(0, 0)
        self._after_last_row = 0  # the offset after the last row that was handed out
        self._position = 0  # like `_after_last_row`, but also after following rows that match no topic
        self._processed = self._acked = 0
        self._acked_at = 0.0
        self._faults = 0

    # --- the reader's side

    @property
    def buffered_deltas(self) -> int:
        """The number of deltas that were received and not taken."""
        return self._buffered_deltas

    def take(self) -> DeliveredBatch | None:
        """Remove and return the next batch, or the rest of it; None while there is none."""
        if not self._batches or self._seek is not None:
            return None
        batch = self._batches.popleft()
        if self._next_row:
            batch.skip(self._next_row)
            self._next_row = 0
        self._hand_out(batch, batch.count, batch.next_offset, batch.next_offset)
        return batch

    def take_row(self) -> tuple[DeliveredBatch, int] | None:
        """Remove and return the next row, as its batch and its index there; None while there is none."""
        if not self._batches or self._seek is not None:
            return None
        batch, row = self._batches[0], self._next_row
        self._next_row += 1
        is_last = self._next_row == batch.count
        if is_last:
            self._batches.popleft()
            self._next_row = 0
        position = batch.next_offset if is_last else batch.offset_of(row + 1)
        self._hand_out(batch, 1, batch.offset_of(row) + 1, position, is_last=is_last)
        return batch, row

    def mark_all_processed(self) -> None:
        """Note that the reader has processed all rows that were handed out."""
        self._mark_processed(self._position)

    def ack(self, offset: int) -> None:
        """Note that the reader has processed all rows up to and including `offset`. Raises UsageError."""
        if not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
            raise UsageError(f"offset {offset!r:.60}: give the offset of a delta that was delivered")
        if offset >= self._position:
            raise UsageError(
                f"offset {offset}: not delivered yet (the next one is {self._position}): acknowledge only "
                "what was delivered"
            )
        self._mark_processed(self._position if offset + 1 >= self._after_last_row else offset + 1)

    @property
    def log_id(self) -> bytes | None:
        """The log id of the service that answered."""
        return self._service.log_id

    @property
    def has_unacked(self) -> bool:
        """True while the group's cursor is below the processed offset."""
        return self._group is not None and not self.standing_by and self._processed > self._acked

    @property
    def cursor(self) -> Cursor | None:
        """The cursor to resume from: all rows below it are processed. None before the start is known."""
        if self._log is None:
            return None
        return self._log._replace(next_offset=self._processed)

    def seek(self, start: Start, log: LogName) -> None:
        """Hand out the rows from `start` on next. `log`: the partition.

        Raises UsageError.
        """
        if isinstance(start.value, Cursor) and self.log_id not in (None, start.value.log_id):
            raise UsageError(
                f"the cursor is of log {start.value.log_id.hex()}, and this subscriber reads another one: "
                "give a cursor of this log, or an offset"
            )
        if self.standing_by:
            raise UsageError(
                f"another member reads for group {self._group!r}: seek when this one reads, or have an "
                "operator reset the group"
            )
        if self._seek is not None and self._seek.query is not None:
            self.queries.discard(self._seek.query)
        if self._group is None:
            self._drop_unread()
            self._seek = Seek(start, SeekStage.RECONNECT if self._subscribed else SeekStage.SUBSCRIBE)
        else:
            query = self.queries.add(bounds_query(start, log))
            self._seek = Seek(start, SeekStage.FIND, query, has_gap=self._is_moving)

    def add(self, subscription: Subscription) -> RequestOutcome:
        """Request more topics, from the current cursor on."""
        self._subscriptions[subscription.subscription] = replace(
            subscription, start=Start(StartAt.LATEST), group=None
        )
        return self._enqueue_request(subscription.subscription)

    def remove(self, number: int) -> RequestOutcome:
        """Remove some topics. Raises UsageError."""
        if number not in self._subscriptions or len(self._subscriptions) == 1:
            raise UsageError(
                f"subscription {number}: open are {sorted(self._subscriptions)}, and one must stay: give "
                "another one"
            )
        del self._subscriptions[number]
        return self._enqueue_request(number)

    def fail(self, failure: Refused | UsageError) -> None:
        """Note that nothing more comes."""
        if self.failure is None:
            self.failure = failure
            for _, outcome in (*self._pending_requests.values(), *self._unsent_requests):
                outcome.done = True
                outcome.refusal = failure if isinstance(failure, Refused) else None

    # --- connections

    def on_welcome(self, welcome: Welcome) -> None:
        """Note that a hello was answered. Raises UsageError if the service has another log."""
        self._service.check(welcome)
        self.log_end = None if welcome.log is None else welcome.log.next_offset

    def on_disconnect(self) -> None:
        """Note that the connection is lost. Received batches stay; the rest is requested again."""
        self._subscribed = False
        self.warning = None
        self.queries.on_disconnect()
        if self._seek is not None:
            self._seek.on_disconnect()
        for _, outcome in self._pending_requests.values():
            outcome.done = True  # the next connection requests the topics in `_subscriptions`
        self._pending_requests.clear()
        for _, outcome in self._unsent_requests:
            outcome.done = True
        self._unsent_requests.clear()

    def on_frame(self, frame: Frame, size: int, now: float) -> bool:
        """Handle a frame; return True if it may wake the reader. Raises Reconnect, Refused."""
        match frame:
            case BatchFrame() | DeltaFrame():
                self._on_batch(frame, size)
                self._faults = 0
                return True
            case Ack(subscribed=granted) if granted is not None:
                self._on_subscribed(frame, granted)
                return True
            case Ack(response=FoundOffsets() as found):
                self.queries.on_answer(frame.correlation_id, found)
                self._advance_seek()
                return True
            case Ack():
                self._complete_request(frame.correlation_id)
                self._advance_to(frame.processed)
            case Heartbeat():
                self._advance_to(frame.processed)
            case Nack():
                self._on_nack(frame)
            case Backpressure():
                self.warning = frame if frame.level is not PressureLevel.OK else None
        return False

    def data_to_send(self, session: Session, now: float) -> list[bytes]:
        """Return the requests, the credit and the acknowledgement that are due. Raises Reconnect."""
        parts: list[bytes] = []
        if not self._subscribed:
            self._subscribed = True
            parts += self._subscribe_all(session)
        elif self._seek is not None and self._seek.stage is SeekStage.RECONNECT:
            raise Reconnect(is_requested=True)
        while self._unsent_requests:
            number, outcome = self._unsent_requests.popleft()
            if number in self._subscriptions:
                parts.append(self._encode_request(session, self._subscriptions[number], outcome))
            else:
                request, raw = session.unsubscribe(number, drain=False)
                self._pending_requests[request] = (number, outcome)
                parts.append(raw)
        if self._seek is not None and self._seek.stage is SeekStage.MOVE_BACK:
            self._seek.stage = SeekStage.CONFIRM
            parts.append(session.connection.send(Ack(processed=self._seek.target)))
        parts += self.queries.data_to_send(session)
        if self.started and not self._is_moving and not self._is_first_pending():
            ack = self._ack(now)
            if ack is not None:
                parts.append(session.connection.send(ack))
        return parts

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until an acknowledgement is due; None: none will be."""
        if not self.has_unacked or self._is_moving:
            return None
        return max(self._acked_at + ACK_INTERVAL_S - now, 0.0)

    def ack_now(self) -> None:
        """Make the next acknowledgement due at once."""
        self._acked_at = float("-inf")

    @property
    def processed(self) -> int | None:
        """The processed offset for a heartbeat."""
        is_known = self.started and not self.standing_by and self._seek is None
        return self._processed if is_known else None

    # --- helpers

    @property
    def _first_subscription(self) -> int:
        return next(iter(self._subscriptions))

    def _enqueue_request(self, number: int) -> RequestOutcome:
        outcome = RequestOutcome()
        if self._subscribed:
            self._unsent_requests.append((number, outcome))
        else:
            outcome.done = True
        return outcome

    def _subscribe_all(self, session: Session) -> list[bytes]:
        """Request all subscriptions: the first names the cursor, the last grants the credit.

        The cursor does not move before there is credit, so rows that match any subscription are delivered.
        """
        self._remaining_credit = self._free_credit()
        first, last = self._first_subscription, next(reversed(self._subscriptions))
        parts = []
        for number, subscription in self._subscriptions.items():
            request = subscription
            if number == first:
                request = replace(
                    subscription,
                    start=self._resume_start(),
                    group=self._group,
                    member=self.member,
                    credit=NO_CREDIT,
                )
            if number == last:
                request = replace(request, credit=self._remaining_credit)
            parts.append(self._encode_request(session, request, RequestOutcome()))
        self._credit_request = next(reversed(self._pending_requests))
        return parts

    def _encode_request(self, session: Session, subscription: Subscription, outcome: RequestOutcome) -> bytes:
        request, raw = session.request(subscription)
        self._pending_requests[request] = (subscription.subscription, outcome)
        return raw

    @property
    def _is_moving(self) -> bool:
        """True while what the reader has processed means nothing for the position that it seeks."""
        seek = self._seek
        return seek is not None and (seek.stage is not SeekStage.FIND or seek.has_gap)

    def _is_first_pending(self) -> bool:
        """Return True until the service has reported the start on this connection."""
        return any(number == self._first_subscription for number, _ in self._pending_requests.values())

    def _resume_start(self) -> Start:
        if self._seek is not None and self._group is None:
            return self._seek.start
        if self._log is None:
            return self._start
        return Start(StartAt.CURSOR, self._log._replace(next_offset=self.received))

    def _free_credit(self) -> Credit:
        """Return the credit that the received batches leave free."""
        deltas, size = self._credit
        return Credit(max(deltas - self._buffered_deltas, 1), max(size - self._buffered_bytes, 1))

    def _on_subscribed(self, ack: Ack, subscribed: Subscribed) -> None:
        start, self.started = subscribed.start, True
        if subscribed.standby:  # a second answer to this request comes later
            self._stand_by()
            return
        number = self._complete_request(ack.correlation_id)
        if number != self._first_subscription:
            return
        if self._seek is not None and self._seek.stage is SeekStage.SUBSCRIBE:
            self._complete_seek(self._seek, start.next_offset)
        elif self._log is None or self._is_superseded(subscribed):
            self._start_at(start.next_offset)
        self._log = start
        self.standing_by, self._resets = False, subscribed.resets
        self._advance_to(start.next_offset)

    def _is_superseded(self, subscribed: Subscribed) -> bool:
        """True if something other than this reader moved the group's cursor."""
        if self._group is None:
            return False
        moved = subscribed.resets != self._resets or subscribed.start.next_offset > self._processed
        return self.standing_by or moved

    def _stand_by(self) -> None:
        """Stand by: another member reads for the group, so the received batches belong to it now."""
        if not self.standing_by:
            logger.info("another member reads for group %r: standing by", self._group)
        self.standing_by, self._seek = True, None
        self._drop_unread()

    def _start_at(self, offset: int) -> None:
        self._drop_unread()
        self.received = self._after_last_row = self._position = offset
        self._processed = self._acked = offset

    def _skip_to(self, offset: int) -> None:
        """Hand out the rows from `offset` on next; those received below it are dropped."""
        while self._batches and self._batches[0].next_offset <= offset:
            batch = self._batches.popleft()
            self._buffered_deltas -= batch.count - self._next_row
            self._buffered_bytes -= batch.size
            self._next_row = 0
        while self._batches and self._batches[0].offset_of(self._next_row) < offset:
            self._next_row += 1
            self._buffered_deltas -= 1
        self.received = max(self.received, offset)
        self._after_last_row = offset
        self._position = offset if self._batches else self.received

    def _advance_seek(self) -> None:
        """Do the next step of a seek if its query has an answer. Raises Refused."""
        seek = self._seek
        if seek is None or seek.query is None or seek.query.found is None:
            return
        if seek.stage is SeekStage.CONFIRM:
            seek.stage = SeekStage.RECONNECT
        elif seek.stage is SeekStage.FIND:
            seek.target = target_of(seek.start, seek.query.found)
            if self._is_first_pending():
                seek.stage = SeekStage.SUBSCRIBE
            else:
                self._seek_in_group(seek)

    def _complete_seek(self, seek: Seek, offset: int) -> None:
        """Complete a seek with a subscription that starts at `offset`; in a group, that is its cursor."""
        self._start_at(offset)
        seek.has_gap = False
        if seek.target is None:
            self._seek = None
        else:
            self._seek_in_group(seek)

    def _seek_in_group(self, seek: Seek) -> None:
        """Skip to the target if its rows are here or still to come; else move the group's cursor back."""
        assert seek.target is not None
        assert seek.query is not None
        if seek.target >= self._position and not seek.has_gap:
            self._seek = None
            self._skip_to(seek.target)
        else:
            self._drop_unread()
            seek.stage = SeekStage.MOVE_BACK
            seek.query = self.queries.add(Query(seek.query.request))

    def _drop_unread(self) -> None:
        self._batches.clear()
        self._next_row = self._buffered_deltas = self._buffered_bytes = 0

    def _complete_request(self, request: int | None) -> int | None:
        if request is None or request not in self._pending_requests:
            return None
        number, outcome = self._pending_requests.pop(request)
        outcome.done = True
        return number

    def _on_nack(self, nack: Nack) -> None:
        refusal = nack.refusal()
        query = self.queries.on_refusal(nack.correlation_id, refusal)
        if query is not None and (self._seek is None or self._seek.query is not query):
            return  # its caller raises the refusal
        if query is not None and self._seek is not None and refusal.retryable:
            self._seek.query = self.queries.add(Query(query.request))
        pending = None
        if nack.correlation_id is not None:
            pending = self._pending_requests.pop(nack.correlation_id, None)
        if pending is not None and pending[0] != self._first_subscription and not refusal.retryable:
            number, outcome = pending
            self._subscriptions.pop(number, None)
            outcome.done, outcome.refusal = True, refusal
            if nack.correlation_id == self._credit_request:
                raise Reconnect(0.0, refusal)
        elif refusal.code is ErrorCode.CHECKSUM and self._faults < FAULTS_MAX:
            self._faults += 1
            raise Reconnect(0.0, refusal)
        elif refusal.retryable and refusal.code is not ErrorCode.UNKNOWN_STREAM:  # ids are never used again
            raise Reconnect((refusal.retry_after_ms or 0) / 1000, refusal)
        else:
            raise refusal

    def _on_batch(self, frame: BatchFrame | DeltaFrame, size: int) -> None:
        batch = DeliveredBatch(frame, self.received, size)
        self._remaining_credit = Credit(
            self._remaining_credit.deltas - batch.first - batch.count, self._remaining_credit.bytes - size
        )
        is_control = batch.batch is not None and batch.batch.is_control
        if batch.count and not is_control and not self._is_moving:
            self._batches.append(batch)
            self._buffered_deltas += batch.count
            self._buffered_bytes += size
            self.received = batch.next_offset
        self._advance_to(batch.next_offset)

    def _advance_to(self, offset: int | None) -> None:
        """Note that all rows below this offset were received or match no topic."""
        if offset is None or offset < self.received:
            return
        self.received = offset
        if self._is_moving:
            return
        if not self._batches:
            all_processed = self._processed == self._position
            self._position = offset
            if all_processed:
                self._processed = offset

    def _hand_out(
        self, batch: DeliveredBatch, rows: int, after_row: int, position: int, *, is_last: bool = True
    ) -> None:
        self._buffered_deltas -= rows
        if is_last:
            self._buffered_bytes -= batch.size
        self._after_last_row = after_row
        self._position = position if self._batches else self.received

    def _mark_processed(self, offset: int) -> None:
        self._processed = max(self._processed, min(offset, self._position))

    def _ack(self, now: float) -> Ack | None:
        credit = self._due_credit()
        due = self.has_unacked and (
            credit is not None or (self._group is not None and now - self._acked_at >= ACK_INTERVAL_S)
        )
        if credit is None and not due:
            return None
        self._acked, self._acked_at = self._processed, now
        return Ack(processed=self._processed, credit=credit)

    def _due_credit(self) -> Credit | None:
        """Return the credit to grant; None until half of the deltas or bytes were received and taken."""
        free, left = self._free_credit(), self._remaining_credit
        deltas, size = max(free.deltas - left.deltas, 0), max(free.bytes - left.bytes, 0)
        if 2 * deltas < self._credit.deltas and 2 * size < self._credit.bytes:
            return None
        self._remaining_credit = Credit(left.deltas + deltas, left.bytes + size)
        return Credit(deltas, size)
