"""`ConsumerSession`: the rows that it delivers, their frames and timing, and the progress that it reports."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from delta_prop.server import send_queue
from delta_prop.server.send_queue import ENCODED_MAX
from delta_prop.server.settings import ServerSettings
from delta_prop_wire.delta import Delta, Priority, Source, opaque, scale
from delta_prop_wire.frames import BatchFrame, Credit, DeltaFrame, Filter, Start, StartAt
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.server.session_fakes import (
    EACH_LOG,
    EARLIEST,
    SETTINGS,
    FakeService,
    FakeSubscriber,
    append_mixed,
    batch_of,
    expected_row,
    expected_rows,
    refusal_of,
    subscription,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_wire.frames import Subscription

SCOPE = frozenset({"a"})


# --- pushed rows


@EACH_LOG
def test_matching_batches_are_pushed_as_logged(make_service: Callable[[], FakeService]) -> None:
    service = make_service()
    subscriber, other = FakeSubscriber(service), FakeSubscriber(service)
    assert [subscriber.subscribe(subscription()), other.subscribe(subscription())] == [0, 0]
    subscriber.write_all()
    for _ in range(5):
        logged = service.append_rows(3)
        service.commit()
        subscriber.write()
        other.write()
        assert subscriber.received[-3:] == [expected_row(logged, row) for row in range(3)]
    assert subscriber.received == other.received == expected_rows(service)
    frame = subscriber.frames[-1]
    assert isinstance(frame, BatchFrame)
    assert bytes(frame.batch.body) == bytes(service.appended[-1].batch.body)
    assert not subscriber.session.is_catching_up
    assert subscriber.session.processed == service.log.high_watermark == 15


@EACH_LOG
def test_rows_above_the_high_watermark_are_not_sent(make_service: Callable[[], FakeService]) -> None:
    service = make_service()
    subscriber = FakeSubscriber(service)
    subscriber.subscribe(subscription())
    service.append_rows(2)
    assert subscriber.write() == (0 if service.disk else 1)
    service.commit()
    subscriber.write()
    assert subscriber.offsets() == [0, 1]


def test_idle_subscriber_gets_first_delta_at_once_then_lingers() -> None:
    service = FakeService.in_memory(settings=ServerSettings())
    subscriber = FakeSubscriber(service)
    subscriber.subscribe(subscription(batch_deltas_max=10, wait_ms_max=20))
    subscriber.write()
    notifications = subscriber.notifications
    service.append_rows(1)
    assert subscriber.notifications == notifications + 1
    subscriber.write(times=1)
    assert subscriber.offsets() == [0]
    for _ in range(3):
        service.append_rows(1)
    subscriber.write()
    assert subscriber.offsets() == [0], "the rows should linger for more"
    assert subscriber.wake_at == pytest.approx(service.now + 0.02)
    for _ in range(6):
        service.append_rows(1)
    assert (subscriber.notifications, subscriber.notified) == (notifications + 1, False), (
        "the writer should be notified only when the batch is full"
    )
    service.append_rows(1)
    assert subscriber.notifications == notifications + 2
    subscriber.write(times=1)
    assert subscriber.offsets() == list(range(11))
    service.append_rows(1)
    subscriber.write()
    service.now += 0.02
    subscriber.write()
    assert subscriber.offsets() == list(range(12)), "the batch should be sent at the end of the linger"
    assert subscriber.session.wait_s(service.now) is None


def test_linger_starts_with_the_first_waiting_delta() -> None:
    service = FakeService.in_memory(settings=ServerSettings())
    subscriber = FakeSubscriber(service)
    subscriber.subscribe(subscription(wait_ms_max=20))
    subscriber.write()
    service.append_rows(1)
    subscriber.write(times=1)
    service.now += 0.015  # the time that the write took
    service.append_rows(1)
    service.now += 0.010
    subscriber.write()
    assert subscriber.offsets() == [0]
    service.now += 0.010
    subscriber.write()
    assert subscriber.offsets() == [0, 1]


def test_lagging_subscriber_never_lingers() -> None:
    service = FakeService.on_disk(settings=ServerSettings())
    for _ in range(300):
        append_mixed(service)
    service.commit()
    subscriber = FakeSubscriber(service)
    subscriber.subscribe(subscription(1, "ns:a", start=EARLIEST, wait_ms_max=10_000))
    subscriber.write()
    assert subscriber.session.processed == service.log.high_watermark
    assert len(subscriber.received) == 900


def test_one_take_encodes_a_bounded_number_of_frames() -> None:
    service = FakeService.in_memory(settings=ServerSettings())
    sliced, single = FakeSubscriber(service), FakeSubscriber(service)
    sliced.subscribe(subscription(1, "ns:a"))
    single.subscribe(subscription(1, "ns:rows", deltas=True))
    for _ in range(150):
        append_mixed(service)
    service.append_rows(200)
    for subscriber in (sliced, single):
        subscriber.write(times=1)
        assert 0 < len(subscriber.frames) <= ENCODED_MAX
        subscriber.write_all()
    assert sliced.received == [row for row in expected_rows(service) if row[0] % 2 == 0 and row[0] < 900]
    assert single.received == expected_rows(service, 900)


def test_sent_rows_free_queue_capacity() -> None:
    service = FakeService.on_disk()
    subscriber = FakeSubscriber(service)
    subscriber.subscribe(subscription())
    subscriber.write()
    for _ in range(300):
        service.append_rows(3)
        service.commit()
        subscriber.write()
        service.now += 0.1
        subscriber.write()
        assert not subscriber.session.is_catching_up
    assert (subscriber.session._queue.bytes, subscriber.session._queue.delta_count) == (0, 0)


def test_large_slice_is_split_into_frames_under_credit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(send_queue, "FRAME_PAYLOAD_BYTES_MAX", 1_000)
    service = FakeService.in_memory(settings=ServerSettings())
    subscriber = FakeSubscriber(service)
    subscriber.subscribe(subscription(1, "ns:a", credit=Credit(5, 1 << 40)))
    deltas = [Delta(f"k{row}", opaque(b"x"), "ab"[row % 2]) for row in range(40)]
    service.append(batch_of(deltas, service.counter))
    subscriber.write_all()
    assert 5 <= len(subscriber.received) < 20
    subscriber.grant(100)
    subscriber.write_all()
    assert subscriber.offsets() == list(range(0, 40, 2))
    assert len(subscriber.frames) > 1


def test_large_batch_ends_the_linger() -> None:
    service = FakeService.in_memory()
    subscriber = FakeSubscriber(service)
    subscriber.subscribe(subscription(batch_deltas_max=1000, wait_ms_max=20_000))
    subscriber.write()
    service.append_rows(1)
    subscriber.write(times=1)
    service.append_rows(1)
    subscriber.write()
    assert subscriber.offsets() == [0]
    service.append_rows(1, data=bytes(4_000))
    subscriber.write()
    assert subscriber.offsets() == [0, 1, 2]


@pytest.mark.parametrize("bytes_max", [1_000, 1_150, 1_300, 20_000])
def test_full_queue_falls_back_to_the_log_then_pushes(bytes_max: int) -> None:
    service = FakeService.on_disk(settings=replace(SETTINGS, subscriber_bytes_max=bytes_max))
    subscriber = FakeSubscriber(service)
    subscriber.subscribe(subscription())
    subscriber.write()
    for _ in range(200):
        service.append_rows(3)
        service.commit()
    session = subscriber.session
    assert session.is_catching_up
    assert session.processed == 0
    assert session._queue.bytes <= service.settings.subscriber_bytes_max
    subscriber.write_all()
    assert subscriber.received == expected_rows(service)
    assert not session.is_catching_up
    notifications = subscriber.notifications
    service.append_rows(1)
    service.commit()
    assert subscriber.notifications == notifications + 1
    subscriber.write()
    assert subscriber.received == expected_rows(service)


# --- rows that do not match


@EACH_LOG
def test_matching_rows_come_sliced_and_the_rest_is_processed(
    make_service: Callable[[], FakeService],
) -> None:
    service = make_service()
    subscriber, unmatched = FakeSubscriber(service), FakeSubscriber(service)
    subscriber.subscribe(subscription(1, "ns:a"))
    unmatched.subscribe(subscription(1, "ns:nobody"))
    for pushed in (True, False):
        append_mixed(service)
        if pushed:
            service.commit()
        subscriber.write()
        unmatched.write()
        service.commit()
    subscriber.write_all()
    assert subscriber.offsets() == [0, 2, 4, 6, 8, 10]
    assert subscriber.received == [row for row in expected_rows(service) if row[0] % 2 == 0]
    assert [frame.sequence for frame in subscriber.frames] == [0, 6]
    assert unmatched.received == []
    assert unmatched.session.processed == subscriber.session.processed == service.log.high_watermark == 12


def test_filter_and_scope_narrow_the_topics() -> None:
    service = FakeService.on_disk()
    high, replicas, scoped = (
        FakeSubscriber(service),
        FakeSubscriber(service),
        FakeSubscriber(service, scope=SCOPE),
    )
    high.subscribe(subscription(filter=Filter(priorities=(Priority.HIGH,))))
    replicas.subscribe(subscription(filter=Filter(sources=(Source.REPLICA,))))
    scoped.subscribe(subscription())
    for number in range(60):
        append_mixed(service)
        deltas = [Delta("k", scale(2.0), "b")]
        service.append(
            batch_of(deltas, service.counter, Priority.HIGH if number % 2 else Priority.LOW),
            Source.REPLICA if number % 3 == 0 else Source.LOCAL,
        )
        if number < 5:
            service.commit()
            for subscriber in (high, replicas, scoped):
                subscriber.write()
    service.commit()
    for subscriber in (high, replicas, scoped):
        subscriber.write_all()
        assert subscriber.session.processed == service.log.high_watermark
    rows = expected_rows(service)
    assert high.received == [row for row in rows if row[0] % 7 == 6 and row[0] // 7 % 2]
    assert replicas.received == [row for row in rows if row[0] % 7 == 6 and row[0] // 7 % 3 == 0]
    assert scoped.received == [row for row in rows if row[0] % 7 in (0, 2, 4)]


@EACH_LOG
def test_control_rows_are_skipped(make_service: Callable[[], FakeService]) -> None:
    service = make_service()
    subscriber = FakeSubscriber(service)
    subscriber.subscribe(subscription(start=EARLIEST))
    service.append_rows(2)
    service.append_noop(3)
    service.commit()
    subscriber.write_all()
    assert subscriber.offsets() == [0, 1]
    assert subscriber.session.processed == 5
    service.append_noop()
    service.append_rows(1)
    service.commit()
    subscriber.write_all()
    assert subscriber.offsets() == [0, 1, 6]


@EACH_LOG
def test_subscriber_gets_single_delta_frames_on_request(make_service: Callable[[], FakeService]) -> None:
    service = make_service()
    subscriber = FakeSubscriber(service)
    subscriber.subscribe(subscription(1, "ns:a", "ns:rows", deltas=True, start=EARLIEST))
    service.append_rows(200)
    append_mixed(service)
    service.commit()
    subscriber.write_all()
    assert subscriber.received == [row for row in expected_rows(service) if row[0] < 200 or row[0] % 2 == 0]
    assert all(isinstance(frame, DeltaFrame) for frame in subscriber.frames)


# --- subscribing and unsubscribing


def test_later_subscriptions_add_topics_from_the_cursor_on() -> None:
    service = FakeService.on_disk()
    subscriber = FakeSubscriber(service)
    subscriber.subscribe(subscription(1, "ns:a"))
    append_mixed(service)
    service.commit()
    subscriber.write_all()
    append_mixed(service)
    service.commit()
    assert subscriber.subscribe(subscription(2, "v:b1")) == 6, (
        "queued rows should be selected again for all topics"
    )
    subscriber.write_all()
    assert subscriber.offsets() == [0, 2, 4, 6, 8, 9, 10]
    subscriber.session.unsubscribe(1)
    append_mixed(service)
    service.commit()
    subscriber.write_all()
    assert subscriber.offsets()[7:] == [15]
    subscriber.session.unsubscribe(2)
    append_mixed(service)
    service.commit()
    subscriber.write_all()
    assert subscriber.offsets()[8:] == []
    assert subscriber.session.processed == service.log.high_watermark
    assert not service.sinks.sessions
    assert subscriber.subscribe(subscription(3, "ns:a", start=Start(StartAt.OFFSET, 12))) == 12
    subscriber.write_all()
    assert subscriber.offsets()[8:] == [12, 14, 16, 18, 20, 22]


def test_subscribing_amid_a_sliced_batch_duplicates_nothing() -> None:
    service = FakeService.in_memory()
    subscriber = FakeSubscriber(service, bytes_max=1)
    subscriber.subscribe(subscription(1, "ns:a", deltas=True))
    subscriber.write()
    append_mixed(service)
    subscriber.write(times=1)
    assert subscriber.offsets() == [0]
    assert subscriber.subscribe(subscription(2, "ns:b", deltas=True)) == 2
    subscriber.write_all()
    assert subscriber.offsets() == [0, 2, 3, 4, 5]


@EACH_LOG
def test_cursor_waits_for_credit_so_later_topics_get_all_rows(
    make_service: Callable[[], FakeService],
) -> None:
    service = make_service()
    append_mixed(service)
    service.commit()
    subscriber = FakeSubscriber(service)
    subscriber.subscribe(subscription(1, "ns:a", credit=Credit(0, 0), start=Start(StartAt.OFFSET, 6)))
    append_mixed(service)
    service.commit()
    subscriber.write_all()
    assert (subscriber.received, subscriber.session.processed) == ([], 6)
    assert subscriber.subscribe(subscription(2, "v:b0")) == 6
    append_mixed(service)
    service.commit()
    subscriber.write_all()
    subscriber.window.grant(Credit(100, 1 << 40))
    assert (
        subscriber.session.subscribe(subscription(3, "v:b1", credit=Credit(100, 1 << 40))).start.next_offset
        == 6
    )
    subscriber.notified = True
    subscriber.write_all()
    assert subscriber.offsets() == [6, 7, 8, 9, 10, 12, 13, 14, 15, 16]
    assert not subscriber.session.is_catching_up


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (subscription(2, start=EARLIEST), "start"),
        (subscription(2, group="other"), "group"),
        (subscription(2, deltas=True), "deltas"),
        (subscription(2, credit=Credit(1, 1)), "credit"),
    ],
)
def test_later_subscription_cannot_change_shared_settings(request_: Subscription, field: str) -> None:
    subscriber = FakeSubscriber(FakeService.in_memory())
    subscriber.subscribe(subscription(1, "ns:a"))
    refusal = refusal_of(lambda: subscriber.session.subscribe(request_))
    assert (refusal.code, refusal.field) == (ErrorCode.BAD_REQUEST, field)
    subscriber.service.append_rows(1)
    subscriber.write_all()
    assert subscriber.received == []


def test_later_subscription_may_restate_or_omit_shared_settings() -> None:
    subscriber = FakeSubscriber(FakeService.in_memory())
    subscriber.service.append_rows(4)
    subscriber.subscribe(subscription(1, "ns:a", start=EARLIEST, deltas=True))
    assert subscriber.subscribe(subscription(2, "ns:b")) == 0
    assert subscriber.subscribe(subscription(3, "ns:c", start=EARLIEST, deltas=True)) == 0


def test_wrong_subscription_numbers_are_refused() -> None:
    subscriber = FakeSubscriber(FakeService.in_memory())
    assert refusal_of(lambda: subscriber.session.unsubscribe(1)).code is ErrorCode.BAD_REQUEST
    subscriber.subscribe(subscription(1, "ns:a"))
    assert refusal_of(lambda: subscriber.session.subscribe(subscription(1))).code is ErrorCode.BAD_REQUEST
    assert refusal_of(lambda: subscriber.session.unsubscribe(2)).code is ErrorCode.BAD_REQUEST


# --- credit


@EACH_LOG
@pytest.mark.parametrize("as_deltas", [False, True])
def test_credit_bounds_the_rows_sent(make_service: Callable[[], FakeService], as_deltas: bool) -> None:
    service = make_service()
    subscriber = FakeSubscriber(service)
    subscriber.subscribe(subscription(credit=Credit(5, 1 << 40), deltas=as_deltas))
    for _ in range(20):
        service.append_rows(3)
        service.commit()
        subscriber.write_all()
    row_count = len(subscriber.received)
    assert row_count == (5 if as_deltas else 6)
    assert subscriber.session.wait_s(service.now) is None
    notifications = subscriber.notifications
    service.append_rows(3)
    service.commit()
    assert subscriber.notifications == notifications, (
        "without credit, new deltas should not notify the writer"
    )
    subscriber.grant(1)
    assert subscriber.notifications == notifications + (1 if as_deltas else 0), (
        "a balance of 0 should allow no frame"
    )
    subscriber.write_all()
    assert len(subscriber.received) == 6
    subscriber.grant(10, 0)
    subscriber.write_all()
    subscriber.grant(1000)
    subscriber.write_all()
    assert subscriber.received == expected_rows(service)


def test_credit_bounds_bytes_too() -> None:
    service = FakeService.on_disk()
    subscriber = FakeSubscriber(service)
    subscriber.subscribe(subscription(credit=Credit(1 << 40, 100)))
    for _ in range(20):
        service.append_rows(3)
        service.commit()
    subscriber.write_all()
    assert len(subscriber.frames) == 1
    subscriber.grant(0, 10_000)
    subscriber.write_all()
    assert subscriber.received == expected_rows(service)
