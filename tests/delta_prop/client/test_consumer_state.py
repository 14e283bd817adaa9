"""ConsumerState reads each offset once, in order and within its credit, from a server that a test drives."""

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
    FindOffsets,
    FoundOffsets,
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
from delta_prop_wire.stamp import DEFAULT_LOG, Stamp
from delta_prop_wire.topics import ALL, Topic, TopicKind

LOG = Cursor(bytes(15) + b"\7", 1, 0)
WANTED, OTHER, NOOP = "wanted", "other", "noop"
CREDIT = Credit(8, 2_000)


class ConsumerBench:
    """A subscriber, and a server whose log has the given rows: WANTED, OTHER (another topic) or NOOP."""

    def __init__(self, rows: list[str], *, group: str | None = None, start: Start | None = None) -> None:
        self.rows = rows
        first = Subscription(1, (ALL,), start or Start(StartAt.EARLIEST), group=group)
        self.consumer_state = ConsumerState(first, credit=CREDIT)
        self.now = 0.0
        self.log = LOG
        self.requests: list[Subscription] = []
        self.processed = 0  # the offset that the subscriber last reported
        self.has_answered = False  # True once a first request was answered
        self.refusals: dict[int, Refused] = {}
        self.answer_mode = "at once"  # or "standby", or "later": then the test sends the answer
        self.sequence = 0  # the sequence of the first request
        self.may_move_back = False  # True once the reader has sought a position
        self.connect()

    def connect(self) -> None:
        self.consumer_state.on_disconnect()
        self.session = Session(ClientSettings(), self.now, Address("service", 7373), secured=False)
        self.server = Connection(Role.SERVER)
        self.next_offset = 0
        self.requests.clear()
        self._to_server(self.session.request(Hello())[1])
        self.exchange()

    def exchange(self) -> None:
        if not self.session.is_open:
            return
        try:
            parts = self.consumer_state.data_to_send(self.session, self.now)
        except Reconnect as reconnect:
            if not reconnect.is_requested:
                raise
            self.connect()
            return
        for raw in parts:
            self._to_server(raw)

    def deliver(self, count: int, frame_type: str = "batch") -> None:
        """Send the wanted rows among the next `count` rows, if credit is left."""
        end = min(self.next_offset + count, len(self.rows))
        if self.next_offset >= end or not self.requests or not self.server.send_window.is_open:
            return
        offsets = [offset for offset in range(self.next_offset, end) if self.rows[offset] == WANTED]
        if self.rows[self.next_offset] == NOOP and frame_type == "batch":
            noop = encode_noop(origin=16, base=self.next_offset + 1, count=1, code=ErrorCode.INVALID_DELTA)
            self.push_frame(BatchFrame(self.next_offset, noop, _stamp(self.next_offset, noop.crc)))
            self.next_offset += 1
            return
        if frame_type == "delta":
            offsets = offsets[:1]
            end = offsets[0] + 1 if offsets else end
            for offset in offsets:
                self.push_frame(DeltaFrame(offset, _delta(offset), lamport=offset + 100))
        elif offsets:
            is_contiguous = len(offsets) == end - self.next_offset
            batch = encode_batch(
                [_delta(offset) for offset in offsets],
                origin=16,
                base=offsets[0] + 1,
                counters=None if is_contiguous else [offset + 1 for offset in offsets],
                row_offsets=None if is_contiguous else offsets,
            )
            self.push_frame(BatchFrame(offsets[0], batch, _stamp(offsets[0], batch.crc)))
        self.next_offset = end

    def push_frame(self, frame: Any) -> None:
        self.session.connection.receive(self.server.send(frame))
        for received in self.session.frames(self.now):
            if isinstance(received, Ack) and received.welcome is not None:
                self.consumer_state.on_welcome(received.welcome)
            else:
                self.consumer_state.on_frame(received, self.session.connection.last_frame_bytes, self.now)

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
                case Subscribe(sequence, FindOffsets()):
                    self.push_frame(Ack(correlation_id=sequence, response=self._bounds))
                case Ack(processed=int(processed)):
                    assert processed >= self.processed or self.may_move_back
                    self.processed = min(processed, self.next_offset)

    @property
    def _bounds(self) -> FoundOffsets:
        return FoundOffsets((0, len(self.rows)), self.log._replace(next_offset=len(self.rows)))

    def _answer(self, sequence: int, request: Subscription) -> None:
        refused = self.refusals.get(request.subscription)
        if refused is not None:
            self.push_frame(Nack.of(0, refused, correlation_id=sequence))
            return
        if not self.requests:
            self.sequence = sequence
            value = request.start.value
            match request.start.kind:
                case StartAt.CURSOR:
                    assert isinstance(value, Cursor)
                    assert value.log_id == self.log.log_id
                    self.next_offset = value.next_offset
                case StartAt.GROUP:
                    self.next_offset = self.processed
                case StartAt.LATEST:
                    self.next_offset = len(self.rows)
                case StartAt.OFFSET:
                    assert isinstance(value, int)
                    self.next_offset = value
            # The cursor of an existing group takes precedence over any start.
            if request.group is not None and self.has_answered:
                self.next_offset = self.processed
        self.has_answered = True
        self.requests.append(request)
        start = self.log._replace(next_offset=self.next_offset)
        if self.answer_mode == "standby":
            self.push_frame(
                Ack(correlation_id=sequence, response=Subscribed(1, start, 100, 10, standby=True))
            )
        if self.answer_mode != "at once":
            return
        self.push_frame(
            Ack(correlation_id=sequence, response=Subscribed(request.subscription, start, 100, 10))
        )


def _delta(offset: int) -> Delta:
    return Delta(f"k{offset}", opaque(b"x"), dot=Dot(16, offset + 1))


def _stamp(offset: int, crc: int) -> Stamp:
    return Stamp(offset + 100, Source.LOCAL, body_crc=crc)


def take_all(bench: ConsumerBench) -> list[int]:
    offsets = []
    while (taken := bench.consumer_state.take_row()) is not None:
        batch, row = taken
        delivered = batch.row(row)
        assert delivered.delta.vector_id == f"k{delivered.offset}"
        assert delivered.lamport == delivered.offset + 100
        offsets.append(delivered.offset)
    return offsets


STEPS = st.one_of(
    st.tuples(st.just("deliver"), st.integers(1, 4), st.sampled_from(["batch", "delta"])),
    st.sampled_from(
        [("row",), ("row",), ("batch",), ("processed",), ("report",), ("report",), ("heartbeat",), ("cut",)]
    ),
)


@given(
    st.lists(st.sampled_from([WANTED, WANTED, OTHER, NOOP]), min_size=1, max_size=30),
    st.lists(STEPS, max_size=60),
    st.booleans(),
)
def test_each_offset_is_delivered_once_in_order_within_credit(
    rows: list[str], steps: list[Any], is_grouped: bool
) -> None:
    bench = ConsumerBench(rows, group="g" if is_grouped else None)
    consumer_state = bench.consumer_state
    delivered_offsets: list[int] = []
    first_unprocessed = 0  # index of the first delivered offset that the reader has not processed

    for step in steps:
        match step:
            case ("deliver", count, frame_type):
                bench.deliver(count, frame_type)
            case ("row",):
                taken = consumer_state.take_row()
                if taken is not None:
                    delivered_offsets.append(taken[0].offset_of(taken[1]))
            case ("batch",):
                batch = consumer_state.take()
                delivered_offsets += [] if batch is None else [taken.offset for taken in batch]
            case ("processed",):
                consumer_state.mark_all_processed()
                first_unprocessed = len(delivered_offsets)
            case ("report",):
                bench.now += 0.2
                bench.exchange()
            case ("heartbeat",):
                bench.push_frame(Heartbeat(1, processed=bench.next_offset))
            case ("cut",):
                bench.connect()
        assert consumer_state.buffered_deltas <= CREDIT.deltas + 4
        limit = (
            delivered_offsets[first_unprocessed] if first_unprocessed < len(delivered_offsets) else len(rows)
        )
        assert bench.processed <= limit, "an offset must not be reported before the reader has processed it"
    while bench.next_offset < len(rows) or consumer_state.buffered_deltas:
        bench.deliver(4)
        while (batch := consumer_state.take()) is not None:
            delivered_offsets += [taken.offset for taken in batch]
        consumer_state.mark_all_processed()
        bench.now += 0.2
        bench.exchange()
    assert delivered_offsets == [offset for offset, row in enumerate(rows) if row == WANTED]
    bench.push_frame(Heartbeat(1, processed=len(rows)))
    consumer_state.mark_all_processed()
    assert consumer_state.cursor == LOG._replace(next_offset=len(rows)), (
        "rows of other topics must count as processed"
    )


@given(
    st.lists(st.sampled_from([WANTED, WANTED, OTHER, NOOP]), min_size=1, max_size=20),
    st.lists(st.one_of(STEPS, st.tuples(st.just("seek"), st.integers(0, 20))), max_size=40),
    st.booleans(),
)
def test_rows_from_the_last_sought_position_on_are_delivered_in_order(
    rows: list[str], steps: list[Any], is_grouped: bool
) -> None:
    bench = ConsumerBench(rows, group="g" if is_grouped else None)
    consumer_state = bench.consumer_state
    bench.may_move_back = True
    position, offsets = 0, list[int]()  # what was read since the last seek

    def take(limit: int) -> None:
        while len(offsets) < limit and (taken := consumer_state.take_row()) is not None:
            offsets.append(taken[0].offset_of(taken[1]))

    for step in steps:
        match step:
            case ("deliver", count, frame_type):
                bench.deliver(count, frame_type)
            case ("row",) | ("batch",):
                take(len(offsets) + (1 if step == ("row",) else 3))
            case ("processed",):
                consumer_state.mark_all_processed()
            case ("report",):
                bench.now += 0.2
                bench.exchange()
            case ("heartbeat",):
                bench.push_frame(Heartbeat(1, processed=bench.next_offset))
            case ("cut",):
                bench.connect()
            case ("seek", offset):
                position, offsets = min(offset, len(rows)), []
                consumer_state.seek(Start(StartAt.OFFSET, position), DEFAULT_LOG)
        expected = [offset for offset, row in enumerate(rows) if row == WANTED and offset >= position]
        assert offsets == expected[: len(offsets)]
    for _ in range(8):  # a seek takes a few exchanges
        bench.exchange()
    while bench.next_offset < len(rows) or consumer_state.buffered_deltas:
        bench.deliver(4)
        take(100)
        consumer_state.mark_all_processed()
        bench.now += 0.2
        bench.exchange()
    assert offsets == [offset for offset, row in enumerate(rows) if row == WANTED and offset >= position]
    bench.push_frame(Heartbeat(1, processed=len(rows)))
    consumer_state.mark_all_processed()
    bench.now += 0.2
    bench.exchange()
    assert consumer_state.cursor == LOG._replace(next_offset=len(rows))
    assert consumer_state.processed == len(rows), "the next heartbeat moves the group's cursor there"


def test_group_progress_is_reported_soon_in_one_message() -> None:
    bench = ConsumerBench([WANTED] * 6, group="g")
    bench.deliver(6)
    for expected in (0, 1, 2):
        taken = bench.consumer_state.take_row()
        assert taken is not None
        assert taken[1] == expected
        bench.consumer_state.mark_all_processed()
        bench.exchange()
    assert bench.processed == 0, "the subscriber must not report so soon after the last report"
    assert bench.consumer_state.wait_s(bench.now) == pytest.approx(0.1)
    bench.now += 0.11
    bench.exchange()
    assert bench.processed == 3
    assert bench.consumer_state.wait_s(bench.now) is None


def test_rows_that_were_already_delivered_are_skipped() -> None:
    bench = ConsumerBench([WANTED] * 4)
    bench.deliver(2)
    bench.connect()
    assert bench.requests[0].start == Start(StartAt.CURSOR, LOG._replace(next_offset=2))
    bench.next_offset = 0  # the service sends rows a second time
    bench.deliver(4)
    assert take_all(bench) == [0, 1, 2, 3]


def test_credit_is_granted_as_the_reader_takes() -> None:
    bench = ConsumerBench([WANTED] * 40)
    for _ in range(20):
        bench.deliver(2)
        bench.exchange()
    assert bench.consumer_state.buffered_deltas == 8
    assert take_all(bench) == list(range(8))
    for _ in range(3):
        bench.exchange()
        assert bench.server.send_window.remaining == CREDIT, "credit must be granted only once"


def test_added_subscription_is_requested_on_each_connection() -> None:
    bench = ConsumerBench([WANTED] * 4)
    topic = Topic(TopicKind.NAMESPACE, "docs")
    outcome = bench.consumer_state.add(Subscription(2, (topic,)))
    assert not outcome.done
    bench.exchange()
    assert outcome.done
    assert outcome.refusal is None
    assert [one.subscription for one in bench.requests] == [1, 2]
    bench.connect()
    assert [one.subscription for one in bench.requests] == [1, 2]
    assert [one.credit for one in bench.requests] == [Credit(0, 0), CREDIT], (
        "credit must be granted only with the last request"
    )
    assert bench.server.send_window.remaining == CREDIT
    bench.consumer_state.remove(1)
    bench.connect()
    assert [one.subscription for one in bench.requests] == [2]
    assert bench.requests[0].credit == CREDIT
    with pytest.raises(UsageError, match="one must stay"):
        bench.consumer_state.remove(2)


def test_refused_subscription_is_forgotten() -> None:
    bench = ConsumerBench([WANTED])
    bench.refusals[2] = Refused(ErrorCode.UNAUTHORIZED, "no")
    outcome = bench.consumer_state.add(Subscription(2, (ALL,)))
    bench.exchange()
    assert outcome.refusal is not None
    bench.connect()
    assert [one.subscription for one in bench.requests] == [1]


def test_refusal_of_the_request_with_the_credit_causes_another_reconnect() -> None:
    bench = ConsumerBench([WANTED] * 3)
    bench.consumer_state.add(Subscription(2, (ALL,)))
    bench.exchange()
    bench.refusals[2] = Refused(ErrorCode.BAD_REQUEST, "no")
    with pytest.raises(Reconnect):
        bench.connect()
    bench.connect()
    assert [(one.subscription, one.credit) for one in bench.requests] == [(1, CREDIT)]
    bench.deliver(3)
    assert take_all(bench) == [0, 1, 2]


@pytest.mark.parametrize("code", [ErrorCode.CURSOR_TOO_OLD, ErrorCode.FENCED, ErrorCode.BAD_REQUEST])
def test_rows_received_before_a_final_refusal_are_readable(code: ErrorCode) -> None:
    bench = ConsumerBench([WANTED] * 3, group="g")
    bench.deliver(3)
    with pytest.raises(Refused) as caught:
        bench.push_frame(Nack(0, code, "no"))
    bench.consumer_state.fail(caught.value)
    assert take_all(bench) == [0, 1, 2]


def _answer_first_request(
    bench: ConsumerBench, offset: int, *, standby: bool = False, resets: int = 0
) -> None:
    """Answer the first request of this connection; a test may call this more than once."""
    start = bench.log._replace(next_offset=offset)
    bench.push_frame(
        Ack(correlation_id=bench.sequence, response=Subscribed(1, start, 100, 10, standby, resets))
    )


def test_standby_drops_unread_rows_and_starts_at_the_cursor() -> None:
    bench = ConsumerBench([WANTED] * 9, group="g")
    bench.deliver(6)
    assert take_all(bench)[:2] == [0, 1]
    bench.consumer_state.ack(1)
    bench.answer_mode = "standby"
    bench.connect()
    assert bench.consumer_state.standing_by
    assert bench.consumer_state.started
    assert bench.consumer_state.processed is None, "a heartbeat must not report the group's progress"
    assert take_all(bench) == []
    bench.now += 10
    bench.consumer_state.ack(1)
    bench.exchange()
    assert not bench.consumer_state.has_unacked
    _answer_first_request(bench, 4)
    assert not bench.consumer_state.standing_by
    bench.next_offset = 4
    bench.deliver(2)
    assert take_all(bench) == [4, 5]


@pytest.mark.parametrize(
    ("next_offset", "resets", "expected"), [(2, 0, [4, 5]), (2, 1, [2, 3, 4, 5]), (5, 0, [5])]
)
def test_consumer_resumes_from_a_cursor_that_others_moved(
    next_offset: int, resets: int, expected: list[int]
) -> None:
    bench = ConsumerBench([WANTED] * 6, group="g")
    bench.deliver(4)
    assert take_all(bench) == [0, 1, 2, 3]
    bench.consumer_state.ack(3)
    bench.answer_mode = "later"
    bench.connect()
    _answer_first_request(bench, next_offset, resets=resets)
    bench.next_offset = next_offset
    bench.deliver(4)
    assert take_all(bench) == expected


def test_shutdown_of_the_service_causes_a_reconnect() -> None:
    bench = ConsumerBench([WANTED])
    with pytest.raises(Reconnect) as caught:
        bench.push_frame(Nack(0, ErrorCode.SHUTTING_DOWN, "bye", 700))
    assert caught.value.after_s == 0.7


def test_another_log_after_a_reconnect_is_refused() -> None:
    bench = ConsumerBench([WANTED])
    bench.log = bench.log._replace(log_id=bytes(16))
    with pytest.raises(UsageError, match="cannot go on in another log"):
        bench.connect()


def test_warning_lasts_until_the_level_is_ok() -> None:
    bench = ConsumerBench([WANTED])
    warning = Backpressure(1, PressureLevel.WARN, 80, 100)
    bench.push_frame(warning)
    assert bench.consumer_state.warning == warning
    bench.push_frame(Backpressure(2, PressureLevel.OK))
    assert bench.consumer_state.warning is None
