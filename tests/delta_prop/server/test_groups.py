"""Groups of subscribers: one member each, a place that lags at most, files shared with the command."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop.group_cursor import (
    GroupBusy,
    GroupCursor,
    read_group,
    read_groups,
    read_position,
    reset_group,
)
from delta_prop.server import groups as module
from delta_prop.server.groups import GroupAssignment, Groups, GroupStatistics
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_broker.log.memory import MemoryLog
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode
from tests.broker.durable import LOG_ID, SMALL, Writer, commit, open_log

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from delta_prop_broker.log.contract import Log


@dataclass(eq=False)
class Reader:
    """A member that notes what it is told."""

    fenced: list[Refused] = field(default_factory=list)
    took_over: list[GroupAssignment] = field(default_factory=list)

    def fence(self, refused: Refused) -> None:
        self.fenced.append(refused)

    def take_over(self, joined: GroupAssignment) -> None:
        self.took_over.append(joined)


def join(
    groups: Groups, name: str, member: Reader, begin: int = 0, identity: bytes | None = None
) -> GroupAssignment:
    return groups.join(name, member, lambda: begin, member_id=identity)


def place(groups: Groups, name: str, member: Reader, begin: int = 0) -> int:
    joined = join(groups, name, member, begin)
    assert not joined.is_standby
    return joined.offset


def log_of(disk: SimDisk, rows: int = 100) -> Log:
    writer = Writer(open_log(disk, SMALL)[0])
    for _ in range(rows // 2):
        writer.append()
    commit(writer.log)
    return writer.log


@asynccontextmanager
async def running(disk: SimDisk | None, log: Log) -> AsyncIterator[Groups]:
    groups = Groups(disk, log, virtual_world(disk=disk, thread_delay_s_max=0.01))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(groups.run)
        yield groups
        tasks.cancel_scope.cancel()


def refused(call: Callable[[], object]) -> Refused:
    with pytest.raises(Refused) as caught:
        call()
    return caught.value


def test_a_place_is_written_down_and_found_again() -> None:
    async def main() -> None:
        disk, reader = SimDisk(), Reader()
        log = log_of(disk)
        async with running(disk, log) as groups:
            assert place(groups, "g", reader) == 0
            groups.commit("g", 10, reader)
            assert read_groups(disk, LOG_ID) == {}
            await anyio.sleep(0.1)
            assert read_group(disk, "g", LOG_ID) == 10
            for offset in (11, 12, 13):
                groups.commit("g", offset, reader)
                await anyio.sleep(0.1)
            assert read_group(disk, "g", LOG_ID) == 10, "once a second is enough"
            await anyio.sleep(1)
            assert read_group(disk, "g", LOG_ID) == 13
            groups.commit("g", 20, reader)
        assert read_group(disk, "g", LOG_ID) == 20, "the last is kept at the end"
        async with running(disk, log) as groups:
            assert place(groups, "g", Reader()) == 20
        assert read_group(disk.crash(1), "g", LOG_ID) == 20

    run_virtual(main)


def test_second_member_stands_by_and_takes_over_where_the_first_stopped() -> None:
    async def main() -> None:
        disk, first, second, third = SimDisk(), Reader(), Reader(), Reader()
        async with running(disk, log_of(disk)) as groups:
            assert place(groups, "g", first) == 0
            groups.commit("g", 30, first)
            assert join(groups, "g", second) == GroupAssignment(30, 0, is_standby=True)
            assert join(groups, "g", third) == GroupAssignment(30, 0, is_standby=True)
            assert groups.statistics() == {"g": GroupStatistics(30, True, 2)}
            groups.commit("g", 99, second)  # it is not heard
            groups.commit("g", 31, first)
            assert [first.fenced, second.fenced, second.took_over] == [[], [], []]
            groups.leave("g", first)
            groups.leave("g", first)
            assert second.took_over == [GroupAssignment(31, 0)]
            assert groups.statistics() == {"g": GroupStatistics(31, True, 1)}
            groups.leave("g", third)
            groups.leave("g", second)
            assert not third.took_over, "it stands by no more"
            assert place(groups, "g", first) == 31

    run_virtual(main)


def test_client_that_connects_again_takes_its_own_place_at_once() -> None:
    async def main() -> None:
        disk, old, other, new = SimDisk(), Reader(), Reader(), Reader()
        async with running(disk, log_of(disk)) as groups:
            join(groups, "g", old, identity=b"a")
            groups.commit("g", 30, old)
            assert join(groups, "g", other, identity=b"b").is_standby
            assert join(groups, "g", new, identity=b"a") == GroupAssignment(30, 0)
            assert [one.code for one in old.fenced] == [ErrorCode.FENCED]
            groups.commit("g", 99, old)
            groups.leave("g", old)
            assert groups.statistics() == {"g": GroupStatistics(30, True, 1)}
            again = Reader()
            assert join(groups, "g", again, identity=b"b").is_standby
            assert [one.code for one in other.fenced] == [ErrorCode.FENCED]
            groups.leave("g", other)
            groups.leave("g", new)
            assert again.took_over == [GroupAssignment(30, 0)]

    run_virtual(main)


def test_start_counts_for_a_new_group_alone_and_is_written_down() -> None:
    async def main() -> None:
        disk = SimDisk()
        log = log_of(disk)
        async with running(disk, log) as groups:
            assert place(groups, "g", Reader(), begin=40) == 40
        assert read_group(disk, "g", LOG_ID) == 40, "though nothing was committed"
        async with running(disk, log) as groups:
            assert place(groups, "g", Reader(), begin=7) == 40

    run_virtual(main)


def test_reset_moves_a_group_and_its_members_connect_again() -> None:
    async def main() -> None:
        disk, first, second = SimDisk(), Reader(), Reader()
        log = log_of(disk)
        async with running(disk, log) as groups:
            assert not await groups.reset("g", 3), "this process does not have it"
            join(groups, "g", first)
            groups.commit("g", 30, first)
            join(groups, "g", second)
            assert await groups.reset("g", 3)
            assert first.fenced[0].retryable
            assert read_position(disk, "g", LOG_ID) == (3, 1)
            groups.leave("g", first)
            assert second.took_over == [GroupAssignment(3, 1)]
        reset_group(disk, "g", LOG_ID, 5)
        async with running(disk, log) as groups:
            assert join(groups, "g", first) == GroupAssignment(5, 2)

    run_virtual(main)


def test_member_stands_by_for_a_group_that_another_process_reads() -> None:
    async def main() -> None:
        disk, reader, gone = SimDisk(), Reader(), Reader()
        log = log_of(disk)
        command = GroupCursor(disk, "g", LOG_ID)
        command.next_offset = 10
        command.store()
        async with running(disk, log) as groups:
            assert join(groups, "g", gone) == GroupAssignment(10, 0, is_standby=True)
            assert join(groups, "g", reader) == GroupAssignment(10, 0, is_standby=True)
            groups.leave("g", gone)
            await anyio.sleep(5)
            assert not reader.took_over
            assert groups.statistics() == {"g": GroupStatistics(10, False, 1)}
            command.next_offset = 12
            command.close()
            await anyio.sleep(2)
            assert reader.took_over == [GroupAssignment(12, 0)]
            with pytest.raises(GroupBusy):
                GroupCursor(disk, "g", LOG_ID)
            groups.leave("g", reader)
            command = GroupCursor(disk, "h", LOG_ID)
            assert join(groups, "h", reader, begin=4) == GroupAssignment(4, 0, is_standby=True)
            groups.leave("h", reader)
            await anyio.sleep(5)
            assert groups.statistics() == {}
            command.close()

    run_virtual(main)


def test_who_leaves_lets_other_processes_have_the_group() -> None:
    async def main() -> None:
        disk, reader = SimDisk(), Reader()
        log = log_of(disk)
        async with running(disk, log) as groups:
            place(groups, "g", reader)
            groups.commit("g", 5, reader)
            await anyio.sleep(2)
            with pytest.raises(UsageError, match="read by another process"):
                GroupCursor(disk, "g", LOG_ID)
            groups.leave("g", reader)
            await anyio.sleep(2)
            assert groups.statistics() == {}
            command = GroupCursor(disk, "g", LOG_ID)
            assert command.next_offset == 5
            command.next_offset = 50
            command.close()
            assert place(groups, "g", reader) == 50

    run_virtual(main)


def test_a_member_that_comes_while_the_last_ones_place_is_written_gets_it() -> None:
    async def main() -> None:
        disk, first, second = SimDisk(), Reader(), Reader()
        async with running(disk, log_of(disk)) as groups:
            for offset in range(20):
                assert place(groups, "g", first) == offset
                groups.commit("g", offset + 1, first)
                await anyio.sleep(0.999 + 0.001 * offset)
                groups.leave("g", first)
                await anyio.sleep(0.003)
                first, second = second, first
            await anyio.sleep(3)
            assert groups.statistics() == {}
        assert read_group(disk, "g", LOG_ID) == 20

    run_virtual(main)


def test_what_is_not_synced_is_not_written_down() -> None:
    async def main() -> None:
        disk, reader = SimDisk(), Reader()
        writer = Writer(open_log(disk, SMALL)[0])
        writer.append(8)
        commit(writer.log)
        writer.append(8, level=AckLevel.LOGGED)
        async with running(disk, writer.log) as groups:
            place(groups, "g", reader)
            groups.commit("g", 12, reader)
            await anyio.sleep(2)
            assert read_group(disk, "g", LOG_ID) == 8
            groups.leave("g", reader)
            await anyio.sleep(2)
            assert place(groups, "g", reader) == 12, "known here, though not safe yet"
            groups.leave("g", reader)
            commit(writer.log, sync=True)
            await anyio.sleep(2)
            assert read_group(disk, "g", LOG_ID) == 12
            assert groups.statistics() == {}

    run_virtual(main)


def test_a_disk_that_fails_is_tried_again() -> None:
    async def main() -> None:
        disk, reader = SimDisk(), Reader()
        async with running(disk, log_of(disk)) as groups:
            place(groups, "g", reader)
            disk.fail(lambda call: call.name == "rename", times=2)
            groups.commit("g", 7, reader)
            await anyio.sleep(0.5)
            assert read_group(disk, "g", LOG_ID) in (None, 0)
            await anyio.sleep(3)
            assert read_group(disk, "g", LOG_ID) == 7

    run_virtual(main)


def test_beside_a_log_in_memory_places_live_as_long_as_the_server() -> None:
    async def main() -> None:
        reader = Reader()
        log = MemoryLog(LOG_ID)
        async with running(None, log) as groups:
            assert place(groups, "g", reader) == 0
            groups.commit("g", 0, reader)
            groups.leave("g", reader)
            await anyio.sleep(2)
            assert place(groups, "g", reader) == 0

    run_virtual(main)


def test_a_log_that_lost_its_end_takes_the_place_back() -> None:
    async def main() -> None:
        reader = Reader()
        log = MemoryLog(LOG_ID)
        async with running(None, log) as groups:
            place(groups, "g", reader)
            groups.commit("g", 5, reader)
            groups.leave("g", reader)
            assert place(groups, "g", reader) == log.next_offset == 0

    run_virtual(main)


@pytest.mark.parametrize("disk", [None, SimDisk()], ids=["in memory", "on disk"])
def test_bounds_of_names_and_of_their_number(disk: SimDisk | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GROUPS_MAX", 2)

    async def main() -> None:
        log = MemoryLog(LOG_ID) if disk is None else log_of(disk)
        async with running(disk, log) as groups:
            assert "65 bytes" in refused(lambda: place(groups, "g" * 65, Reader())).message
            assert refused(lambda: place(groups, "", Reader())).code is ErrorCode.BAD_REQUEST
            join(groups, "a", Reader())
            join(groups, "b/../..", Reader())
            assert "there are 2 groups" in refused(lambda: place(groups, "c", Reader())).message
            join(groups, "a", Reader())
        async with running(disk, log) as groups:
            if disk is not None:
                assert "there are 2 groups" in refused(lambda: place(groups, "c", Reader())).message
            join(groups, "b/../..", Reader())

    run_virtual(main)


def test_a_damaged_place_is_told() -> None:
    async def main() -> None:
        disk, reader = SimDisk(), Reader()
        log = log_of(disk)
        disk.put("groups/g.cursor", b"00000000\n{}")
        async with running(disk, log) as groups:
            assert "corrupted" in refused(lambda: place(groups, "g", reader)).message
            assert groups.statistics() == {}

    run_virtual(main)


def test_a_group_is_told_at_its_true_place_from_the_moment_its_reader_leaves() -> None:
    async def main() -> None:
        disk, reader = SimDisk(), Reader()
        threads = virtual_world().new_threads()
        async with running(disk, log_of(disk)) as groups:
            await groups.poll_absent(threads)
            place(groups, "g", reader)
            await anyio.sleep(1.5)
            groups.commit("g", 5, reader)
            await anyio.sleep(0.3)
            groups.leave("g", reader)
            for _ in range(20):
                await groups.poll_absent(threads)
                assert groups.all_statistics()["g"].next_offset == 5
                await anyio.sleep(0.1)
            assert groups.statistics() == {}, "the file tells it by now"

    run_virtual(main)


def test_a_place_is_written_down_at_once_when_the_reader_leaves() -> None:
    async def main() -> None:
        disk, reader = SimDisk(), Reader()
        async with running(disk, log_of(disk)) as groups:
            place(groups, "g", reader)
            await anyio.sleep(0.1)
            groups.commit("g", 5, reader)
            groups.leave("g", reader)
            await anyio.sleep(0.1)
            assert read_group(disk, "g", LOG_ID) == 5

    run_virtual(main)


def test_a_reset_by_another_process_is_told_at_once() -> None:
    async def main() -> None:
        disk, reader = SimDisk(), Reader()
        threads = virtual_world().new_threads()
        async with running(disk, log_of(disk)) as groups:
            place(groups, "g", reader)
            groups.commit("g", 5, reader)
            groups.leave("g", reader)
            await anyio.sleep(2)
            await groups.poll_absent(threads)
            assert groups.all_statistics()["g"].next_offset == 5
            reset_group(disk, "g", LOG_ID, 0)
            await groups.poll_absent(threads)
            assert groups.all_statistics()["g"].next_offset == 0

    run_virtual(main)
