"""Streams of a data directory: changed durably; their partitions are independent logs."""

from __future__ import annotations

import errno
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop import Propagator
from delta_prop.hosting.streams import Streams
from delta_prop.partition.partition import Partition
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_broker.corruption import LogBusy
from delta_prop_broker.segments.paths import DIRECTORY, STREAMS
from delta_prop_simulations.disk import CHANGING, SimCrash, SimDisk
from delta_prop_sinks import CacheSink, CallbackSink
from delta_prop_wire.delta import Delta, create, origin_partition
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.stamp import LogName
from tests.delta_prop.hosting.hosts import NO_RESERVE, hosting, keys_in, publish
from tests.full_log import read_all

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from delta_prop_broker.catalogue.store import PartitionPlace


def test_partitions_are_independent_logs() -> None:
    disk = SimDisk(1)

    async def main() -> None:
        async with hosting(disk) as streams:
            stream = await streams.create("orders", 3)
            assert (stream.name, stream.stream_id, stream.partitions) == ("orders", 1, 3)
            for number in range(3):
                p = await streams.open("orders", number)
                await publish(p, *(f"{number}/{row}" for row in range(number + 1)))
                origins = {one.batch.origin for one in read_all(p.internals().partition.log)}
                assert {origin_partition(origin) for origin in origins} == {number}
            await publish(await streams.open(), "own")
        async with hosting(disk, 2) as streams:
            assert [*streams.catalogue.streams] == ["default", "orders"]
            assert [*streams.open_partitions()] == [(0, 0)]
            for number in (2, 0, 1):
                p = await streams.open("orders", number)
                assert keys_in(p) == [f"{number}/{row}" for row in range(number + 1)]
            assert keys_in(await streams.open()) == ["own"]
            assert [(*name,) for name in streams.open_partitions()] == [(0, 0), (1, 0), (1, 1), (1, 2)]

    run_virtual(main)


def test_directory_of_a_propagator_opens_as_the_default_stream_and_back() -> None:
    disk = SimDisk(1)

    async def main() -> None:
        async def run_propagator(seed: int, *keys: str) -> list[str]:
            world = virtual_world(seed, disk=disk)
            async with Propagator(data="data", log=NO_RESERVE, world=world) as p:
                await publish(p, *keys)
                return keys_in(p)

        await run_propagator(1, "a")
        async with hosting(disk, 2) as streams:
            await publish(await streams.open(), "b")
            await streams.create("orders")
            await publish(await streams.open("orders"), "c")
        assert await run_propagator(3, "d") == ["a", "b", "d"]
        async with hosting(disk, 4) as streams:
            assert keys_in(await streams.open("orders")) == ["c"]

    run_virtual(main)
    assert any(path.startswith(f"{DIRECTORY}/") for path in disk.paths())


def test_concurrent_openings_share_one_partition() -> None:
    async def main() -> None:
        async with hosting(SimDisk(1)) as streams:
            await streams.create("orders", 2)
            opened: list[Propagator] = []

            async def open_one() -> None:
                opened.append(await streams.open("orders", 1))

            async with anyio.create_task_group() as tasks:
                for _ in range(5):
                    tasks.start_soon(open_one)
            assert len(opened) == 5
            assert len({id(p) for p in opened}) == 1

    run_virtual(main)


def test_partition_that_does_not_open_raises_and_opens_later() -> None:
    disk = SimDisk(1)

    async def main() -> None:
        async with hosting(disk) as streams:
            await streams.create("orders", 2)
            disk.fail(lambda call: call.path.startswith(f"{STREAMS}/orders-1/1"), errno.EIO)
            with pytest.raises(OSError, match="Input/output"):
                await streams.open("orders", 1)
            await publish(await streams.open("orders", 0), "others go on")
            disk.heal()
            await publish(await streams.open("orders", 1), "later")

    run_virtual(main)


def test_sinks_and_cursors_belong_to_a_partition() -> None:
    disk = SimDisk(1)
    seen: Counter[tuple[int, str]] = Counter()

    async def attach(streams: Streams) -> None:
        for number in range(2):
            p = await streams.open("orders", number)

            def note(offset: int, delta: Delta, number: int = number) -> None:
                seen[number, delta.vector_id] += 1

            await p.attach(CallbackSink(note, name="audit"))

    async def main() -> None:
        async with hosting(disk) as streams:
            await streams.create("orders", 2)
            await attach(streams)
            for number in range(2):
                await publish(await streams.open("orders", number), f"a{number}")
            await anyio.sleep(5)
        async with hosting(disk, 2) as streams:
            await attach(streams)
            await publish(await streams.open("orders", 1), "b1")
            await anyio.sleep(5)

    run_virtual(main)
    assert seen == {(0, "a0"): 1, (1, "a1"): 1, (1, "b1"): 1}


def test_unknown_names_are_refused_and_change_nothing() -> None:
    disk = SimDisk(1)

    async def main() -> None:
        async with hosting(disk) as streams:
            await streams.create("orders", 2)
            before = disk.paths()
            for call, code in (
                (streams.open("rows"), ErrorCode.UNKNOWN_STREAM),
                (streams.open("orders", 2), ErrorCode.WRONG_PARTITION),
                (streams.open("orders", -1), ErrorCode.WRONG_PARTITION),
                (streams.alter("rows", {"compact": False}), ErrorCode.UNKNOWN_STREAM),
                (streams.delete("rows"), ErrorCode.UNKNOWN_STREAM),
            ):
                with pytest.raises(Refused) as refused:
                    await call
                assert refused.value.code is code
            for change in (
                streams.create("orders", 2),
                streams.create("orders", 3, if_not_exists=True),
                streams.create("a/b"),
                streams.create("_own"),
                streams.create("rows", 0),
                streams.create("rows", settings={"retention_s": -1.0}),
                streams.alter("orders", {"partitions": 3}),
                streams.delete("default"),
            ):
                with pytest.raises(UsageError):
                    await change
            assert (await streams.create("orders", 2, if_not_exists=True)).stream_id == 1
            assert (await streams.create("rows", 9, dry_run=True)).partitions == 9
            assert (await streams.alter("orders", {"compact": False}, dry_run=True)).settings.compact is False
            await streams.delete("orders", dry_run=True)
            assert disk.paths() == before

    run_virtual(main)


def test_directory_is_locked_while_it_is_open() -> None:
    disk = SimDisk(1)

    async def main() -> None:
        async with hosting(disk):
            with pytest.raises(LogBusy):
                async with hosting(disk, 2):
                    pass
        async with hosting(disk, 3):
            pass

    run_virtual(main)


def test_altered_retention_is_in_force_at_once_and_after_a_restart() -> None:
    disk = SimDisk(1)

    async def main() -> None:
        async with hosting(disk) as streams:
            await streams.create("orders", 1)
            p = await streams.open("orders")
            await streams.alter("orders", {"retention_s": 60.0})
            assert settings_of(p).retention_s == 60.0
            assert p is await streams.open("orders")
        async with hosting(disk, 2) as streams:
            p = await streams.open("orders")
            assert settings_of(p).retention_s == 60.0
            await streams.alter("orders", {"retention_s": None})
            assert settings_of(p).retention_s == NO_RESERVE.retention_s

    def settings_of(p: Propagator):  # type: ignore[no-untyped-def]
        storage = p.internals().partition.storage
        assert storage is not None
        return storage.log.settings

    run_virtual(main)


def test_altered_compression_reopens_the_partitions_with_their_rows() -> None:
    async def main() -> None:
        async with hosting(SimDisk(1)) as streams:
            await streams.create("orders", 2)
            old = await streams.open("orders", 1)
            await publish(old, "a")
            await streams.alter("orders", {"compress": "lz4"})
            with pytest.raises((Refused, UsageError)):
                await publish(old, "b")
            p = await streams.open("orders", 1)
            assert p is not old
            await publish(p, "c")
            assert keys_in(p) == ["a", "c"]

    run_virtual(main)


def test_partition_is_never_open_twice_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    is_open: Counter[str] = Counter()
    original = Partition.open_in.__func__  # type: ignore[attr-defined]
    close = Partition.close

    async def open_in(cls: type[Partition], data: object, place: PartitionPlace, *more: object) -> Partition:
        is_open[place.log_path] += 1
        assert is_open[place.log_path] == 1
        partition: Partition = await original(cls, data, place, *more)
        return partition

    async def close_and_count(self: Partition) -> None:
        await close(self)
        is_open[f"{STREAMS}/orders-1/{self.name.partition}" if self.name.stream else DIRECTORY] -= 1

    monkeypatch.setattr(Partition, "open_in", classmethod(open_in))
    monkeypatch.setattr(Partition, "close", close_and_count)

    async def main() -> None:
        world = virtual_world(1, thread_delay_s_max=0.05, disk=SimDisk(1))
        async with Streams(data="data", log=NO_RESERVE, world=world) as streams:
            stream = await streams.create("orders", 2)

            async def use(number: int) -> None:
                for _ in range(20):
                    with suppress(Refused, UsageError):
                        await publish(await streams.open_partition(stream, number % 2), "row")
                    await anyio.sleep(0.01)
                    if number == 5:
                        await streams.release(LogName(1, 1))

            async def alter() -> None:
                for number in range(10):
                    await streams.alter("orders", {"compress": ("lz4", "none")[number % 2]})
                    await anyio.sleep(0.02)

            async with anyio.create_task_group() as tasks:
                for number in range(6):
                    tasks.start_soon(use, number)
                tasks.start_soon(alter)
        assert not +is_open

    run_virtual(main)


def test_deleted_stream_leaves_no_file_and_its_name_starts_anew() -> None:
    disk = SimDisk(1)

    async def main() -> None:
        async with hosting(disk) as streams:
            await streams.create("orders", 2)
            for number in range(2):
                p = await streams.open("orders", number)
                await p.attach(CallbackSink(lambda offset, delta: None, name="audit"))
                await publish(p, "secret-name")
            await anyio.sleep(3)
            assert any(b"secret-name" in disk.peek(path) for path in disk.paths())
            await streams.delete("orders")
            with pytest.raises(Refused):
                await streams.open("orders")
            assert not any(b"secret-name" in disk.peek(path) for path in disk.paths())
            assert [path for path in disk.paths() if "orders" in path] == []
            second = await streams.create("orders", 1)
            assert second.stream_id == 2
            assert keys_in(await streams.open("orders")) == []

    run_virtual(main)


SEGMENTED = replace(NO_RESERVE, segment_bytes_max=2_000, compact=False)


async def fill(streams: Streams, count: int = 60) -> Propagator:
    await streams.create("orders", 2)
    p = await streams.open("orders", 1)
    for number in range(count):
        await publish(p, f"v{number % 10}")
    return p


@pytest.mark.parametrize("before", [0, 17, 40, 60])
def test_truncation_removes_segments_below_the_offset(before: int) -> None:
    disk = SimDisk(1)

    async def main() -> None:
        async with hosting(disk, log=SEGMENTED) as streams:
            p = await fill(streams)
            await streams.truncate("orders", before, 1, dry_run=True)
            await anyio.sleep(5)
            assert start_of(p) == 0
            await streams.truncate("orders", before, 1)
            await anyio.sleep(5)
            assert before - 20 < start_of(p) <= before
            assert start_of(p) == before or before not in (0, 60)
            assert keys_in(p) == [f"v{number % 10}" for number in range(start_of(p), 60)]
            await publish(p, "next")
        async with hosting(disk, 2, log=SEGMENTED) as streams:
            p = await streams.open("orders", 1)
            assert keys_in(p)[-1] == "next"
            assert p.statistics().log.next_offset == 61

    run_virtual(main)


def test_truncation_waits_for_a_sink_that_needs_the_rows() -> None:
    async def main() -> None:
        async with hosting(SimDisk(1), log=SEGMENTED) as streams:
            p = await fill(streams)
            seen: list[int] = []
            await p.attach(
                CallbackSink(lambda offset, delta: seen.append(offset), name="slow"), start="earliest"
            )
            p.pause("slow")
            await streams.truncate("orders", 60, 1)
            await anyio.sleep(5)
            assert start_of(p) < 60
            p.resume("slow")
            await anyio.sleep(5)
            assert start_of(p) == 60
            assert seen == [*range(60)]

    run_virtual(main)


def test_truncated_compacted_stream_keeps_the_latest_states() -> None:
    async def main() -> None:
        async with hosting(SimDisk(1), log=replace(SEGMENTED, compact=True)) as streams:
            p = await fill(streams)
            await streams.truncate("orders", 60, 1)
            await anyio.sleep(5)
            assert start_of(p) == 60
            cache = await p.attach(CacheSink(name="cache"), start="earliest", rebuild=True)
            await p.wait_visible(60, sinks=["cache"], timeout_s=10)
            for number in range(10):
                state = await cache.get("default", f"v{number}")
                assert state is not None
                assert state.data == f"v{number}".encode()

    run_virtual(main)


def test_truncation_beyond_the_end_is_refused() -> None:
    async def main() -> None:
        async with hosting(SimDisk(1), log=SEGMENTED) as streams:
            await fill(streams, 3)
            for offset in (-1, 4):
                with pytest.raises(UsageError, match="give 0 to 3"):
                    await streams.truncate("orders", offset, 1)
            with pytest.raises(Refused):
                await streams.truncate("orders", 0, 2)

    run_virtual(main)


def start_of(p: Propagator) -> int:
    return p.statistics().log.start_offset


class Changes:
    """Creates, fills, alters and deletes streams; `done` and `begun` tell what must and what may be there."""

    def __init__(self) -> None:
        self.done: set[str] = set()
        self.begun: set[str] = set()

    async def make(self, what: str, change: Awaitable[object]) -> None:
        self.begun.add(what)
        await change
        self.done.add(what)

    async def run(self, disk: SimDisk) -> None:
        async with hosting(disk) as streams:
            await self.make("own", publish(await streams.open(), "own"))
            await self.make("1", streams.create("orders", 2))
            await self.make("row", publish(await streams.open("orders", 1), "row"))
            await streams.alter("orders", {"retention_s": 60.0})
            await streams.alter("orders", {"compact": False})
            await self.make("row-2", publish(await streams.open("orders", 1), "row-2"))
            await self.make("2", streams.create("rows", 1))
            await self.make("x", publish(await streams.open("rows"), "x"))
            await self.make("1 deleted", streams.delete("orders"))
            await self.make("3", streams.create("orders", 1))
            await self.make("new", publish(await streams.open("orders"), "new"))

    async def check(self, disk: SimDisk) -> None:
        """Check that each stream is there as before or after the change, with what was acknowledged."""
        async with hosting(disk, 9) as streams:
            found = {str(one.stream_id): one for one in streams.catalogue.streams.values()}
            must, may = {one for one in self.done if one.isdigit()}, self.begun
            if "1 deleted" in self.begun:
                must -= {"1"}
            assert must <= found.keys() - {"0"} <= (may - {"1"} if "1 deleted" in self.done else may)
            for stream_id, number, keys in (
                ("0", 0, ["own"]),
                ("1", 0, []),
                ("1", 1, ["row", "row-2"]),
                ("2", 0, ["x"]),
                ("3", 0, ["new"]),
            ):
                if stream_id not in found:
                    continue
                p = await streams.open(found[stream_id].name, number)
                logged = keys_in(p)
                assert logged == keys[: len(logged)], "rows are missing in between"
                assert self.done & {*keys} <= {*logged} <= self.begun
                await p.publish(Delta("after", create([1.0])))
            left = {path.split("/")[1] for path in disk.paths() if path.startswith(f"{STREAMS}/")}
            known = {f"{one.name}-{one.stream_id}" for one in found.values()}
            assert {one for one in left if one.partition("-")[0] in ("orders", "rows")} <= known


@pytest.mark.parametrize("is_power_cut", [False, True])
def test_crash_at_every_disk_call_of_a_change_leaves_old_or_new(is_power_cut: bool, full: bool) -> None:
    reference = SimDisk()
    run_virtual(Changes().run, reference)
    numbers = [
        call.number for call in reference.trace if call.name in CHANGING and "reserve" not in call.path
    ]
    assert len(numbers) > 150
    for number in numbers if full else numbers[:: 11 if is_power_cut else 13]:
        disk, changes = SimDisk(number), Changes()
        disk.crash_at(number, "after" if number % 2 else "before")
        with pytest.raises((SimCrash, BaseExceptionGroup)):
            run_virtual(changes.run, disk)
        run_virtual(changes.check, disk.crash() if is_power_cut else disk.kill())
