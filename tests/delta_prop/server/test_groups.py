"""Consumer groups: one active member each, committed offsets, and cursor files shared with the command."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop.delivery.group_cursor import (
    GroupBusy,
    GroupCursor,
    read_group,
    read_groups,
    read_position,
    reset_group,
)
from delta_prop.server import groups as server_groups
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
class FakeMember:
    """A member that records the calls that it gets."""

    fenced: list[Refused] = field(default_factory=list)
    took_over: list[GroupAssignment] = field(default_factory=list)

    def fence(self, refusal: Refused) -> None:
        self.fenced.append(refusal)

    def take_over(self, joined: GroupAssignment) -> None:
        self.took_over.append(joined)


def join(
    groups: Groups, name: str, member: FakeMember, start: int = 0, member_id: bytes | None = None
) -> GroupAssignment:
    return groups.join(name, member, lambda: start, member_id=member_id)


def join_active(groups: Groups, name: str, member: FakeMember, start: int = 0) -> int:
    joined = join(groups, name, member, start)
    assert not joined.is_standby
    return joined.offset


def log_with_rows(disk: SimDisk, row_count: int = 100) -> Log:
    writer = Writer(open_log(disk, SMALL)[0])
    for _ in range(row_count // 2):
        writer.append()
    commit(writer.log)
    return writer.log


@asynccontextmanager
async def run_groups(disk: SimDisk | None, log: Log) -> AsyncIterator[Groups]:
    groups = Groups(disk, log, virtual_world(disk=disk, thread_delay_s_max=0.01))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(groups.run)
        yield groups
        tasks.cancel_scope.cancel()


def refusal_of(call: Callable[[], object]) -> Refused:
    with pytest.raises(Refused) as caught:
        call()
    return caught.value


def test_committed_offset_is_stored_and_restored() -> None:
    async def main() -> None:
        disk, reader = SimDisk(), FakeMember()
        log = log_with_rows(disk)
        async with run_groups(disk, log) as groups:
            assert join_active(groups, "g", reader) == 0
            groups.commit("g", 10, reader)
            assert read_groups(disk, LOG_ID) == {}
            await anyio.sleep(0.1)
            assert read_group(disk, "g", LOG_ID) == 10
            for offset in (11, 12, 13):
                groups.commit("g", offset, reader)
                await anyio.sleep(0.1)
            assert read_group(disk, "g", LOG_ID) == 10, "offsets should be stored at most once per second"
            await anyio.sleep(1)
            assert read_group(disk, "g", LOG_ID) == 13
            groups.commit("g", 20, reader)
        assert read_group(disk, "g", LOG_ID) == 20, "the last offset should be stored at shutdown"
        async with run_groups(disk, log) as groups:
            assert join_active(groups, "g", FakeMember()) == 20
        assert read_group(disk.crash(1), "g", LOG_ID) == 20

    run_virtual(main)


def test_standby_takes_over_where_the_first_member_stopped() -> None:
    async def main() -> None:
        disk, first, second, third = SimDisk(), FakeMember(), FakeMember(), FakeMember()
        async with run_groups(disk, log_with_rows(disk)) as groups:
            assert join_active(groups, "g", first) == 0
            groups.commit("g", 30, first)
            assert join(groups, "g", second) == GroupAssignment(30, 0, is_standby=True)
            assert join(groups, "g", third) == GroupAssignment(30, 0, is_standby=True)
            assert groups.statistics() == {"g": GroupStatistics(30, True, 2)}
            groups.commit("g", 99, second)  # a standby's commit is ignored
            groups.commit("g", 31, first)
            assert [first.fenced, second.fenced, second.took_over] == [[], [], []]
            groups.leave("g", first)
            groups.leave("g", first)
            assert second.took_over == [GroupAssignment(31, 0)]
            assert groups.statistics() == {"g": GroupStatistics(31, True, 1)}
            groups.leave("g", third)
            groups.leave("g", second)
            assert not third.took_over, "a member that has left should not take over"
            assert join_active(groups, "g", first) == 31

    run_virtual(main)


def test_reconnecting_client_reclaims_its_membership_at_once() -> None:
    async def main() -> None:
        disk, old, other, new = SimDisk(), FakeMember(), FakeMember(), FakeMember()
        async with run_groups(disk, log_with_rows(disk)) as groups:
            join(groups, "g", old, member_id=b"a")
            groups.commit("g", 30, old)
            assert join(groups, "g", other, member_id=b"b").is_standby
            assert join(groups, "g", new, member_id=b"a") == GroupAssignment(30, 0)
            assert [refusal.code for refusal in old.fenced] == [ErrorCode.FENCED]
            groups.commit("g", 99, old)
            groups.leave("g", old)
            assert groups.statistics() == {"g": GroupStatistics(30, True, 1)}
            rejoined = FakeMember()
            assert join(groups, "g", rejoined, member_id=b"b").is_standby
            assert [refusal.code for refusal in other.fenced] == [ErrorCode.FENCED]
            groups.leave("g", other)
            groups.leave("g", new)
            assert rejoined.took_over == [GroupAssignment(30, 0)]

    run_virtual(main)


def test_start_applies_to_new_groups_only_and_is_stored() -> None:
    async def main() -> None:
        disk = SimDisk()
        log = log_with_rows(disk)
        async with run_groups(disk, log) as groups:
            assert join_active(groups, "g", FakeMember(), start=40) == 40
        assert read_group(disk, "g", LOG_ID) == 40, (
            "the start should be stored although nothing was committed"
        )
        async with run_groups(disk, log) as groups:
            assert join_active(groups, "g", FakeMember(), start=7) == 40

    run_virtual(main)


def test_reset_moves_the_cursor_and_fences_members() -> None:
    async def main() -> None:
        disk, first, second = SimDisk(), FakeMember(), FakeMember()
        log = log_with_rows(disk)
        async with run_groups(disk, log) as groups:
            assert not await groups.reset("g", 3), "this process should not hold the group"
            join(groups, "g", first)
            groups.commit("g", 30, first)
            join(groups, "g", second)
            assert await groups.reset("g", 3)
            assert first.fenced[0].retryable
            assert read_position(disk, "g", LOG_ID) == (3, 1)
            groups.leave("g", first)
            assert second.took_over == [GroupAssignment(3, 1)]
        reset_group(disk, "g", LOG_ID, 5)
        async with run_groups(disk, log) as groups:
            assert join(groups, "g", first) == GroupAssignment(5, 2)

    run_virtual(main)


def test_member_stands_by_while_another_process_reads() -> None:
    async def main() -> None:
        disk, reader, leaver = SimDisk(), FakeMember(), FakeMember()
        log = log_with_rows(disk)
        other_process = GroupCursor(disk, "g", LOG_ID)
        other_process.next_offset = 10
        other_process.store()
        async with run_groups(disk, log) as groups:
            assert join(groups, "g", leaver) == GroupAssignment(10, 0, is_standby=True)
            assert join(groups, "g", reader) == GroupAssignment(10, 0, is_standby=True)
            groups.leave("g", leaver)
            await anyio.sleep(5)
            assert not reader.took_over
            assert groups.statistics() == {"g": GroupStatistics(10, False, 1)}
            other_process.next_offset = 12
            other_process.close()
            await anyio.sleep(2)
            assert reader.took_over == [GroupAssignment(12, 0)]
            with pytest.raises(GroupBusy):
                GroupCursor(disk, "g", LOG_ID)
            groups.leave("g", reader)
            other_process = GroupCursor(disk, "h", LOG_ID)
            assert join(groups, "h", reader, start=4) == GroupAssignment(4, 0, is_standby=True)
            groups.leave("h", reader)
            await anyio.sleep(5)
            assert groups.statistics() == {}
            other_process.close()

    run_virtual(main)


def test_group_without_members_is_released_to_other_processes() -> None:
    async def main() -> None:
        disk, reader = SimDisk(), FakeMember()
        log = log_with_rows(disk)
        async with run_groups(disk, log) as groups:
            join_active(groups, "g", reader)
            groups.commit("g", 5, reader)
            await anyio.sleep(2)
            with pytest.raises(UsageError, match="read by another process"):
                GroupCursor(disk, "g", LOG_ID)
            groups.leave("g", reader)
            await anyio.sleep(2)
            assert groups.statistics() == {}
            other_process = GroupCursor(disk, "g", LOG_ID)
            assert other_process.next_offset == 5
            other_process.next_offset = 50
            other_process.close()
            assert join_active(groups, "g", reader) == 50

    run_virtual(main)


def test_member_joining_during_the_final_store_gets_the_cursor() -> None:
    async def main() -> None:
        disk, first, second = SimDisk(), FakeMember(), FakeMember()
        async with run_groups(disk, log_with_rows(disk)) as groups:
            for offset in range(20):
                assert join_active(groups, "g", first) == offset
                groups.commit("g", offset + 1, first)
                await anyio.sleep(0.999 + 0.001 * offset)
                groups.leave("g", first)
                await anyio.sleep(0.003)
                first, second = second, first
            await anyio.sleep(3)
            assert groups.statistics() == {}
        assert read_group(disk, "g", LOG_ID) == 20

    run_virtual(main)


def test_unsynced_offset_is_not_stored() -> None:
    async def main() -> None:
        disk, reader = SimDisk(), FakeMember()
        writer = Writer(open_log(disk, SMALL)[0])
        writer.append(8)
        commit(writer.log)
        writer.append(8, level=AckLevel.LOGGED)
        async with run_groups(disk, writer.log) as groups:
            join_active(groups, "g", reader)
            groups.commit("g", 12, reader)
            await anyio.sleep(2)
            assert read_group(disk, "g", LOG_ID) == 8
            groups.leave("g", reader)
            await anyio.sleep(2)
            assert join_active(groups, "g", reader) == 12, (
                "the offset should be known in memory before it is synced"
            )
            groups.leave("g", reader)
            commit(writer.log, sync=True)
            await anyio.sleep(2)
            assert read_group(disk, "g", LOG_ID) == 12
            assert groups.statistics() == {}

    run_virtual(main)


def test_failed_store_is_retried() -> None:
    async def main() -> None:
        disk, reader = SimDisk(), FakeMember()
        async with run_groups(disk, log_with_rows(disk)) as groups:
            join_active(groups, "g", reader)
            disk.fail(lambda call: call.name == "rename", times=2)
            groups.commit("g", 7, reader)
            await anyio.sleep(0.5)
            assert read_group(disk, "g", LOG_ID) in (None, 0)
            await anyio.sleep(3)
            assert read_group(disk, "g", LOG_ID) == 7

    run_virtual(main)


def test_memory_log_keeps_cursors_in_memory_only() -> None:
    async def main() -> None:
        reader = FakeMember()
        log = MemoryLog(LOG_ID)
        async with run_groups(None, log) as groups:
            assert join_active(groups, "g", reader) == 0
            groups.commit("g", 0, reader)
            groups.leave("g", reader)
            await anyio.sleep(2)
            assert join_active(groups, "g", reader) == 0

    run_virtual(main)


def test_cursor_beyond_the_log_end_moves_back() -> None:
    async def main() -> None:
        reader = FakeMember()
        log = MemoryLog(LOG_ID)
        async with run_groups(None, log) as groups:
            join_active(groups, "g", reader)
            groups.commit("g", 5, reader)
            groups.leave("g", reader)
            assert join_active(groups, "g", reader) == log.next_offset == 0

    run_virtual(main)


@pytest.mark.parametrize("disk", [None, SimDisk()], ids=["in memory", "on disk"])
def test_group_names_and_count_are_bounded(disk: SimDisk | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_groups, "GROUPS_MAX", 2)

    async def main() -> None:
        log = MemoryLog(LOG_ID) if disk is None else log_with_rows(disk)
        async with run_groups(disk, log) as groups:
            assert "65 bytes" in refusal_of(lambda: join_active(groups, "g" * 65, FakeMember())).message
            assert refusal_of(lambda: join_active(groups, "", FakeMember())).code is ErrorCode.BAD_REQUEST
            join(groups, "a", FakeMember())
            join(groups, "b/../..", FakeMember())
            assert "there are 2 groups" in refusal_of(lambda: join_active(groups, "c", FakeMember())).message
            join(groups, "a", FakeMember())
        async with run_groups(disk, log) as groups:
            if disk is not None:
                assert (
                    "there are 2 groups" in refusal_of(lambda: join_active(groups, "c", FakeMember())).message
                )
            join(groups, "b/../..", FakeMember())

    run_virtual(main)


def test_corrupted_cursor_file_is_reported() -> None:
    async def main() -> None:
        disk, reader = SimDisk(), FakeMember()
        log = log_with_rows(disk)
        disk.put("groups/g.cursor", b"00000000\n{}")
        async with run_groups(disk, log) as groups:
            assert "corrupted" in refusal_of(lambda: join_active(groups, "g", reader)).message
            assert groups.statistics() == {}

    run_virtual(main)


def test_statistics_show_the_last_commit_after_leave() -> None:
    async def main() -> None:
        disk, reader = SimDisk(), FakeMember()
        threads = virtual_world().new_threads()
        async with run_groups(disk, log_with_rows(disk)) as groups:
            await groups.poll_absent(threads)
            join_active(groups, "g", reader)
            await anyio.sleep(1.5)
            groups.commit("g", 5, reader)
            await anyio.sleep(0.3)
            groups.leave("g", reader)
            for _ in range(20):
                await groups.poll_absent(threads)
                assert groups.all_statistics()["g"].next_offset == 5
                await anyio.sleep(0.1)
            assert groups.statistics() == {}, "the offset should come from the file"

    run_virtual(main)


def test_leave_stores_the_cursor_at_once() -> None:
    async def main() -> None:
        disk, reader = SimDisk(), FakeMember()
        async with run_groups(disk, log_with_rows(disk)) as groups:
            join_active(groups, "g", reader)
            await anyio.sleep(0.1)
            groups.commit("g", 5, reader)
            groups.leave("g", reader)
            await anyio.sleep(0.1)
            assert read_group(disk, "g", LOG_ID) == 5

    run_virtual(main)


def test_reset_by_another_process_shows_at_once() -> None:
    async def main() -> None:
        disk, reader = SimDisk(), FakeMember()
        threads = virtual_world().new_threads()
        async with run_groups(disk, log_with_rows(disk)) as groups:
            join_active(groups, "g", reader)
            groups.commit("g", 5, reader)
            groups.leave("g", reader)
            await anyio.sleep(2)
            await groups.poll_absent(threads)
            assert groups.all_statistics()["g"].next_offset == 5
            reset_group(disk, "g", LOG_ID, 0)
            await groups.poll_absent(threads)
            assert groups.all_statistics()["g"].next_offset == 0

    run_virtual(main)
