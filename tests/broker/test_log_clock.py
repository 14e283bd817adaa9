"""LogClock: whatever the wall clock does, log time never falls, and rows age only while the log is open."""

from __future__ import annotations

import errno
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from delta_prop_broker.log.directory import Times, read_times, write_times
from delta_prop_broker.log_clock import JUMP_US, STOP_US, ClockJump, LogClock
from delta_prop_broker.segments.paths import DIRECTORY, TIME
from delta_prop_simulations.disk import SimDisk
from tests.broker.durable import SMALL, START_US, Clock, Writer, commit, open_log

DAY_US = 86_400_000_000
RETENTION_S = 1_000.0
AGEING = replace(SMALL, retention_s=RETENTION_S, segment_s_max=100.0, retention_bytes=40_000)

waits = st.one_of(st.integers(0, 50_000_000), st.integers(0, DAY_US))
wall_offsets = st.one_of(
    st.just(0), st.integers(-JUMP_US, JUMP_US), st.sampled_from([20 * DAY_US, -20 * DAY_US])
)


def start_clock(clock: Clock, *, seen_us: int = 0, time_us: int = 0) -> LogClock:
    return LogClock(clock, seen_us=seen_us, time_us=time_us, jump=None)


@given(st.lists(st.tuples(waits, wall_offsets, st.booleans()), max_size=30))
def test_log_time_never_falls_and_seen_time_is_monotonic(
    steps: list[tuple[int, int, bool]],
) -> None:
    clock = Clock(step_us=0)
    log_clock = start_clock(clock)
    log_clock.read()
    for wait_us, off_us, restarts in steps:
        seen_us, time_us, read_us = log_clock.seen_us, log_clock.time_us, clock.us
        clock.us += wait_us
        clock.off_us = off_us
        if restarts:
            log_clock = start_clock(clock, seen_us=seen_us, time_us=time_us)
            assert log_clock.read() == max(time_us, clock.wall_us())
            assert log_clock.seen_us == seen_us, "time between two processes must not count as seen"
        else:
            assert time_us + wait_us // 2 <= log_clock.read() <= time_us + 2 * wait_us
            assert log_clock.seen_us - seen_us == clock.us - read_us
        assert log_clock.time_us >= time_us
        assert log_clock.ahead_us == clock.wall_us() - log_clock.time_us


@pytest.mark.parametrize("off_us", [3_600_000_000, -3_600_000_000])
def test_log_time_converges_to_an_adjusted_wall_clock(off_us: int) -> None:
    clock = Clock()
    log_clock = start_clock(clock)
    log_clock.read()
    clock.off_us = off_us
    for _ in range(3_601):
        log_clock.read()
    if off_us < 0:  # log time follows at half the speed, so it takes twice as long
        for _ in range(3_601):
            log_clock.read()
    assert log_clock.ahead_us == 0
    assert log_clock.read() == clock.wall_us()


def test_jump_and_return_leaves_log_time_unchanged() -> None:
    clock = Clock()
    log_clock = start_clock(clock)
    for second in range(1_000):
        clock.off_us = 20 * DAY_US if 100 <= second < 110 else 0
        log_clock.read()
    assert log_clock.ahead_us == 0
    assert log_clock.jumps == 2


@pytest.mark.parametrize(
    ("jump_us", "jump_count"), [(JUMP_US - 1, 0), (JUMP_US, 1), (-JUMP_US, 1), (1 - JUMP_US, 0)]
)
def test_jump_of_a_minute_or_more_is_counted(jump_us: int, jump_count: int) -> None:
    clock = Clock()
    log_clock = start_clock(clock)
    log_clock.read()
    expected = clock.us + clock.step_us
    clock.off_us += jump_us
    log_clock.read()
    assert log_clock.jumps == jump_count
    assert log_clock.jump == (ClockJump(expected, expected + jump_us) if jump_count else None)


@pytest.mark.parametrize(
    ("stopped_us", "jump_count"), [(-JUMP_US, 1), (1 - JUMP_US, 0), (STOP_US - 1, 0), (STOP_US, 1)]
)
def test_start_far_from_the_last_log_time_counts_as_a_jump(stopped_us: int, jump_count: int) -> None:
    clock = Clock(step_us=0)
    log_clock = start_clock(clock, time_us=START_US - stopped_us)
    log_clock.read()
    assert log_clock.jumps == jump_count
    assert log_clock.jump == (ClockJump(START_US - stopped_us, START_US) if jump_count else None)


# --- stored times


def test_missing_or_corrupted_times_equal_those_of_a_new_log() -> None:
    disk = SimDisk()
    disk.make_directory(DIRECTORY)
    notes: list[str] = []
    assert read_times(disk, DIRECTORY, notes) == Times()
    times = Times(5, 7, ClockJump(1, 2), {0: 3, 40: 4}, (60, 4))
    write_times(disk, DIRECTORY, times)
    assert read_times(disk, DIRECTORY, notes) == times
    assert notes == []
    disk.flip(f"{DIRECTORY}/{TIME}", 20, 1)
    assert read_times(disk, DIRECTORY, notes) == Times()
    disk.fail(lambda call: call.path.endswith(TIME), errno.EIO)
    assert read_times(disk, DIRECTORY, notes) == Times()
    assert [word for note in notes for word in ("is corrupted", "cannot be read") if word in note] == [
        "is corrupted",
        "cannot be read",
    ]


class FaultyClockRun:
    """A log in several processes with a faulty clock.

    `seen_s`: the age of each offset, in seconds of seen time. `stamps`: the log time of each append.
    """

    def __init__(self) -> None:
        self.disk, self.clock = SimDisk(), Clock(step_us=0)
        self.seen_s: dict[int, float] = {}
        self.stamps: list[int] = []
        self.open()

    def open(self) -> None:
        self.log, _ = open_log(self.disk, AGEING, clock=self.clock)
        self.writer = Writer(self.log, counter=self.log.next_offset)
        self.seen_s = {offset: seen for offset, seen in self.seen_s.items() if offset < self.log.next_offset}
        self.log.clock.read()

    def append(self) -> None:
        logged = self.writer.append()
        commit(self.log)
        self.seen_s[logged.offset] = 0.0
        self.stamps.append(self.log.clock.time_us)

    def wait(self, seconds: float) -> None:
        while seconds > 0:
            step = min(seconds, 50.0)
            seconds -= step
            self.clock.wait(step)
            self.seen_s = {offset: seen + step for offset, seen in self.seen_s.items()}
            self.log.roll()
            start = self.log.start_offset
            self.log.retain()
            commit(self.log)
            removed = {
                offset: seen
                for offset, seen in self.seen_s.items()
                if start <= offset < self.log.start_offset
            }
            assert all(seen >= RETENTION_S for seen in removed.values()), removed

    def end(self, how: str, stopped_us: int, off_us: int) -> None:
        """End the process and start the next one.

        `how`: closed, killed, crashed, or written (crashed after the times were written).
        """
        if how == "written":
            self.log.write_times(self.log.times())
        if how == "closed":
            self.log.close()
        self.disk = self.disk.kill() if how == "killed" else self.disk.crash(1)
        self.clock.us += stopped_us
        self.clock.off_us = off_us
        self.open()


run_steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 3)),
        st.tuples(st.just("wait"), st.integers(1, 1_500)),
        st.tuples(st.just("jump"), wall_offsets),
        st.tuples(st.sampled_from(["closed", "killed", "crashed", "written"]), waits, wall_offsets),
    ),
    max_size=20,
)


@given(run_steps)
@example([("append", 1), ("wait", 60), ("closed", 0, 20 * DAY_US), ("append", 1), ("wait", 900)])
@example([("append", 1), ("wait", 60), ("killed", 0, -20 * DAY_US), ("append", 1), ("wait", 900)])
@example([("append", 1), ("wait", 60), ("closed", 20 * DAY_US, 0), ("append", 1), ("wait", 900)])
@example([("append", 1), ("jump", 20 * DAY_US), ("append", 1), ("jump", 0), ("wait", 900)])
def test_rows_are_removed_after_their_retention_in_seen_time(steps: list[tuple[str, int]]) -> None:
    run = FaultyClockRun()
    for kind, *arguments in steps:
        if kind == "append":
            for _ in range(arguments[0]):
                run.append()
        elif kind == "wait":
            run.wait(arguments[0])
        elif kind == "jump":
            run.clock.off_us = arguments[0]
            run.log.clock.read()
        else:
            run.end(kind, *arguments)
        assert all(earlier <= later for earlier, later in pairwise(run.stamps))
    run.wait(RETENTION_S + AGEING.segment_s_max + 100.0)
    assert run.log.start_offset == run.log.next_offset
    run.log.close()


@pytest.mark.parametrize("off_us", [0, 20 * DAY_US, -20 * DAY_US])
@pytest.mark.parametrize("how", ["closed", "written"])
def test_age_is_preserved_over_a_restart(how: str, off_us: int) -> None:
    run = FaultyClockRun()
    run.append()
    run.wait(150.0)  # long enough for the segment to be sealed
    run.end(how, 5 * DAY_US, off_us)
    run.wait(RETENTION_S - 200.0)
    assert run.log.start_offset == 0
    run.wait(150.0)
    assert run.log.start_offset == run.log.next_offset
