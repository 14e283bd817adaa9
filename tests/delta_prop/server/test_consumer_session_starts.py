"""The start and the end of a consumer session, and the offset at which its group resumes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delta_prop.server import send_queue
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.frames import Credit, PressureLevel, Start, StartAt
from delta_prop_wire.spec import ErrorCode
from tests.broker.durable import LOG_ID
from tests.delta_prop.server.session_fakes import (
    EARLIEST,
    LARGE_LOG,
    LATEST,
    FakeService,
    FakeSubscriber,
    expected_rows,
    multi_segment_service,
    refusal_of,
    subscription,
)

# --- starts


def trimmed_service() -> FakeService:
    service = FakeService.on_disk(replace(LARGE_LOG, segment_bytes_max=3_000, retention_bytes=9_000))
    for _ in range(40):
        service.append_rows(3)
        service.commit()
    service.log.retain()
    service.commit()
    assert 0 < service.log.start_offset < 60
    return service


def test_each_start_begins_at_its_offset() -> None:
    service = trimmed_service()
    log = service.log
    times = [
        int.from_bytes(logged.head[32:40], "little")
        for logged in service.appended
        if logged.offset >= log.start_offset
    ]
    for start, first_offset in (
        (EARLIEST, log.start_offset),
        (LATEST, 120),
        (Start(StartAt.OFFSET, 70), 70),
        (Start(StartAt.OFFSET, 120), 120),
        (Start(StartAt.TIME, times[5]), log.start_offset + 15),
        (Start(StartAt.TIME, times[-1] + 1), 120),
        (Start(StartAt.CURSOR, Cursor(LOG_ID, log.epoch, 71)), 71),
    ):
        subscriber = FakeSubscriber(service)
        assert subscriber.subscribe(subscription(start=start)) == first_offset
        subscriber.write_all()
        assert subscriber.received == expected_rows(service, first_offset)


@pytest.mark.parametrize(
    ("start", "code", "message"),
    [
        (Start(StartAt.OFFSET, 0), ErrorCode.CURSOR_TOO_OLD, "no longer in the log, which starts at"),
        (Start(StartAt.OFFSET, 121), ErrorCode.BAD_REQUEST, "ahead: the log ends at offset 120"),
        (Start(StartAt.CURSOR, Cursor(LOG_ID, 1, 0)), ErrorCode.CURSOR_TOO_OLD, "no longer in the log"),
        (Start(StartAt.CURSOR, Cursor(LOG_ID, 1, 121)), ErrorCode.BAD_REQUEST, "ahead"),
        (Start(StartAt.CURSOR, Cursor(LOG_ID, 9, 100)), ErrorCode.BAD_REQUEST, "epoch 9"),
        (Start(StartAt.CURSOR, Cursor(bytes(16), 1, 100)), ErrorCode.BAD_REQUEST, "00" * 16),
        (Start(StartAt.CURSOR, Cursor(bytes(16), 1, 100)), ErrorCode.BAD_REQUEST, LOG_ID.hex()),
        (Start(StartAt.GROUP), ErrorCode.BAD_REQUEST, "no group is named"),
    ],
)
def test_start_outside_the_log_is_refused(start: Start, code: ErrorCode, message: str) -> None:
    service = trimmed_service()
    subscriber = FakeSubscriber(service)
    refusal = refusal_of(lambda: subscriber.session.subscribe(subscription(start=start, group=None)))
    assert refusal.code is code
    assert message in refusal.message
    if code is ErrorCode.CURSOR_TOO_OLD:
        assert refusal.details["start_offset"] == service.log.start_offset
    assert not service.sinks.sessions
    assert subscriber.subscribe(subscription(start=EARLIEST)) == service.log.start_offset


def test_memory_log_refuses_a_start_by_time() -> None:
    subscriber = FakeSubscriber(FakeService.in_memory())
    refusal = refusal_of(lambda: subscriber.session.subscribe(subscription(start=Start(StartAt.TIME, 1))))
    assert (refusal.code, "in memory stores no times" in refusal.message) == (ErrorCode.BAD_REQUEST, True)


def test_start_above_the_high_watermark_waits() -> None:
    service = FakeService.on_disk()
    service.append_rows(4)
    subscriber = FakeSubscriber(service)
    assert subscriber.subscribe(subscription(start=Start(StartAt.OFFSET, 2))) == 2
    subscriber.write_all()
    assert subscriber.session.processed == 2
    service.commit()
    subscriber.write_all()
    assert subscriber.offsets() == [2, 3]
    assert subscriber.session.processed == 4


# --- failures


def test_subscriber_below_log_start_gets_cursor_too_old() -> None:
    service = FakeService.on_disk(replace(LARGE_LOG, segment_bytes_max=3_000, retention_bytes=9_000))
    subscriber = FakeSubscriber(service)
    subscriber.subscribe(subscription())
    subscriber.write()
    for _ in range(300):
        service.append_rows(3)
        service.commit()
        service.log.retain()  # type: ignore[union-attr]
    refusal = refusal_of(subscriber.write_all)
    assert refusal.code is ErrorCode.CURSOR_TOO_OLD
    assert refusal.details["start_offset"] == service.log.start_offset
    assert subscriber.received == expected_rows(service)[: len(subscriber.received)], (
        "the queued rows should come before the refusal"
    )
    assert subscriber.received
    assert not service.sinks.sessions


def test_lagging_subscriber_is_warned_before_its_rows_expire() -> None:
    service = FakeService.in_memory()
    service.log._deltas_max = 100  # type: ignore[union-attr]
    subscriber = FakeSubscriber(service)
    subscriber.subscribe(subscription())
    levels = []
    for _ in range(110):
        service.append_rows(1)
        warning = subscriber.session.warning
        levels.append(warning and warning.level)
    assert levels[:79] == [None] * 79
    assert levels[79:94] == [PressureLevel.WARN] * 15
    assert set(levels[94:100]) == {PressureLevel.THROTTLE}
    warning = subscriber.session.warning
    assert warning is not None
    assert (warning.depth, warning.capacity) == (110, 100)
    fresh = FakeSubscriber(service)
    fresh.subscribe(subscription())
    fresh.write_all()
    assert fresh.session.warning is None


def test_failed_read_is_retried(caplog: pytest.LogCaptureFixture) -> None:
    service = multi_segment_service()
    assert service.disk is not None
    subscriber = FakeSubscriber(service)
    subscriber.subscribe(subscription(start=EARLIEST))
    service.disk.fail(lambda call: call.name == "read", times=3)
    subscriber.write()
    assert subscriber.received == []
    assert subscriber.session.wait_s(service.now) == pytest.approx(send_queue.READ_RETRY_S)
    subscriber.write_all()
    assert subscriber.received == expected_rows(service)
    assert len(caplog.records) == 1, "the failure should be logged once"


def test_log_recovery_ends_session_and_cursor_stays_valid() -> None:
    service = FakeService.on_disk()
    subscriber = FakeSubscriber(service)
    subscriber.subscribe(subscription())
    subscriber.write()
    service.append_rows(3)
    service.commit()
    subscriber.write()
    service.append_rows(3)
    service.commit()
    service.append_rows(2)  # these rows are never synced
    epoch = service.log.epoch
    service.fail_and_recover()
    assert subscriber.notified
    refusal = refusal_of(subscriber.write)
    assert (refusal.code, refusal.retryable) == (ErrorCode.SHUTTING_DOWN, True)
    assert not service.sinks.sessions, "the session should get no more batches"
    assert refusal_of(lambda: subscriber.session.take(service.now, 1000)) is refusal
    assert subscriber.offsets() == [0, 1, 2], "queued batches should not be sent after the recovery"
    resumed = FakeSubscriber(service)
    cursor = Cursor(LOG_ID, epoch, 3)
    assert resumed.subscribe(subscription(start=Start(StartAt.CURSOR, cursor))) == 3
    service.append_rows(1)
    service.commit()
    resumed.write_all()
    assert subscriber.received + resumed.received == expected_rows(service)


def test_cursor_beyond_a_lost_unsynced_tail_is_refused() -> None:
    service = FakeService.on_disk(replace(LARGE_LOG, read_level=AckLevel.LOGGED))
    service.append_rows(3)
    service.commit()
    subscriber = FakeSubscriber(service)
    subscriber.subscribe(subscription(start=EARLIEST))
    subscriber.write_all()
    assert subscriber.offsets() == [0, 1, 2]
    log = service.log
    path = log.segments.all[-1].path  # type: ignore[union-attr]
    assert service.disk is not None
    file = service.disk.open(path)
    file.truncate(0)
    file.close()
    epoch = log.epoch
    service.fail_and_recover()
    start = Start(StartAt.CURSOR, Cursor(LOG_ID, epoch, 3))
    service.append_rows(5)
    service.commit()
    assert (
        "ahead"
        in refusal_of(lambda: FakeSubscriber(service).session.subscribe(subscription(start=start))).message
    )


# --- groups


def test_group_resumes_at_acked_offset_but_not_beyond_sent_rows() -> None:
    service = FakeService.on_disk()
    for _ in range(10):
        service.append_rows(2)
    service.commit()
    group = subscription(start=Start(StartAt.GROUP), group="g", credit=Credit(7, 1 << 40))
    first = FakeSubscriber(service)
    assert first.subscribe(group) == 0
    first.write_all()
    assert first.offsets() == list(range(8))
    first.session.note_processed(6)
    second = FakeSubscriber(service)
    assert second.subscribe(group) == 6
    assert second.session.standing_by
    second.session.note_processed(8)
    second.write_all()
    assert (second.offsets(), second.notified, second.wake_at) == ([], False, None)
    first.session.note_processed(7)
    first.session.close()
    assert second.notified
    second.write_all()
    assert second.offsets() == list(range(7, 14))
    second.session.commit(Cursor(LOG_ID, 1, 20))
    second.session.close()
    third = FakeSubscriber(service)
    assert third.subscribe(group) == 14, (
        "the cursor should stop at the offset sent, although more was acknowledged"
    )
    third.session.close()


def test_invalid_commits_are_refused() -> None:
    service = FakeService.on_disk()
    service.append_rows(2)
    service.commit()
    subscriber = FakeSubscriber(service)
    subscriber.subscribe(subscription())
    refusal = refusal_of(lambda: subscriber.session.commit(Cursor(LOG_ID, 1, 1)))
    assert refusal.code is ErrorCode.BAD_REQUEST
    assert "committed for a group, and this connection has none: name one" in refusal.message
    member = FakeSubscriber(service)
    member.subscribe(subscription(start=EARLIEST, group="g"))
    member.write_all()
    for cursor, message in (
        (Cursor(bytes(16), 1, 1), f"the cursor is of log {'00' * 16}"),
        (Cursor(LOG_ID, 2, 1), "the cursor is of epoch 2 up to offset 1: ahead"),
        (Cursor(LOG_ID, 1, 3), "ahead: the log ends at offset 2"),
    ):
        refusal = refusal_of(lambda cursor=cursor: member.session.commit(cursor))  # type: ignore[misc]
        assert refusal.code is ErrorCode.BAD_REQUEST
        assert message in refusal.message
    assert service.groups.statistics()["g"].next_offset == 0, "a refused commit should not move the cursor"
    member.session.commit(Cursor(LOG_ID, 1, 2))
    assert service.groups.statistics()["g"].next_offset == 2


def test_group_below_log_start_gets_cursor_too_old() -> None:
    service = trimmed_service()
    group = subscription(start=Start(StartAt.GROUP), group="g")
    subscriber = FakeSubscriber(service)
    assert subscriber.subscribe(subscription(start=EARLIEST, group="g")) == service.log.start_offset
    service.groups.commit("g", 3, subscriber.session)
    standby = FakeSubscriber(service)
    standby.subscribe(group)
    subscriber.session.close()
    assert refusal_of(standby.write).code is ErrorCode.CURSOR_TOO_OLD
    refusal = refusal_of(lambda: FakeSubscriber(service).session.subscribe(group))
    assert refusal.code is ErrorCode.CURSOR_TOO_OLD
    assert not service.groups.statistics()["g"].has_member
