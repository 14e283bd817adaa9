"""What a subscriber has coming: its cursor, what came and is not taken, what it may say is dealt with.

Pure. Its rules: each offset is handed out once and in order, whatever comes twice; no more is let in than was
granted; nothing is said to be dealt with that the reader has not come back from.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from delta_prop.client.delivered import DeliveredBatch
from delta_prop.client.errors import Reconnect
from delta_prop.client.known_service import KnownService
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.frames import (
    Ack,
    Backpressure,
    BatchFrame,
    Credit,
    DeltaFrame,
    Heartbeat,
    Level,
    Nack,
    Start,
    StartAt,
    Subscription,
)
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.window import NOTHING

if TYPE_CHECKING:
    from delta_prop.client.session import Session
    from delta_prop_wire.frames import Frame, Subscribed, Welcome

logger = logging.getLogger("delta_prop.client")

ACK_S = 0.1
"""How long what was dealt with may stay unsaid, where a group keeps it."""
CREDIT = Credit(20_000, 8 * 1024 * 1024)
FAULTS_MAX = 5


@dataclass(slots=True)
class Answer:
    """What became of a request to add topics, or to end some."""

    done: bool = False
    refusal: Refused | None = None


class Incoming:
    """One subscriber's side, over as many connections as it takes."""

    def __init__(self, first: Subscription, *, credit: Credit = CREDIT, log_id: bytes | None = None) -> None:
        if min(credit) < 1:
            raise UsageError(
                f"credit for {credit.deltas} deltas, {credit.bytes} bytes: give at least 1 of each"
            )
        self.failure: Refused | UsageError | None = None
        """Why nothing comes any more, once what came is taken."""
        self.warning: Backpressure | None = None
        """How near this subscriber is to the end of what the log keeps; None: not near."""
        self.log_end: int | None = None
        """Where the log ended when the service answered."""
        self.started = False
        """True once the service has answered."""
        self.standing_by = False
        """True while another member reads for the group."""
        self.member: bytes | None = None
        """The identity of this member of its group, over all connections."""
        self._resets = 0  # of the group's place, by operators, as far as told
        self.received = 0
        self.delivered = 0
        self._credit = credit
        self._group = first.group
        self._start = first.start
        self._log: Cursor | None = None  # its id and epoch
        self._service = KnownService(log_id)
        self._wanted: dict[int, Subscription] = {first.subscription: first}
        self._asked: dict[int, tuple[int, Answer]] = {}  # request to the subscription it is about
        self._to_ask: deque[tuple[int, Answer]] = deque()
        self._subscribed = False  # on this connection
        self._brings_credit: int | None = None  # which request of this connection
        self._batches: deque[DeliveredBatch] = deque()
        self._row = 0  # of the first of them
        self._deltas = self._bytes = 0
        self._left = Credit(0, 0)  # what the service may still send; below 0 where a frame was larger
        self._in_hand = 0  # the offset behind the last row that the reader was handed
        self._handed = 0  # and behind what follows it and is none of its business
        self._dealt_with = self._said = 0
        self._said_at = 0.0
        self._faults = 0

    # --- the reader's side

    @property
    def waiting(self) -> int:
        """Deltas that came and are not taken."""
        return self._deltas

    def take(self) -> DeliveredBatch | None:
        """The next batch, what is left of it; None while there is none."""
        if not self._batches:
            return None
        batch = self._batches.popleft()
        if self._row:
            batch.skip(self._row)
            self._row = 0
        self._hand(batch, batch.count, batch.next_offset, batch.next_offset)
        return batch

    def take_row(self) -> tuple[DeliveredBatch, int] | None:
        """The next row: its batch and its place there; None while there is none."""
        if not self._batches:
            return None
        batch, row = self._batches[0], self._row
        self._row += 1
        last = self._row == batch.count
        if last:
            self._batches.popleft()
            self._row = 0
        behind = batch.next_offset if last else batch.offset_of(row + 1)
        self._hand(batch, 1, batch.offset_of(row) + 1, behind, whole=last)
        return batch, row

    def come_back(self) -> None:
        """The reader is done with all that it was handed."""
        self._done(self._handed)

    def ack(self, offset: int) -> None:
        """Everything up to this offset is done with. Raises UsageError beyond what was handed out."""
        if not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
            raise UsageError(f"offset {offset!r:.60}: give that of a delta that came, a whole number")
        if offset >= self._handed:
            raise UsageError(
                f"offset {offset} was not delivered yet (the next one is {self._handed}): acknowledge what "
                "came"
            )
        self._done(self._handed if offset + 1 >= self._in_hand else offset + 1)

    @property
    def log_id(self) -> bytes | None:
        """The log of the service that answered."""
        return self._service.log_id

    @property
    def unsaid(self) -> bool:
        """Whether something is dealt with that the group's place is to be moved by, and is not yet."""
        return self._group is not None and not self.standing_by and self._dealt_with > self._said

    @property
    def cursor(self) -> Cursor | None:
        """Where to go on another time: below it everything is dealt with. None before the start is known."""
        if self._log is None:
            return None
        return self._log._replace(next_offset=self._dealt_with)

    def add(self, subscription: Subscription) -> Answer:
        """Ask for more topics, from wherever the cursor is."""
        self._wanted[subscription.subscription] = replace(
            subscription, start=Start(StartAt.LATEST), group=None
        )
        return self._ask(subscription.subscription)

    def remove(self, number: int) -> Answer:
        """End some topics. Raises UsageError."""
        if number not in self._wanted or len(self._wanted) == 1:
            raise UsageError(f"subscription {number}: there are {sorted(self._wanted)}, and one has to stay")
        del self._wanted[number]
        return self._ask(number)

    def fail(self, failure: Refused | UsageError) -> None:
        """Nothing comes any more."""
        if self.failure is None:
            self.failure = failure
            for _, answer in (*self._asked.values(), *self._to_ask):
                answer.done = True
                answer.refusal = failure if isinstance(failure, Refused) else None

    # --- connections

    def welcomed(self, welcome: Welcome) -> None:
        """A hello was answered. Raises UsageError where it is another log."""
        self._service.check(welcome)
        self.log_end = None if welcome.log is None else welcome.log.next_offset

    def disconnected(self) -> None:
        """The connection is gone. What came stays; the rest is asked for again."""
        self._subscribed = False
        self.warning = None
        for _, answer in self._asked.values():
            answer.done = True  # it is part of what is asked for at the next connection, or not any more
        self._asked.clear()
        for _, answer in self._to_ask:
            answer.done = True
        self._to_ask.clear()

    def take_in(self, frame: Frame, size: int, now: float) -> bool:
        """A frame came; whether it brought something on. Raises Reconnect, Refused."""
        match frame:
            case BatchFrame() | DeltaFrame():
                self._deliver(frame, size)
                self._faults = 0
                return True
            case Ack(subscribed=granted) if granted is not None:
                self._granted(frame, granted)
                return True
            case Ack():
                self._answered(frame.correlation_id)
                self._pass_to(frame.processed)
            case Heartbeat():
                self._pass_to(frame.processed)
            case Nack():
                self._refused(frame)
            case Backpressure():
                self.warning = frame if frame.level is not Level.OK else None
        return False

    def to_send(self, session: Session, now: float) -> list[bytes]:
        """Requests, grants, and what is dealt with, as far as it is time for them."""
        parts: list[bytes] = []
        if not self._subscribed:
            self._subscribed = True
            parts += self._subscribe_all(session)
        while self._to_ask:
            number, answer = self._to_ask.popleft()
            if number in self._wanted:
                parts.append(self._request(session, self._wanted[number], answer))
            else:
                request, raw = session.unsubscribe(number, drain=False)
                self._asked[request] = (number, answer)
                parts.append(raw)
        if self.started and not any(number == self._first for number, _ in self._asked.values()):
            ack = self._ack(now)
            if ack is not None:
                parts.append(session.connection.send(ack))
        return parts

    def wait_s(self, now: float) -> float | None:
        """When something is to be said though nobody asks."""
        if not self.unsaid:
            return None
        return max(self._said_at + ACK_S - now, 0.0)

    def say_now(self) -> None:
        """Do not wait with what is dealt with."""
        self._said_at = float("-inf")

    @property
    def dealt_with(self) -> int | None:
        """What a heartbeat says."""
        return self._dealt_with if self.started and not self.standing_by else None

    # --- helpers

    @property
    def _first(self) -> int:
        return next(iter(self._wanted))

    def _ask(self, number: int) -> Answer:
        answer = Answer()
        if self._subscribed:
            self._to_ask.append((number, answer))
        else:
            answer.done = True
        return answer

    def _subscribe_all(self, session: Session) -> list[bytes]:
        """The first one says where the cursor starts, the last one brings the credit: without any the cursor
        stays, so that from there on all comes that any of them asks for.
        """
        self._left = self._room()
        first, last = self._first, next(reversed(self._wanted))
        parts = []
        for number, wanted in self._wanted.items():
            asked = wanted
            if number == first:
                asked = replace(
                    wanted, start=self._resume(), group=self._group, member=self.member, credit=NOTHING
                )
            if number == last:
                asked = replace(asked, credit=self._left)
            parts.append(self._request(session, asked, Answer()))
        self._brings_credit = next(reversed(self._asked))
        return parts

    def _request(self, session: Session, wanted: Subscription, answer: Answer) -> bytes:
        request, raw = session.request(wanted)
        self._asked[request] = (wanted.subscription, answer)
        return raw

    def _resume(self) -> Start:
        if self._log is None:
            return self._start
        return Start(StartAt.CURSOR, self._log._replace(next_offset=self.received))

    def _room(self) -> Credit:
        """What may be sent besides what lies here."""
        deltas, size = self._credit
        return Credit(max(deltas - self._deltas, 1), max(size - self._bytes, 1))

    def _granted(self, ack: Ack, granted: Subscribed) -> None:
        start, self.started = granted.start, True
        if granted.standby:  # a second answer comes to the same request
            self._stand_by()
            return
        number = self._answered(ack.correlation_id)
        if number != self._first:
            return
        if self._log is None or self._others_read_on(granted):
            self._begin_at(start.next_offset)
        self._log = start
        self.standing_by, self._resets = False, granted.resets
        self._pass_to(start.next_offset)

    def _others_read_on(self, granted: Subscribed) -> bool:
        """True if the group's place is no longer of this reader's making."""
        if self._group is None:
            return False
        moved = granted.resets != self._resets or granted.start.next_offset > self._dealt_with
        return self.standing_by or moved

    def _stand_by(self) -> None:
        """Another member reads for the group: what lies here is its own now."""
        if not self.standing_by:
            logger.info("another member reads for group %r: standing by", self._group)
        self.standing_by = True
        self._drop_unread()

    def _begin_at(self, offset: int) -> None:
        self._drop_unread()
        self.received = self._in_hand = self._handed = offset
        self._dealt_with = self._said = offset

    def _drop_unread(self) -> None:
        self._batches.clear()
        self._row = self._deltas = self._bytes = 0

    def _answered(self, request: int | None) -> int | None:
        if request is None or request not in self._asked:
            return None
        number, answer = self._asked.pop(request)
        answer.done = True
        return number

    def _refused(self, nack: Nack) -> None:
        refusal = nack.refusal()
        asked = None if nack.correlation_id is None else self._asked.pop(nack.correlation_id, None)
        if asked is not None and asked[0] != self._first and not refusal.retryable:
            number, answer = asked
            self._wanted.pop(number, None)
            answer.done, answer.refusal = True, refusal
            if nack.correlation_id == self._brings_credit:
                raise Reconnect(0.0, refusal)
        elif refusal.code is ErrorCode.CHECKSUM and self._faults < FAULTS_MAX:
            self._faults += 1
            raise Reconnect(0.0, refusal)
        elif refusal.retryable:
            raise Reconnect((refusal.retry_after_ms or 0) / 1000, refusal)
        else:
            raise refusal

    def _deliver(self, frame: BatchFrame | DeltaFrame, size: int) -> None:
        batch = DeliveredBatch(frame, self.received, size)
        self._left = Credit(self._left.deltas - batch.first - batch.count, self._left.bytes - size)
        if batch.count and not (batch.batch is not None and batch.batch.is_control):
            self._batches.append(batch)
            self._deltas += batch.count
            self._bytes += size
            self.received = batch.next_offset
        self._pass_to(batch.next_offset)

    def _pass_to(self, offset: int | None) -> None:
        """Everything below came, or is none of our business."""
        if offset is None or offset < self.received:
            return
        self.received = offset
        if not self._batches:
            nothing_in_hand = self._dealt_with == self._handed
            self._handed = offset
            if nothing_in_hand:
                self._dealt_with = offset

    def _hand(
        self, batch: DeliveredBatch, rows: int, in_hand: int, behind: int, *, whole: bool = True
    ) -> None:
        self.delivered += rows
        self._deltas -= rows
        if whole:
            self._bytes -= batch.size
        self._in_hand = in_hand
        self._handed = behind if self._batches else self.received

    def _done(self, offset: int) -> None:
        self._dealt_with = max(self._dealt_with, min(offset, self._handed))

    def _ack(self, now: float) -> Ack | None:
        credit = self._due_credit()
        due = self.unsaid and (
            credit is not None or (self._group is not None and now - self._said_at >= ACK_S)
        )
        if credit is None and not due:
            return None
        self._said, self._said_at = self._dealt_with, now
        return Ack(processed=self._dealt_with, credit=credit)

    def _due_credit(self) -> Credit | None:
        """What to grant: when half of the window has been used and taken."""
        room, left = self._room(), self._left
        deltas, size = max(room.deltas - left.deltas, 0), max(room.bytes - left.bytes, 0)
        if 2 * deltas < self._credit.deltas and 2 * size < self._credit.bytes:
            return None
        self._left = Credit(left.deltas + deltas, left.bytes + size)
        return Credit(deltas, size)
