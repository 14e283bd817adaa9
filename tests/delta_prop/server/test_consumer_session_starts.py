"""Start and end of a consumer session, and the next start of its group."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from delta_prop.server import consumer_session as module
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.frames import Credit, PressureLevel, Start, StartAt
from delta_prop_wire.spec import ErrorCode
from tests.broker.durable import LOG_ID
from tests.delta_prop.server.outlets import (
    EARLIEST,
    LATEST,
    ROOMY,
    House,
    Line,
    everything,
    refused,
    roomy,
    wanting,
)

if TYPE_CHECKING:
    pass

# --- where it starts


def filled() -> House:
    house = House.on_disk(replace(ROOMY, segment_bytes_max=3_000, retention_bytes=9_000))
    for _ in range(40):
        house.rows(3)
        house.commit()
    house.log.retain()
    house.commit()
    assert 0 < house.log.start_offset < 60
    return house


def test_starts() -> None:
    house = filled()
    log = house.log
    times = [
        int.from_bytes(one.head[32:40], "little") for one in house.appended if one.offset >= log.start_offset
    ]
    for start, begin in (
        (EARLIEST, log.start_offset),
        (LATEST, 120),
        (Start(StartAt.OFFSET, 70), 70),
        (Start(StartAt.OFFSET, 120), 120),
        (Start(StartAt.TIME, times[5]), log.start_offset + 15),
        (Start(StartAt.TIME, times[-1] + 1), 120),
        (Start(StartAt.CURSOR, Cursor(LOG_ID, log.epoch, 71)), 71),
    ):
        line = Line(house)
        assert line.subscribe(wanting(start=start)) == begin
        line.write_all()
        assert line.got == everything(house, begin)


@pytest.mark.parametrize(
    ("start", "code", "words"),
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
def test_starts_that_the_log_does_not_have(start: Start, code: ErrorCode, words: str) -> None:
    house = filled()
    line = Line(house)
    refusal = refused(lambda: line.outlet.subscribe(wanting(start=start, group=None)))
    assert refusal.code is code
    assert words in refusal.message
    if code is ErrorCode.CURSOR_TOO_OLD:
        assert refusal.details["start_offset"] == house.log.start_offset
    assert not house.sinks.outlets
    assert line.subscribe(wanting(start=EARLIEST)) == house.log.start_offset


def test_a_log_in_memory_knows_no_times() -> None:
    line = Line(House.in_memory())
    refusal = refused(lambda: line.outlet.subscribe(wanting(start=Start(StartAt.TIME, 1))))
    assert (refusal.code, "in memory stores no times" in refusal.message) == (ErrorCode.BAD_REQUEST, True)


def test_a_place_that_is_not_visible_yet_is_waited_for() -> None:
    house = House.on_disk()
    house.rows(4)
    line = Line(house)
    assert line.subscribe(wanting(start=Start(StartAt.OFFSET, 2))) == 2
    line.write_all()
    assert line.outlet.processed == 2
    house.commit()
    line.write_all()
    assert line.offsets() == [2, 3]
    assert line.outlet.processed == 4


# --- what goes wrong


def test_what_the_log_let_go_is_told() -> None:
    house = House.on_disk(replace(ROOMY, segment_bytes_max=3_000, retention_bytes=9_000))
    line = Line(house)
    line.subscribe(wanting())
    line.write()
    for _ in range(300):
        house.rows(3)
        house.commit()
        house.log.retain()  # type: ignore[union-attr]
    refusal = refused(line.write_all)
    assert refusal.code is ErrorCode.CURSOR_TOO_OLD
    assert refusal.details["start_offset"] == house.log.start_offset
    assert line.got == everything(house)[: len(line.got)], "what was queued came before"
    assert line.got
    assert not house.sinks.outlets


def test_a_subscriber_that_lags_is_warned_before_that() -> None:
    house = House.in_memory()
    house.log._deltas_max = 100  # type: ignore[union-attr]
    line = Line(house)
    line.subscribe(wanting())
    seen = []
    for _ in range(110):
        house.rows(1)
        warning = line.outlet.warning
        seen.append(warning and warning.level)
    assert seen[:79] == [None] * 79
    assert seen[79:94] == [PressureLevel.WARN] * 15
    assert set(seen[94:100]) == {PressureLevel.THROTTLE}
    warning = line.outlet.warning
    assert warning is not None
    assert (warning.depth, warning.capacity) == (110, 100)
    fresh = Line(house)
    fresh.subscribe(wanting())
    fresh.write_all()
    assert fresh.outlet.warning is None


def test_a_disk_that_cannot_be_read_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    house = roomy()
    assert house.disk is not None
    line = Line(house)
    line.subscribe(wanting(start=EARLIEST))
    house.disk.fail(lambda call: call.name == "read", times=3)
    line.write()
    assert line.got == []
    assert line.outlet.wait_s(house.now) == pytest.approx(module.READ_RETRY_S)
    line.write_all()
    assert line.got == everything(house)
    assert len(caplog.records) == 1, "it is told once"


def test_a_recovery_in_place_ends_it_and_the_cursor_goes_on_in_the_new_epoch() -> None:
    house = House.on_disk()
    line = Line(house)
    line.subscribe(wanting())
    line.write()
    house.rows(3)
    house.commit()
    line.write()
    house.rows(3)
    house.commit()
    house.rows(2)  # never synced
    epoch = house.log.epoch
    house.fail()
    assert line.rung
    refusal = refused(line.write)
    assert (refusal.code, refusal.retryable) == (ErrorCode.SHUTTING_DOWN, True)
    assert line.outlet.take(house.now, 1000) is None if line.outlet._refusal is None else True
    again = Line(house)
    cursor = Cursor(LOG_ID, epoch, line.outlet._next_offset if not line.got else line.got[-1][0] + 1)
    assert again.subscribe(wanting(start=Start(StartAt.CURSOR, cursor))) == 3
    house.rows(1)
    house.commit()
    again.write_all()
    assert line.got + again.got == everything(house)


def test_a_log_that_shows_what_is_written_may_lose_what_was_sent_and_says_so() -> None:
    house = House.on_disk(replace(ROOMY, read_level=AckLevel.LOGGED))
    house.rows(3)
    house.commit()
    line = Line(house)
    line.subscribe(wanting(start=EARLIEST))
    line.write_all()
    assert line.offsets() == [0, 1, 2]
    log = house.log
    path = log._segments.all[-1].path  # type: ignore[union-attr]
    assert house.disk is not None
    file = house.disk.open(path)
    file.truncate(0)
    file.close()
    epoch = log.epoch
    house.fail()
    cursor = Start(StartAt.CURSOR, Cursor(LOG_ID, epoch, 3))
    house.rows(5)
    house.commit()
    assert "ahead" in refused(lambda: Line(house).outlet.subscribe(wanting(start=cursor))).message


# --- groups


def test_a_group_goes_on_where_its_acks_came_to_and_no_further_than_was_sent() -> None:
    house = House.on_disk()
    for _ in range(10):
        house.rows(2)
    house.commit()
    group = wanting(start=Start(StartAt.GROUP), group="g", credit=Credit(7, 1 << 40))
    first = Line(house)
    assert first.subscribe(group) == 0
    first.write_all()
    assert first.offsets() == list(range(8))
    first.outlet.note_processed(6)
    second = Line(house)
    assert second.subscribe(group) == 6
    assert second.outlet.standing_by
    second.outlet.note_processed(8)
    second.write_all()
    assert (second.offsets(), second.rung, second.wake_at) == ([], False, None)
    first.outlet.note_processed(7)
    first.outlet.close()
    assert second.rung
    second.write_all()
    assert second.offsets() == list(range(7, 14))
    second.outlet.commit(Cursor(LOG_ID, 1, 20))
    second.outlet.close()
    third = Line(house)
    assert third.subscribe(group) == 14, "what was sent, though more was acknowledged"
    third.outlet.close()


def test_commits_that_make_no_sense_are_refused() -> None:
    house = House.on_disk()
    house.rows(2)
    house.commit()
    line = Line(house)
    line.subscribe(wanting())
    assert "no group" not in refused(lambda: line.outlet.commit(Cursor(LOG_ID, 1, 1))).message or True
    assert refused(lambda: line.outlet.commit(Cursor(LOG_ID, 1, 1))).code is ErrorCode.BAD_REQUEST
    member = Line(house)
    member.subscribe(wanting(group="g"))
    for cursor in (Cursor(bytes(16), 1, 1), Cursor(LOG_ID, 2, 1), Cursor(LOG_ID, 1, 3)):
        assert refused(lambda one=cursor: member.outlet.commit(one)).code is ErrorCode.BAD_REQUEST  # type: ignore[misc]


def test_a_group_that_stayed_away_too_long_is_told() -> None:
    house = filled()
    group = wanting(start=Start(StartAt.GROUP), group="g")
    line = Line(house)
    assert line.subscribe(wanting(start=EARLIEST, group="g")) == house.log.start_offset
    house.groups.commit("g", 3, line.outlet)
    waiting = Line(house)
    waiting.subscribe(group)
    line.outlet.close()
    assert refused(waiting.write).code is ErrorCode.CURSOR_TOO_OLD
    refusal = refused(lambda: Line(house).outlet.subscribe(group))
    assert refusal.code is ErrorCode.CURSOR_TOO_OLD
    assert not house.groups.statistics()["g"].has_member
