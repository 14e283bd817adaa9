"""ConsumerState against a small server driven by the test: each offset once, in order, within the credit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop.client.addresses import Address
from delta_prop.client.consumer_state import ConsumerState
from delta_prop.client.errors import Reconnect
from delta_prop.client.session import Session
from delta_prop.client.settings import ClientSettings
from delta_prop_wire.codec import NEED_BYTES
from delta_prop_wire.connection import Connection
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Delta, Dot, Source, opaque
from delta_prop_wire.encode import encode_batch, encode_noop
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.frames import (
    Ack,
    Backpressure,
    BatchFrame,
    Credit,
    DeltaFrame,
    Heartbeat,
    Hello,
    Nack,
    PressureLevel,
    Start,
    StartAt,
    Subscribe,
    Subscribed,
    Subscription,
    Welcome,
)
from delta_prop_wire.message_rules import Role
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.stamp import Stamp
from delta_prop_wire.topics import ALL, Topic, TopicKind

LOG = Cursor(bytes(15) + b"\7", 1, 0)
WANTED, OTHER, NOOP = "wanted", "other", "noop"
CREDIT = Credit(8, 2_000)


class Talk:
    """A subscriber and a server of listed rows; each row is wanted, of another topic, or a no-op."""

    def __init__(self, rows: list[str], *, group: str | None = None, start: Start | None = None) -> None:
        self.rows = rows
        first = Subscription(1, (ALL,), start or Start(StartAt.EARLIEST), group=group)
        self.incoming = ConsumerState(first, credit=CREDIT)
        self.now = 0.0
        self.log = LOG
        self.requests: list[Subscription] = []
        self.processed = 0  # as reported to the service
        self.answered = False  # a first request was answered
        self.refuse: dict[int, Refused] = {}
        self.answer = "at once"  # or "standby", or "later" if the test sends the answer
        self.sequence = 0  # of the first request
        self.connect()

    def connect(self) -> None:
        self.incoming.on_disconnect()
        self.session = Session(ClientSettings(), self.now, Address("service", 7373), secured=False)
        self.server = Connection(Role.SERVER)
        self.place = 0
        self.sent = 0
        self.requests.clear()
        self._to_server(self.session.request(Hello())[1])
        self.exchange()

    def exchange(self) -> None:
        if self.session.is_open:
            for raw in self.incoming.data_to_send(self.session, self.now):
                self._to_server(raw)

    def deliver(self, rows: int, form: str = "batch") -> None:
        """Send the next rows, as far as the credit allows, without those that are not wanted."""
        end = min(self.place + rows, len(self.rows))
        if self.place >= end or not self.requests or not self.server.send_window.is_open:
            return
        offsets = [at for at in range(self.place, end) if self.rows[at] == WANTED]
        if self.rows[self.place] == NOOP and form == "batch":
            noop = encode_noop(origin=16, base=self.place + 1, count=1, code=ErrorCode.INVALID_DELTA)
            self.push_frame(BatchFrame(self.place, noop, _stamp(self.place, noop.crc)))
            self.place += 1
            return
        if form == "delta":
            offsets = offsets[:1]
            end = offsets[0] + 1 if offsets else end
            for at in offsets:
                self.push_frame(DeltaFrame(at, _delta(at), lamport=at + 100))
        elif offsets:
            is_contiguous = len(offsets) == end - self.place
            batch = encode_batch(
                [_delta(at) for at in offsets],
                origin=16,
                base=offsets[0] + 1,
                counters=None if is_contiguous else [at + 1 for at in offsets],
                row_offsets=None if is_contiguous else offsets,
            )
            self.push_frame(BatchFrame(offsets[0], batch, _stamp(offsets[0], batch.crc)))
        self.place = end

    def push_frame(self, frame: Any) -> None:
        self.session.connection.receive(self.server.send(frame))
        for one in self.session.frames(self.now):
            if isinstance(one, Ack) and one.welcome is not None:
                self.incoming.on_welcome(one.welcome)
            else:
                self.incoming.on_frame(one, self.session.connection.last_frame_bytes, self.now)

    def _to_server(self, raw: bytes) -> None:
        self.server.receive(raw)
        while (frame := self.server.next_event()) is not NEED_BYTES:
            match frame:
                case Subscribe(sequence, Hello()):
                    self.push_frame(
                        Ack(
                            correlation_id=sequence,
                            response=Welcome(log=self.log._replace(next_offset=len(self.rows))),
                        )
                    )
                case Subscribe(sequence, Subscription() as request):
                    self._answer(sequence, request)
                case Ack(processed=int(processed)):
                    assert processed >= self.processed
                    self.processed = processed

    def _answer(self, sequence: int, request: Subscription) -> None:
        refused = self.refuse.get(request.subscription)
        if refused is not None:
            self.push_frame(Nack.of(0, refused, correlation_id=sequence))
            return
        if not self.requests:
            self.sequence = sequence
            value = request.start.value
            match request.start.at:
                case StartAt.CURSOR:
                    assert isinstance(value, Cursor)
                    assert value.log_id == self.log.log_id
                    self.place = value.next_offset
                case StartAt.GROUP:
                    self.place = self.processed
                case StartAt.LATEST:
                    self.place = len(self.rows)
            if (
                request.group is not None and self.answered
            ):  # the group's cursor takes precedence over any start
                self.place = self.processed
        self.answered = True
        self.requests.append(request)
        start = self.log._replace(next_offset=self.place)
        if self.answer == "standby":
            self.push_frame(
                Ack(correlation_id=sequence, response=Subscribed(1, start, 100, 10, standby=True))
            )
        if self.answer != "at once":
            return
        self.push_frame(
            Ack(correlation_id=sequence, response=Subscribed(request.subscription, start, 100, 10))
        )


def _delta(at: int) -> Delta:
    return Delta(f"k{at}", opaque(b"x"), dot=Dot(16, at + 1))


def _stamp(offset: int, crc: int) -> Stamp:
    return Stamp(offset + 100, Source.LOCAL, body_crc=crc)


def take_all(talk: Talk) -> list[int]:
    found = []
    while (one := talk.incoming.take_row()) is not None:
        batch, row = one
        delivered = batch.row(row)
        assert delivered.delta.vector_id == f"k{delivered.offset}"
        assert delivered.lamport == delivered.offset + 100
        found.append(delivered.offset)
    return found


STEPS = st.one_of(
    st.tuples(st.just("deliver"), st.integers(1, 4), st.sampled_from(["batch", "delta"])),
    st.sampled_from([("row",), ("row",), ("batch",), ("back",), ("say",), ("say",), ("pass",), ("cut",)]),
)


@given(
    st.lists(st.sampled_from([WANTED, WANTED, OTHER, NOOP]), min_size=1, max_size=30),
    st.lists(STEPS, max_size=60),
    st.booleans(),
)
def test_each_offset_is_delivered_once_in_order_within_credit(
    rows: list[str], steps: list[Any], grouped: bool
) -> None:
    talk = Talk(rows, group="g" if grouped else None)
    incoming = talk.incoming
    handed: list[int] = []
    open_from = 0  # index of the first handed row that the reader has not processed

    for step in steps:
        match step:
            case ("deliver", count, form):
                talk.deliver(count, form)
            case ("row",):
                one = incoming.take_row()
                if one is not None:
                    handed.append(one[0].offset_of(one[1]))
            case ("batch",):
                batch = incoming.take()
                handed += [] if batch is None else [one.offset for one in batch]
            case ("back",):
                incoming.mark_all_processed()
                open_from = len(handed)
            case ("say",):
                talk.now += 0.2
                talk.exchange()
            case ("pass",):
                talk.push_frame(Heartbeat(1, processed=talk.place))
            case ("cut",):
                talk.connect()
        assert incoming.buffered_deltas <= CREDIT.deltas + 4
        limit = handed[open_from] if open_from < len(handed) else len(rows)
        assert talk.processed <= limit, "an offset must not be reported before its reader has returned"
    while talk.place < len(rows) or incoming.buffered_deltas:
        talk.deliver(4)
        while (batch := incoming.take()) is not None:
            handed += [one.offset for one in batch]
        incoming.mark_all_processed()
        talk.now += 0.2
        talk.exchange()
    assert handed == [at for at, row in enumerate(rows) if row == WANTED]
    talk.push_frame(Heartbeat(1, processed=len(rows)))
    incoming.mark_all_processed()
    assert incoming.cursor == LOG._replace(next_offset=len(rows)), (
        "rows of other topics must count as processed"
    )


def test_group_progress_is_reported_soon_in_one_message() -> None:
    talk = Talk([WANTED] * 6, group="g")
    talk.deliver(6)
    for expected in (0, 1, 2):
        one = talk.incoming.take_row()
        assert one is not None
        assert one[1] == expected
        talk.incoming.mark_all_processed()
        talk.exchange()
    assert talk.processed == 0, "the subscriber must not report so soon after the last report"
    assert talk.incoming.wait_s(talk.now) == pytest.approx(0.1)
    talk.now += 0.11
    talk.exchange()
    assert talk.processed == 3
    assert talk.incoming.wait_s(talk.now) is None


def test_rows_delivered_before_are_left_out_of_a_batch() -> None:
    talk = Talk([WANTED] * 4)
    talk.deliver(2)
    talk.connect()
    assert talk.requests[0].start == Start(StartAt.CURSOR, LOG._replace(next_offset=2))
    talk.place = 0  # the service sends rows a second time
    talk.deliver(4)
    assert take_all(talk) == [0, 1, 2, 3]


def test_credit_is_granted_as_the_reader_takes() -> None:
    talk = Talk([WANTED] * 40)
    for _ in range(20):
        talk.deliver(2)
        talk.exchange()
    assert talk.incoming.buffered_deltas == 8
    assert take_all(talk) == list(range(8))
    for _ in range(3):
        talk.exchange()
        assert talk.server.send_window.remaining == CREDIT, "credit must be granted only once"


def test_added_subscription_is_requested_on_each_connection() -> None:
    talk = Talk([WANTED] * 4)
    topic = Topic(TopicKind.NAMESPACE, "docs")
    answer = talk.incoming.add(Subscription(2, (topic,)))
    assert not answer.done
    talk.exchange()
    assert answer.done
    assert answer.refusal is None
    assert [one.subscription for one in talk.requests] == [1, 2]
    talk.connect()
    assert [one.subscription for one in talk.requests] == [1, 2]
    assert [one.credit for one in talk.requests] == [Credit(0, 0), CREDIT], (
        "credit must be granted only with the last request"
    )
    assert talk.server.send_window.remaining == CREDIT
    talk.incoming.remove(1)
    talk.connect()
    assert [one.subscription for one in talk.requests] == [2]
    assert talk.requests[0].credit == CREDIT
    with pytest.raises(UsageError, match="one must stay"):
        talk.incoming.remove(2)


def test_refused_subscription_is_forgotten() -> None:
    talk = Talk([WANTED])
    talk.refuse[2] = Refused(ErrorCode.UNAUTHORIZED, "no")
    answer = talk.incoming.add(Subscription(2, (ALL,)))
    talk.exchange()
    assert answer.refusal is not None
    talk.connect()
    assert [one.subscription for one in talk.requests] == [1]


def test_refusal_with_the_credit_causes_another_reconnect() -> None:
    talk = Talk([WANTED] * 3)
    talk.incoming.add(Subscription(2, (ALL,)))
    talk.exchange()
    talk.refuse[2] = Refused(ErrorCode.BAD_REQUEST, "no")
    with pytest.raises(Reconnect):
        talk.connect()
    talk.connect()
    assert [(one.subscription, one.credit) for one in talk.requests] == [(1, CREDIT)]
    talk.deliver(3)
    assert take_all(talk) == [0, 1, 2]


@pytest.mark.parametrize("code", [ErrorCode.CURSOR_TOO_OLD, ErrorCode.FENCED, ErrorCode.BAD_REQUEST])
def test_rows_received_before_a_final_refusal_are_readable(code: ErrorCode) -> None:
    talk = Talk([WANTED] * 3, group="g")
    talk.deliver(3)
    with pytest.raises(Refused) as caught:
        talk.push_frame(Nack(0, code, "no"))
    talk.incoming.fail(caught.value)
    assert take_all(talk) == [0, 1, 2]


def _answer_first_request(talk: Talk, offset: int, *, standby: bool = False, resets: int = 0) -> None:
    """Answer the first request of this connection, possibly a second time."""
    start = talk.log._replace(next_offset=offset)
    talk.push_frame(
        Ack(correlation_id=talk.sequence, response=Subscribed(1, start, 100, 10, standby, resets))
    )


def test_standby_drops_unread_rows_and_starts_at_the_cursor() -> None:
    talk = Talk([WANTED] * 9, group="g")
    talk.deliver(6)
    assert take_all(talk)[:2] == [0, 1]
    talk.incoming.ack(1)
    talk.answer = "standby"
    talk.connect()
    assert talk.incoming.standing_by
    assert talk.incoming.started
    assert talk.incoming.processed is None, "a heartbeat must not report the group's progress"
    assert take_all(talk) == []
    talk.now += 10
    talk.incoming.ack(1)
    talk.exchange()
    assert not talk.incoming.has_unacked
    _answer_first_request(talk, 4)
    assert not talk.incoming.standing_by
    talk.place = 4
    talk.deliver(2)
    assert take_all(talk) == [4, 5]


@pytest.mark.parametrize(("place", "resets", "expected"), [(2, 0, [4, 5]), (2, 1, [2, 3, 4, 5]), (5, 0, [5])])
def test_consumer_resumes_from_a_cursor_that_others_moved(
    place: int, resets: int, expected: list[int]
) -> None:
    talk = Talk([WANTED] * 6, group="g")
    talk.deliver(4)
    assert take_all(talk) == [0, 1, 2, 3]
    talk.incoming.ack(3)
    talk.answer = "later"
    talk.connect()
    _answer_first_request(talk, place, resets=resets)
    talk.place = place
    talk.deliver(4)
    assert take_all(talk) == expected


def test_shutdown_of_the_service_causes_a_reconnect() -> None:
    talk = Talk([WANTED])
    with pytest.raises(Reconnect) as caught:
        talk.push_frame(Nack(0, ErrorCode.SHUTTING_DOWN, "bye", 700))
    assert caught.value.after_s == 0.7


def test_another_log_after_a_reconnect_is_refused() -> None:
    talk = Talk([WANTED])
    talk.log = talk.log._replace(log_id=bytes(16))
    with pytest.raises(UsageError, match="cannot go on in another log"):
        talk.connect()


def test_warning_lasts_until_the_level_is_ok() -> None:
    talk = Talk([WANTED])
    warning = Backpressure(1, PressureLevel.WARN, 80, 100)
    talk.push_frame(warning)
    assert talk.incoming.warning == warning
    talk.push_frame(Backpressure(2, PressureLevel.OK))
    assert talk.incoming.warning is None
