"""The quarantine of a service with a data directory survives the process, crashes and disk failures."""

from __future__ import annotations

import errno
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partialmethod

import anyio
import pytest

from delta_prop import LogSettings
from delta_prop.delivery.quarantine import Quarantine
from delta_prop.delivery.quarantine_file import QuarantineCorrupted, quarantine_path
from delta_prop.delivery.quarantines import QuarantineWriter
from delta_prop.testing import run_virtual
from delta_prop_broker.log.memory import MemoryLog
from delta_prop_simulations.disk import SimDisk
from delta_prop_simulations.disk_faults import SimCrash
from delta_prop_wire.delta import AckLevel, Source
from delta_prop_wire.encode import encode_batch
from tests.delta_prop.durable.quarantined import (
    RejectingSink,
    Store,
    make_addition,
    make_delta,
    quarantined_rows,
    service,
)

JOURNAL = quarantine_path("totals")


async def fill_quarantine(disk: SimDisk, store: Store, bad: set[float]) -> list[tuple[int, int, str | None]]:
    """Publish deltas; `EXPECTED` names the four that are quarantined: two rejected, and their dependents."""
    async with service(disk, 1) as p:
        await p.attach(RejectingSink(store, bad))
        await p.publish(make_delta("a"), make_delta("b"))
        await p.publish(make_addition("a", 7))
        await p.publish(make_addition("a", 10), make_addition("b", 20))
        await p.publish(make_addition("b", 7), make_delta("c"))
        await p.publish(make_addition("b", 30))
        await p.wait_visible(8, timeout_s=5) if not bad else await anyio.sleep(1)
        return quarantined_rows(p)


EXPECTED = [(2, 2, "7 is bad"), (3, 2, None), (5, 5, "7 is bad"), (7, 5, None)]


@pytest.mark.parametrize("keeps_cursor", [True, False])
@pytest.mark.parametrize("power_cut", [True, False])
def test_quarantine_is_restored_after_a_crash(keeps_cursor: bool, power_cut: bool) -> None:
    async def main() -> None:
        disk, store, bad = SimDisk(1), Store(keeps_cursor), {7.0}
        assert await fill_quarantine(disk, store, bad) == EXPECTED
        assert store.applied_offsets == [0, 1, 4, 6]
        disk = disk.crash(1) if power_cut else disk.kill()
        async with service(disk, 2) as p:
            await p.attach(RejectingSink(store, bad))
            assert quarantined_rows(p) == EXPECTED
            bad.clear()
            replayed = await p.replay("totals", 2)
            assert (replayed.applied, replayed.left) == (2, 2)
            dropped = await p.drop("totals", 5)
            assert (dropped.applied, dropped.dropped) == (1, 1)
            assert store.sums == {"a": 18, "b": 51, "c": 1}
        disk = disk.crash(2) if power_cut else disk.kill()
        async with service(disk, 3) as p:
            await p.attach(RejectingSink(store, bad))
            assert quarantined_rows(p) == []
            quarantine = p.internals().sinks.feed("totals").quarantine
            assert quarantine.dropped_offsets == [5]
            assert [quarantine.is_withheld(offset) for offset in (2, 5, 7)] == [False, True, False]
            await p.publish(make_addition("a", 100), make_addition("b", 100))
            await p.wait_visible(10)
        assert store.sums == {"a": 118, "b": 151, "c": 1}
        assert store.duplicates == 0

    run_virtual(main)


def test_quarantined_delta_removed_from_the_log_is_replayed() -> None:
    async def main() -> None:
        small = LogSettings(
            segment_bytes_max=4096, bytes_max=1 << 20, retention_bytes=8192, retention_s=3600.0
        )
        disk, store, bad = SimDisk(1), Store(keeps_cursor=True), {7.0}
        async with service(disk, 1, small) as p:
            await p.attach(RejectingSink(store, bad))
            await p.publish(make_delta("a"), make_delta("b", 7))
            for number in range(400):
                await p.publish(make_addition("a", number + 1000))
            await anyio.sleep(5)
            assert p.statistics().log.start_offset > 2
            assert [offset for offset, _, _ in quarantined_rows(p)] == [1]
        async with service(disk.crash(1), 2, small) as p:
            bad.clear()
            await p.attach(RejectingSink(store, bad))
            assert (await p.replay("totals")).applied == 1
            assert store.sums["b"] == 7

    run_virtual(main)


# --- crashes


@dataclass
class OperatorRecord:
    """Requests of the operator and their effects, over the processes of one service."""

    dropped: set[int] = field(default_factory=set)
    replayed: set[int] = field(default_factory=set)
    drop_requested: set[int] = field(default_factory=set)
    replay_requested: set[int] = field(default_factory=set)
    published: int = 0


async def run_process(
    disk: SimDisk, seed: int, store: Store, operations: OperatorRecord
) -> list[tuple[int, int, str | None]]:
    """Run one process: publish the missing deltas, replay one rejected delta, drop another."""
    bad = {-7.0, -8.0}
    async with service(disk, seed) as p:
        await p.attach(RejectingSink(store, bad))
        producer = p.producer("me")
        for number in range(producer.watermark(), 12):
            # v0 and v1 in turn; -7 is replayed later, -8 dropped, later deltas of the vector are held
            value = {2: -7.0, 5: -8.0}.get(number, 2.0**number)
            await producer.publish(
                make_addition(f"v{number % 2}", value) if number > 1 else make_delta(f"v{number}")
            )
            operations.published = number + 1
        await p.internals().sinks.feed("totals").wait(12)
        rejected = {record.offset: record.reason for record in p.quarantine("totals")}
        assert not operations.dropped & rejected.keys()
        assert not operations.replayed & rejected.keys()
        if 2 in rejected:
            bad.discard(-7.0)
            operations.replay_requested.add(2)
            await p.replay("totals", 2)
            operations.replayed.add(2)
        if 5 in rejected:
            operations.drop_requested.add(5)
            await p.drop("totals", 5)
            operations.dropped.add(5)
        elif any(record.blocked_by == record.offset for record in p.quarantine("totals")):
            await p.replay(
                "totals"
            )  # a crash interrupted a drop: the rows that it freed are still to be applied
        return quarantined_rows(p)


def is_crash(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(is_crash(inner) for inner in error.exceptions)
    return isinstance(error, SimCrash)


def crash_at(n: int, *, keeps_cursor: bool, power_cut: bool) -> bool:
    """Crash a process at its n-th disk call; check that the next one loses and doubles no delta.

    Return False if the first process ended before that call.
    """
    disk, store, operations = SimDisk(n), Store(keeps_cursor), OperatorRecord()
    disk.crash_at(n, None)
    crashed = False
    try:
        run_virtual(run_process, disk, n, store, operations)
    except BaseException as error:
        crashed = is_crash(error)
        if not crashed:
            raise
    disk = disk.crash(n) if power_cut else disk.kill()
    assert run_virtual(run_process, disk, n + 1, store, operations) == []
    assert sorted(store.applied_offsets) == [0, 1, 2, 3, 4, *range(6, 12)]  # 5 was dropped
    assert store.sums["v0"] == 1 - 7 + 2**4 + 2**6 + 2**8 + 2**10
    assert store.sums["v1"] == 1 + 2**3 + 2**7 + 2**9 + 2**11
    return crashed


def disk_calls(keeps_cursor: bool) -> list[tuple[int, bool]]:
    """Return the disk calls of a process without a crash; True marks those for the file of a quarantine."""
    probe = SimDisk(0)
    assert run_virtual(run_process, probe, 0, Store(keeps_cursor), OperatorRecord()) == []
    return [(call.number, call.path.startswith("quarantine")) for call in probe.trace]


@pytest.mark.parametrize("keeps_cursor", [True, False])
def test_crash_at_any_call_loses_or_doubles_nothing(keeps_cursor: bool, full: bool) -> None:
    calls = disk_calls(keeps_cursor)
    if full:
        chosen = [(n, power_cut) for n, _ in calls for power_cut in (True, False)]
    else:
        chosen = [(n, n % 2 == 0) for n, is_quarantine_file in calls if is_quarantine_file or n % 16 == 0]
    crashes = sum(crash_at(n, keeps_cursor=keeps_cursor, power_cut=power_cut) for n, power_cut in chosen)
    assert crashes > 20


# --- failures


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_failed_quarantine_write_stops_only_its_sink(error: int) -> None:
    async def main() -> None:
        disk, store, bad = SimDisk(1), Store(keeps_cursor=True), {7.0}
        other = Store(keeps_cursor=False)
        async with service(disk, 1) as p:
            await p.attach(RejectingSink(store, bad))
            await p.attach(RejectingSink(other, set()), name="other")
            await p.publish(make_delta("a"))
            disk.fail(lambda call: call.path.startswith(JOURNAL), error, times=None)
            await p.publish(make_delta("b", 7), make_addition("a", 10))
            await p.wait_visible(3, sinks=["other"])
            await anyio.sleep(3)
            feed = p.statistics().sinks["totals"]
            assert feed.state == "retrying"
            assert feed.reason is not None
            assert "its quarantine cannot be written" in feed.reason
            assert (feed.applied_offset, store.next_offset) == (
                1,
                1,
            )  # the cursor stays before the rejected delta
            disk.heal()
            await p.internals().sinks.feed("totals").wait(3)
            assert quarantined_rows(p) == [(1, 1, "7 is bad")]
            assert store.applied_offsets == [0, 2]
        async with service(disk.crash(1), 2) as p:
            await p.attach(RejectingSink(store, bad))
            assert quarantined_rows(p) == [(1, 1, "7 is bad")]

    run_virtual(main)


def test_flipped_bit_is_found_or_truncates_the_last_change() -> None:
    async def main() -> None:
        disk, store = SimDisk(1), Store(keeps_cursor=True)
        await fill_quarantine(disk, store, {7.0})
        intact = disk.peek(JOURNAL)
        last_record = intact.rindex(b"dp-quar\n")
        detected = truncated = 0
        for position in range(0, len(intact), 7):
            disk = disk.kill()
            disk.flip(JOURNAL, position, position % 8)
            async with service(disk, 2) as p:
                if position < last_record:
                    with pytest.raises(QuarantineCorrupted, match="sinks forget") as corruption:
                        await p.attach(RejectingSink(store, {7.0}))
                    assert corruption.value.path == JOURNAL
                    assert corruption.value.position <= position
                    detected += 1
                else:
                    await p.attach(RejectingSink(store, {7.0}))
                    assert quarantined_rows(p) == EXPECTED[:3]
                    truncated += 1
            disk.put(JOURNAL, intact)
        assert detected > 50
        assert truncated > 5

    run_virtual(main)


def test_corrupted_single_group_is_not_compared_with_a_later_one() -> None:
    async def main() -> None:
        disk, store = SimDisk(1), Store(keeps_cursor=True)
        await fill_quarantine(disk, store, {7.0})
        content = disk.peek(JOURNAL)
        disk = disk.kill()
        disk.put(JOURNAL, content[: content.index(b"dp-quar\n", 1)])
        disk.flip(JOURNAL, 30, 0)
        async with service(disk, 2) as p:
            with pytest.raises(QuarantineCorrupted, match="at byte 0: its first group is not valid"):
                await p.attach(RejectingSink(store, {7.0}))

    run_virtual(main)


def test_file_of_mostly_old_records_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        QuarantineWriter, "__init__", partialmethod(QuarantineWriter.__init__, spare_bytes=4096)
    )

    async def main() -> None:
        disk, store, bad = SimDisk(1), Store(keeps_cursor=True), {7.0}
        sizes = []
        async with service(disk, 1) as p:
            await p.attach(RejectingSink(store, bad))
            for number in range(60):
                await p.publish(make_delta(f"v{number}", 7))
                await anyio.sleep(0.2)
                bad.clear()
                assert (await p.replay("totals")).applied == 1
                bad.add(7.0)
                sizes.append(len(disk.peek(JOURNAL)))
        assert max(sizes) < 6000
        assert min(sizes[10:]) < 1000  # the file was rewritten

    run_virtual(main)


def test_quarantine_of_a_lost_tail_withholds_no_new_row() -> None:
    async def main() -> None:
        logged = LogSettings(read_level=AckLevel.LOGGED)
        disk, store, bad = SimDisk(1), Store(keeps_cursor=False), {7.0}
        async with service(disk, 1, logged) as p:
            await p.attach(RejectingSink(store, bad))
            await p.publish(make_delta("a"), ack_level=AckLevel.DURABLE)
        async with service(disk, 2, logged) as p:
            await p.attach(RejectingSink(store, bad))
            await p.publish(make_delta("b", 7), make_delta("c", 7), ack_level=AckLevel.LOGGED)
            await p.internals().sinks.feed("totals").wait(3)
            await p.drop("totals", 1)
            disks.append(disk.crash(2))

    async def reopen() -> None:
        store, bad = Store(keeps_cursor=False), {7.0}
        async with service(disks[0], 3) as p:
            assert p.statistics().log.next_offset == 1
            await p.publish(make_delta("d"), make_delta("e"))
            await p.attach(RejectingSink(store, bad))
            await p.wait_visible(3)
            assert store.sums == {"d": 1, "e": 1}
            assert quarantined_rows(p) == []

    disks: list[SimDisk] = []
    with suppress(SimCrash):
        run_virtual(main)
    run_virtual(reopen)


def test_shorter_log_truncates_the_quarantine() -> None:
    quarantine = Quarantine(10, 1 << 20)
    log = MemoryLog(bytes(16))
    batch = encode_batch([make_delta("a"), make_delta("b"), make_delta("c")], origin=16, base=1)
    logged = log.append(batch, lamport=1, source=Source.LOCAL)
    for row in range(3):
        quarantine.reject(logged, row, "no", 0)
    quarantine.drop(2)
    quarantine.touched = set()
    quarantine.truncate(1)
    assert [record.offset for record in quarantine.records()] == [0]
    assert [quarantine.is_withheld(offset) for offset in range(3)] == [True, False, False]
    assert quarantine.touched == {1, 2}


def test_forgotten_sink_loses_its_quarantine() -> None:
    async def main() -> None:
        disk, store, bad = SimDisk(1), Store(keeps_cursor=False), {7.0}
        await fill_quarantine(disk, store, bad)
        async with service(disk, 2) as p:
            await p.attach(RejectingSink(store, bad))
            await p.detach("totals")
            assert JOURNAL in disk.paths()
            p.forget("totals")
            await anyio.sleep(3)
            assert JOURNAL not in disk.paths()
            bad.clear()
            await p.attach(RejectingSink(store, bad))
            await p.wait_visible(8)
            assert quarantined_rows(p) == []

    run_virtual(main)


def test_sink_forgotten_just_before_close_loses_its_quarantine() -> None:
    async def main() -> None:
        disk, store = SimDisk(1), Store(keeps_cursor=False)
        await fill_quarantine(disk, store, {7.0})
        async with service(disk, 2) as p:
            await p.attach(RejectingSink(store, {7.0}))
            await p.detach("totals")
            assert JOURNAL in disk.paths()
            p.forget("totals")
        assert JOURNAL not in disk.paths()
        async with service(disk, 3) as p:
            await p.attach(RejectingSink(store, set()), start="latest")
            await anyio.sleep(1)
            assert quarantined_rows(p) == []

    run_virtual(main)


def test_sink_attached_during_removal_keeps_its_new_quarantine() -> None:
    async def main() -> None:
        disk, store, bad = SimDisk(1), Store(keeps_cursor=False), {7.0}
        await fill_quarantine(disk, store, bad)
        async with service(disk, 2) as p:
            await p.attach(RejectingSink(store, bad))
            await p.attach(RejectingSink(Store(keeps_cursor=False), set()), name="aaa")
            await p.detach("totals")
            await p.detach("aaa")
            p.forget("totals")
            p.forget("aaa")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(p.internals().sinks.quarantines.tidy)
                await anyio.lowlevel.checkpoint()
                await p.attach(RejectingSink(store, bad))
                await anyio.sleep(1)
            assert quarantined_rows(p) == EXPECTED
            assert JOURNAL in disk.paths()

    run_virtual(main)
