"""An outlet: what of the log comes, when, in which form, and how far it says it is."""

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
from tests.delta_prop.server.outlets import (
    EARLIEST,
    HOUSES,
    SETTINGS,
    House,
    Line,
    batch_of,
    everything,
    mixed,
    refused,
    told,
    wanting,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_wire.frames import Subscription

SCOPE = frozenset({"a"})


# --- hot


@HOUSES
def test_whole_batches_are_pushed_as_the_log_keeps_them(make: Callable[[], House]) -> None:
    house = make()
    line, other = Line(house), Line(house)
    assert [line.subscribe(wanting()), other.subscribe(wanting())] == [0, 0]
    line.write_all()
    for _ in range(5):
        logged = house.rows(3)
        house.commit()
        line.write()
        other.write()
        assert line.got[-3:] == [told(logged, row) for row in range(3)]
    assert line.got == other.got == everything(house)
    frame = line.frames[-1]
    assert isinstance(frame, BatchFrame)
    assert bytes(frame.batch.body) == bytes(house.appended[-1].batch.body)
    assert not line.outlet.is_catching_up
    assert line.outlet.processed == house.log.high_watermark == 15


@HOUSES
def test_nothing_is_sent_before_it_is_visible(make: Callable[[], House]) -> None:
    house = make()
    line = Line(house)
    line.subscribe(wanting())
    house.rows(2)
    assert line.write() == (0 if house.disk else 1)
    house.commit()
    line.write()
    assert line.offsets() == [0, 1]


def test_the_first_delta_of_an_idle_connection_goes_at_once_and_what_follows_gathers() -> None:
    house = House.in_memory(settings=ServerSettings())
    line = Line(house)
    line.subscribe(wanting(batch_deltas_max=10, wait_ms_max=20))
    line.write()
    rings = line.rings
    house.rows(1)
    assert line.rings == rings + 1
    line.write(times=1)
    assert line.offsets() == [0]
    for _ in range(3):
        house.rows(1)
    line.write()
    assert line.offsets() == [0], "they wait for more"
    assert line.wake_at == pytest.approx(house.now + 0.02)
    for _ in range(6):
        house.rows(1)
    assert (line.rings, line.rung) == (rings + 1, False), "nobody is rung for before there are enough"
    house.rows(1)
    assert line.rings == rings + 2
    line.write(times=1)
    assert line.offsets() == list(range(11))
    house.rows(1)
    line.write()
    house.now += 0.02
    line.write()
    assert line.offsets() == list(range(12)), "or until the time is over"
    assert line.outlet.wait_s(house.now) is None


def test_the_time_to_gather_begins_with_the_first_that_waits() -> None:
    house = House.in_memory(settings=ServerSettings())
    line = Line(house)
    line.subscribe(wanting(wait_ms_max=20))
    line.write()
    house.rows(1)
    line.write(times=1)
    house.now += 0.015  # so long its writing took
    house.rows(1)
    house.now += 0.010
    line.write()
    assert line.offsets() == [0]
    house.now += 0.010
    line.write()
    assert line.offsets() == [0, 1]


def test_who_is_behind_never_gathers() -> None:
    house = House.on_disk(settings=ServerSettings())
    for _ in range(300):
        mixed(house)
    house.commit()
    line = Line(house)
    line.subscribe(wanting(1, "ns:a", start=EARLIEST, wait_ms_max=10_000))
    line.write()
    assert line.outlet.processed == house.log.high_watermark
    assert len(line.got) == 900


def test_a_turn_makes_so_many_frames_at_most() -> None:
    house = House.in_memory(settings=ServerSettings())
    cut, single = Line(house), Line(house)
    cut.subscribe(wanting(1, "ns:a"))
    single.subscribe(wanting(1, "ns:rows", deltas=True))
    for _ in range(150):
        mixed(house)
    house.rows(200)
    for line in (cut, single):
        line.write(times=1)
        assert 0 < len(line.frames) <= ENCODED_MAX
        line.write_all()
    assert cut.got == [one for one in everything(house) if one[0] % 2 == 0 and one[0] < 900]
    assert single.got == everything(house, 900)


def test_room_in_the_queue_comes_back_with_what_is_sent() -> None:
    house = House.on_disk()
    line = Line(house)
    line.subscribe(wanting())
    line.write()
    for _ in range(300):
        house.rows(3)
        house.commit()
        line.write()
        house.now += 0.1
        line.write()
        assert not line.outlet.is_catching_up
    assert (line.outlet._queue.bytes, line.outlet._queue.deltas) == (0, 0)


def test_a_cut_that_would_be_too_large_is_several_frames_each_under_its_own_credit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(send_queue, "FRAME_PAYLOAD_BYTES_MAX", 1_000)
    house = House.in_memory(settings=ServerSettings())
    line = Line(house)
    line.subscribe(wanting(1, "ns:a", credit=Credit(5, 1 << 40)))
    deltas = [Delta(f"k{row}", opaque(b"x"), "ab"[row % 2]) for row in range(40)]
    house.append(batch_of(deltas, house.counter))
    line.write_all()
    assert 5 <= len(line.got) < 20
    line.grant(100)
    line.write_all()
    assert line.offsets() == list(range(0, 40, 2))
    assert len(line.frames) > 1


def test_what_is_large_does_not_gather() -> None:
    house = House.in_memory()
    line = Line(house)
    line.subscribe(wanting(batch_deltas_max=1000, wait_ms_max=20_000))
    line.write()
    house.rows(1)
    line.write(times=1)
    house.rows(1)
    line.write()
    assert line.offsets() == [0]
    house.rows(1, data=bytes(4_000))
    line.write()
    assert line.offsets() == [0, 1, 2]


@pytest.mark.parametrize("bytes_max", [1_000, 1_150, 1_300, 20_000])
def test_a_full_queue_is_read_from_the_log_and_pushed_again_afterwards(bytes_max: int) -> None:
    house = House.on_disk(settings=replace(SETTINGS, subscriber_bytes_max=bytes_max))
    line = Line(house)
    line.subscribe(wanting())
    line.write()
    for _ in range(200):
        house.rows(3)
        house.commit()
    outlet = line.outlet
    assert outlet.is_catching_up
    assert outlet.processed == 0
    assert outlet._queue.bytes <= house.settings.subscriber_bytes_max
    line.write_all()
    assert line.got == everything(house)
    assert not outlet.is_catching_up
    rings = line.rings
    house.rows(1)
    house.commit()
    assert line.rings == rings + 1
    line.write()
    assert line.got == everything(house)


# --- what is left out


@HOUSES
def test_rows_that_match_come_as_a_cut_frame_and_the_rest_counts_as_dealt_with(
    make: Callable[[], House],
) -> None:
    house = make()
    line, nothing = Line(house), Line(house)
    line.subscribe(wanting(1, "ns:a"))
    nothing.subscribe(wanting(1, "ns:nobody"))
    for pushed in (True, False):
        mixed(house)
        if pushed:
            house.commit()
        line.write()
        nothing.write()
        house.commit()
    line.write_all()
    assert line.offsets() == [0, 2, 4, 6, 8, 10]
    assert line.got == [one for one in everything(house) if one[0] % 2 == 0]
    assert [frame.sequence for frame in line.frames] == [0, 6]
    assert nothing.got == []
    assert nothing.outlet.processed == line.outlet.processed == house.log.high_watermark == 12


def test_a_filter_and_a_scope_narrow_what_the_topics_match() -> None:
    house = House.on_disk()
    high, replicas, scoped = Line(house), Line(house), Line(house, may_read=SCOPE.__contains__)
    high.subscribe(wanting(filter=Filter(priorities=(Priority.HIGH,))))
    replicas.subscribe(wanting(filter=Filter(sources=(Source.REPLICA,))))
    scoped.subscribe(wanting())
    for number in range(60):
        mixed(house)
        deltas = [Delta("k", scale(2.0), "b")]
        house.append(
            batch_of(deltas, house.counter, Priority.HIGH if number % 2 else Priority.LOW),
            Source.REPLICA if number % 3 == 0 else Source.LOCAL,
        )
        if number < 5:
            house.commit()
            for line in (high, replicas, scoped):
                line.write()
    house.commit()
    for line in (high, replicas, scoped):
        line.write_all()
        assert line.outlet.processed == house.log.high_watermark
    all_ = everything(house)
    assert high.got == [one for one in all_ if one[0] % 7 == 6 and one[0] // 7 % 2]
    assert replicas.got == [one for one in all_ if one[0] % 7 == 6 and one[0] // 7 % 3 == 0]
    assert scoped.got == [one for one in all_ if one[0] % 7 in (0, 2, 4)]


@HOUSES
def test_control_rows_are_passed_over(make: Callable[[], House]) -> None:
    house = make()
    line = Line(house)
    line.subscribe(wanting(start=EARLIEST))
    house.rows(2)
    house.void(3)
    house.commit()
    line.write_all()
    assert line.offsets() == [0, 1]
    assert line.outlet.processed == 5
    house.void()
    house.rows(1)
    house.commit()
    line.write_all()
    assert line.offsets() == [0, 1, 6]


@HOUSES
def test_deltas_come_one_a_frame_where_that_is_asked_for(make: Callable[[], House]) -> None:
    house = make()
    line = Line(house)
    line.subscribe(wanting(1, "ns:a", "ns:rows", deltas=True, start=EARLIEST))
    house.rows(200)
    mixed(house)
    house.commit()
    line.write_all()
    assert line.got == [one for one in everything(house) if one[0] < 200 or one[0] % 2 == 0]
    assert all(isinstance(frame, DeltaFrame) for frame in line.frames)


# --- subscriptions come and go


def test_further_subscriptions_add_topics_from_where_the_cursor_is() -> None:
    house = House.on_disk()
    line = Line(house)
    line.subscribe(wanting(1, "ns:a"))
    mixed(house)
    house.commit()
    line.write_all()
    mixed(house)
    house.commit()
    assert line.subscribe(wanting(2, "v:b1")) == 6, "what is queued was chosen before"
    line.write_all()
    assert line.offsets() == [0, 2, 4, 6, 8, 9, 10]
    line.outlet.unsubscribe(1)
    mixed(house)
    house.commit()
    line.write_all()
    assert line.offsets()[7:] == [15]
    line.outlet.unsubscribe(2)
    mixed(house)
    house.commit()
    line.write_all()
    assert line.offsets()[8:] == []
    assert line.outlet.processed == house.log.high_watermark
    assert not house.sinks.outlets
    assert line.subscribe(wanting(3, "ns:a", start=Start(StartAt.OFFSET, 12))) == 12
    line.write_all()
    assert line.offsets()[8:] == [12, 14, 16, 18, 20, 22]


def test_a_subscription_that_comes_in_the_middle_of_a_cut_batch_repeats_nothing() -> None:
    house = House.in_memory()
    line = Line(house, bytes_max=1)
    line.subscribe(wanting(1, "ns:a", deltas=True))
    line.write()
    mixed(house)
    line.write(times=1)
    assert line.offsets() == [0]
    assert line.subscribe(wanting(2, "ns:b", deltas=True)) == 2
    line.write_all()
    assert line.offsets() == [0, 2, 3, 4, 5]


@HOUSES
def test_without_credit_the_cursor_stays_for_topics_that_are_still_to_come(make: Callable[[], House]) -> None:
    house = make()
    mixed(house)
    house.commit()
    line = Line(house)
    line.subscribe(wanting(1, "ns:a", credit=Credit(0, 0), start=Start(StartAt.OFFSET, 6)))
    mixed(house)
    house.commit()
    line.write_all()
    assert (line.got, line.outlet.processed) == ([], 6)
    assert line.subscribe(wanting(2, "v:b0")) == 6
    mixed(house)
    house.commit()
    line.write_all()
    line.window.grant(Credit(100, 1 << 40))
    assert line.outlet.subscribe(wanting(3, "v:b1", credit=Credit(100, 1 << 40))).start.next_offset == 6
    line.rung = True
    line.write_all()
    assert line.offsets() == [6, 7, 8, 9, 10, 12, 13, 14, 15, 16]
    assert not line.outlet.is_catching_up


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (wanting(2, start=EARLIEST), "start"),
        (wanting(2, group="other"), "group"),
        (wanting(2, deltas=True), "deltas"),
        (wanting(2, credit=Credit(1, 1)), "credit"),
    ],
)
def test_what_the_first_subscription_set_no_other_changes(request_: Subscription, field: str) -> None:
    line = Line(House.in_memory())
    line.subscribe(wanting(1, "ns:a"))
    refusal = refused(lambda: line.outlet.subscribe(request_))
    assert (refusal.code, refusal.field) == (ErrorCode.BAD_REQUEST, field)
    line.house.rows(1)
    line.write_all()
    assert line.got == []


def test_what_the_first_subscription_set_another_may_repeat_or_leave_out() -> None:
    line = Line(House.in_memory())
    line.house.rows(4)
    line.subscribe(wanting(1, "ns:a", start=EARLIEST, deltas=True))
    assert line.subscribe(wanting(2, "ns:b")) == 0
    assert line.subscribe(wanting(3, "ns:c", start=EARLIEST, deltas=True)) == 0


def test_wrong_numbers_are_refused() -> None:
    line = Line(House.in_memory())
    assert refused(lambda: line.outlet.unsubscribe(1)).code is ErrorCode.BAD_REQUEST
    line.subscribe(wanting(1, "ns:a"))
    assert refused(lambda: line.outlet.subscribe(wanting(1))).code is ErrorCode.BAD_REQUEST
    assert refused(lambda: line.outlet.unsubscribe(2)).code is ErrorCode.BAD_REQUEST


# --- credit


@HOUSES
@pytest.mark.parametrize("form", [False, True])
def test_credit_bounds_what_is_sent(make: Callable[[], House], form: bool) -> None:
    house = make()
    line = Line(house)
    line.subscribe(wanting(credit=Credit(5, 1 << 40), deltas=form))
    for _ in range(20):
        house.rows(3)
        house.commit()
        line.write_all()
    sent = len(line.got)
    assert sent == (5 if form else 6)
    assert line.outlet.wait_s(house.now) is None
    rings = line.rings
    house.rows(3)
    house.commit()
    assert line.rings == rings, "credit is waited for, not deltas"
    line.grant(1)
    assert line.rings == rings + (1 if form else 0), "a balance of 0 is not above it"
    line.write_all()
    assert len(line.got) == 6
    line.grant(10, 0)
    line.write_all()
    line.grant(1000)
    line.write_all()
    assert line.got == everything(house)


def test_bytes_are_bounded_too() -> None:
    house = House.on_disk()
    line = Line(house)
    line.subscribe(wanting(credit=Credit(1 << 40, 100)))
    for _ in range(20):
        house.rows(3)
        house.commit()
    line.write_all()
    assert len(line.frames) == 1
    line.grant(0, 10_000)
    line.write_all()
    assert line.got == everything(house)
