"""Power cuts, kills and failing calls at every call of a log's life: what was promised is there."""

from __future__ import annotations

import errno
from collections import Counter
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_simulations.disk import CHANGING, SimCrash, SimDisk
from delta_prop_wire.delta import AckLevel, Source
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from tests.broker.durable import SEGMENTS, Clock, Writer, batch_of, contents
from tests.broker.durable_story import Ledger, close, commit_noted, go_on, life, note, session_of

if TYPE_CHECKING:
    from delta_prop_broker.log.durable import DurableLog

LEVELS = pytest.mark.parametrize("logged", [False, True], ids=["durable", "logged"])


@LEVELS
def test_a_power_cut_or_a_kill_at_every_call(logged: bool, full: bool) -> None:
    seeds = 20 if full else 1
    whole = SimDisk()
    life(whole, Ledger(), logged=logged)
    struck: Counter[str] = Counter()
    calls = [call.number for call in whole.trace if call.name in CHANGING]
    if logged and not full:
        calls = sorted(Random(2).sample(calls, len(calls) // 2))  # every second one may be of one kind
    assert len(calls) >= (200 if full or not logged else 100)
    for number in calls:
        disk, ledger = SimDisk(number), Ledger()
        disk.crash_at(number)
        with pytest.raises(SimCrash):
            life(disk, ledger, logged=logged)
        for seed in range(seeds):
            go_on(disk.crash(1_000 * number + seed), ledger.copy(), logged=logged)
        killed = ledger.copy()
        killed.acknowledged = killed.written  # a kill takes nothing from the page cache
        go_on(disk.kill(), killed, logged=logged)
        struck += disk.struck
    print(f"{len(calls)} calls of {whole.calls}, {seeds} seeds each: {dict(struck)}")
    assert struck["crash"] == seeds * len(calls)
    assert struck["kill"] == len(calls)
    assert min(struck["off before"], struck["off within"], struck["off after"]) > 10
    assert struck["names lost"] > 2
    assert struck["sectors lost"] > 200
    assert struck["torn"] > 0


@LEVELS
def test_every_call_fails_once(logged: bool, full: bool) -> None:
    seeds = 5 if full else 1
    whole = SimDisk()
    life(whole, Ledger(), logged=logged)
    stopped = harmless = 0
    struck: Counter[str] = Counter()
    # The name of a directory whose sync failed cannot be made again through the port.
    made = [call.number for call in whole.trace if call.name == "sync_directory" and call.path != SEGMENTS][
        1:4
    ]
    numbers = range(1, whole.calls + 1, 3 if logged and not full else 1)
    for number in numbers:
        disk, ledger = SimDisk(number), Ledger()
        disk.fail(number, (errno.EIO, errno.ENOSPC)[number % 2])
        try:
            life(disk, ledger, logged=logged)
            harmless += 1
        except OSError:
            stopped += 1
        disk.heal()
        struck += disk.struck
        # The process ends and another one comes, or the machine goes off at once.
        for seed in range(seeds if full or number % 3 == 0 else 0):
            go_on(disk.crash(1_000 * number + seed), ledger.copy(), logged=logged)
        later = disk.kill()
        go_on(later, ledger, logged=logged)
        # What the second process found and showed stays, though the first one's sync had lost it.
        for seed in range(0 if number in made else seeds):
            go_on(later.crash(1_000 * number + seed), ledger.copy(), logged=logged)
    print(f"{len(numbers)} of {whole.calls} calls: {stopped} stopped it, {harmless} did not: {dict(struck)}")
    assert stopped > 0.6 * len(numbers)
    assert struck["sync failed"] > len(numbers) // 20
    assert struck["write failed"] > len(numbers) // 20
    assert struck["sectors lost by sync"] > len(numbers) // 20
    assert struck["rename failed"] + struck["remove failed"] > 0


@LEVELS
def test_every_write_is_cut_short_and_gone_on_with(logged: bool) -> None:
    disk, ledger = SimDisk(3), Ledger()
    disk.shorten(lambda call: call.name == "write", times=None)
    life(disk, ledger, logged=logged)
    assert disk.struck["short writes"] > 50
    for seed in range(5):
        go_on(disk.crash(seed), ledger.copy(), logged=logged)


def test_a_full_disk_acknowledges_nothing_it_has_not_and_goes_on_when_there_is_room() -> None:
    stopped = 0
    for capacity in range(1_000, 16_000, 250):
        disk, ledger = SimDisk(capacity, capacity_bytes=capacity), Ledger()
        disk.free_bytes = lambda: 1 << 40  # type: ignore[method-assign]  # others fill it unforeseen
        with suppress(OSError):
            life(disk, ledger)
        stopped += disk.struck["no room"] > 0
        crashed = disk.crash(0)
        for after in (crashed, disk.kill()):
            after.capacity_bytes = None
            go_on(after, ledger.copy())
    assert stopped > 10


@LEVELS
def test_after_a_failure_nothing_is_acknowledged_but_reading_goes_on(logged: bool) -> None:
    for name in ("write", "sync"):
        disk, ledger = SimDisk(), Ledger()
        log = session_of(disk, ledger, logged=logged)
        writer = Writer(log, appended=ledger.appended)
        for _ in range(5):
            writer.append(dimension=20)
            commit_noted(log, ledger)
        shown = contents(log)
        disk.fail(lambda call, name=name: call.name == name, errno.EIO)
        writer.append()
        with pytest.raises(OSError, match="Input/output error"):
            commit_noted(log, ledger)
        assert disk.struck[f"{name} failed"] == 1
        assert log.high_watermark == 10
        assert contents(log) == shown
        assert log.take_commit(sync=True) is None
        assert log.is_accepting, "who offers is told at once, not queued for ever"
        for refusal in (log.capacity_refusal(1, 100), log.refusal(batch_of(1))):
            assert refusal is not None
            assert (refusal.code, refusal.retryable) == (ErrorCode.LOG_FAILED, True)
        with pytest.raises(Refused, match="recovered when"):
            log.append(batch_of(1), lamport=1, source=Source.LOCAL)
        calls = [call.name for call in disk.trace]
        log.close()
        assert [call.name for call in disk.trace] == calls, "nothing is retried, not even at the end"
        go_on(disk, ledger, logged=logged)


# --- any sequence

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 5), st.booleans()),
        st.tuples(st.just("append"), st.integers(1, 5), st.booleans()),
        st.tuples(st.sampled_from(["commit", "commit", "retain"]), st.just(0), st.just(False)),
        st.tuples(st.sampled_from(["crash", "kill", "reopen"]), st.integers(0, 1 << 16), st.just(False)),
    ),
    max_size=60,
)


@LEVELS
@given(steps=STEPS, seed=st.integers(0, 1 << 16))
def test_any_life_leaves_an_acknowledged_prefix_and_perhaps_more(
    logged: bool, steps: list[tuple[str, int, bool]], seed: int
) -> None:
    disk, ledger, clock = SimDisk(seed), Ledger(), Clock()
    log = session_of(disk, ledger, clock, logged=logged)
    for step, amount, large in steps:
        if step == "append":
            writer = Writer(log, appended=ledger.appended, counter=log.next_offset)
            level = AckLevel.LOGGED if amount % 2 else AckLevel.DURABLE
            writer.append(amount, level=level, dimension=60 if large else 1)
        elif step == "commit":
            commit_noted(log, ledger)
        elif step == "retain":
            clock.wait(log.settings.retention_s)
            log.retain()
            note(log, ledger)
        else:
            disk = _end(disk, log, ledger, step, amount)
            log = session_of(disk, ledger, clock, logged=logged)
    close(log, ledger)
    session_of(disk, ledger, logged=logged).close()


def _end(disk: SimDisk, log: DurableLog, ledger: Ledger, how: str, seed: int) -> SimDisk:
    if how == "crash":
        return disk.crash(seed)
    if how == "kill":
        ledger.acknowledged = ledger.written
        return disk.kill()
    close(log, ledger)
    return disk
