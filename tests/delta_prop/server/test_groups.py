"""Groups of subscribers: one member each, a place that lags at most, files shared with the command."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop.group_places import Group, read_group, read_groups
from delta_prop.server import groups as module
from delta_prop.server.groups import Groups, GroupStatistics
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
    """A member that notes who took its place."""

    fenced: list[Refused] = field(default_factory=list)

    def fence(self, refused: Refused) -> None:
        self.fenced.append(refused)


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
            assert groups.join("g", reader) is None
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
            assert groups.join("g", Reader()) == 20
        assert read_group(disk.crash(1), "g", LOG_ID) == 20

    run_virtual(main)


def test_a_second_member_fences_the_first_and_goes_on_where_it_stopped() -> None:
    async def main() -> None:
        disk, first, second = SimDisk(), Reader(), Reader()
        async with running(disk, log_of(disk)) as groups:
            groups.join("g", first)
            groups.commit("g", 30, first)
            assert groups.join("g", second) == 30
            assert [one.code for one in first.fenced] == [ErrorCode.FENCED]
            groups.commit("g", 99, first)  # it does not know yet
            groups.leave("g", first)
            assert groups.statistics() == {"g": GroupStatistics(30, True)}
            groups.commit("g", 31, second)
            assert groups.join("g", second) == 31
            assert not second.fenced
            assert groups.join("h", first) is None

    run_virtual(main)


def test_who_leaves_lets_other_processes_have_the_group() -> None:
    async def main() -> None:
        disk, reader = SimDisk(), Reader()
        log = log_of(disk)
        async with running(disk, log) as groups:
            groups.join("g", reader)
            groups.commit("g", 5, reader)
            await anyio.sleep(2)
            with pytest.raises(UsageError, match="read by another process"):
                Group(disk, "g", LOG_ID)
            groups.leave("g", reader)
            await anyio.sleep(2)
            assert groups.statistics() == {}
            command = Group(disk, "g", LOG_ID)
            assert command.next_offset == 5
            refusal = refused(lambda: groups.join("g", reader))
            assert (refusal.code, refusal.retryable) == (ErrorCode.BAD_REQUEST, False)
            assert "read by another process" in refusal.message
            command.next_offset = 50
            command.close()
            assert groups.join("g", reader) == 50

    run_virtual(main)


def test_a_member_that_comes_while_the_last_ones_place_is_written_gets_it() -> None:
    async def main() -> None:
        disk, first, second = SimDisk(), Reader(), Reader()
        async with running(disk, log_of(disk)) as groups:
            for offset in range(20):
                assert groups.join("g", first) == (offset or None)
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
            groups.join("g", reader)
            groups.commit("g", 12, reader)
            await anyio.sleep(2)
            assert read_group(disk, "g", LOG_ID) == 8
            groups.leave("g", reader)
            await anyio.sleep(2)
            assert groups.join("g", reader) == 12, "known here, though not safe yet"
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
            groups.join("g", reader)
            disk.fail(lambda call: call.name == "rename", times=2)
            groups.commit("g", 7, reader)
            await anyio.sleep(0.5)
            assert read_group(disk, "g", LOG_ID) is None
            await anyio.sleep(3)
            assert read_group(disk, "g", LOG_ID) == 7

    run_virtual(main)


def test_beside_a_log_in_memory_places_live_as_long_as_the_server() -> None:
    async def main() -> None:
        reader = Reader()
        log = MemoryLog(LOG_ID)
        async with running(None, log) as groups:
            assert groups.join("g", reader) is None
            groups.commit("g", 0, reader)
            groups.leave("g", reader)
            await anyio.sleep(2)
            assert groups.join("g", reader) == 0

    run_virtual(main)


def test_a_log_that_lost_its_end_takes_the_place_back() -> None:
    async def main() -> None:
        reader = Reader()
        log = MemoryLog(LOG_ID)
        async with running(None, log) as groups:
            groups.join("g", reader)
            groups.commit("g", 5, reader)
            groups.leave("g", reader)
            assert groups.join("g", reader) == log.next_offset == 0

    run_virtual(main)


@pytest.mark.parametrize("disk", [None, SimDisk()], ids=["in memory", "on disk"])
def test_bounds_of_names_and_of_their_number(disk: SimDisk | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GROUPS_MAX", 2)

    async def main() -> None:
        log = MemoryLog(LOG_ID) if disk is None else log_of(disk)
        async with running(disk, log) as groups:
            assert "65 bytes" in refused(lambda: groups.join("g" * 65, Reader())).message
            assert refused(lambda: groups.join("", Reader())).code is ErrorCode.BAD_REQUEST
            groups.join("a", Reader())
            groups.join("b/../..", Reader())
            assert "there are 2 groups" in refused(lambda: groups.join("c", Reader())).message
            groups.join("a", Reader())
        async with running(disk, log) as groups:
            if disk is not None:
                assert "there are 2 groups" in refused(lambda: groups.join("c", Reader())).message
            groups.join("b/../..", Reader())

    run_virtual(main)


def test_a_damaged_place_is_told() -> None:
    async def main() -> None:
        disk, reader = SimDisk(), Reader()
        log = log_of(disk)
        disk.put("groups/g.cursor", b"00000000\n{}")
        async with running(disk, log) as groups:
            assert "damaged" in refused(lambda: groups.join("g", reader)).message
            assert groups.statistics() == {}

    run_virtual(main)
