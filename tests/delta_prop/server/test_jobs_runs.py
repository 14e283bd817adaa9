"""Two drivers of one job name, in virtual time: a failed driver drops only the parts of its own run."""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.frames import Decision, JobState, JobStatus, Nack, StagedPart, attempt_of, job_run_of
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.server.jobs import JOB, keys_in, part_deltas
from tests.delta_prop.server.jobs_virtual import (
    NO_RESERVE,
    Site,
    frame,
    part_paths,
    refusal_code,
    run_scenario,
    staged_hello,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

RUN, OTHER_RUN = 0xFFFF_FFFF, 7
DECISION_TIMEOUT_S = 60.0


async def stage(site: Site, run: int, count: int, part_count: int = 2) -> list[StagedPart]:
    """Stage all parts of a run of the job, with `count` deltas each."""
    return [
        await site.stage(part, attempt_of(run, part), part_deltas(part, count)) for part in range(part_count)
    ]


async def abort(site: Site, run: int) -> JobState:
    return (await site.decide(Decision.ABORT, run=run)).state


async def check_committed(site: Site, parts: Sequence[StagedPart]) -> None:
    """Commit these parts, and check that all of their deltas are published."""
    deltas = sum(part.deltas for part in parts)
    await site.decide(Decision.COMMIT, parts)
    assert await site.wait_published() == JobStatus(JobState.PUBLISHED, deltas, published=deltas)
    expected_keys = [delta.vector_id for part in parts for delta in part_deltas(part.part, part.deltas)]
    assert keys_in(site.propagator) == expected_keys


def test_attempt_contains_its_run() -> None:
    assert attempt_of(RUN, (5 << 32) + 9) == (RUN << 32) + 9 < 1 << 64
    assert job_run_of(attempt_of(RUN, 9)) == RUN
    assert job_run_of(9) == 0


def test_abort_of_one_run_leaves_parts_of_another() -> None:
    disk = SimDisk()

    async def scenario(site: Site) -> None:
        await stage(site, RUN, 3)
        parts = await stage(site, OTHER_RUN, 5)
        async with site.connected() as late_task:
            await staged_hello(late_task, 0, attempt_of(RUN, 9))
            await late_task.send(frame(0, part_deltas(0, 4), 1))
            await late_task.until_acked(4)
            assert await abort(site, RUN) is JobState.ABORTED
            await late_task.send(frame(0, part_deltas(0, 4, 4), 5))
            assert (await late_task.until(Nack)).code is ErrorCode.UNKNOWN_JOB
        assert await site.decide(Decision.QUERY) == JobStatus(JobState.STAGING, 10)
        size = sum(len(disk.peek(path)) for path in part_paths(disk))
        assert (len(part_paths(disk)), site.jobs.counts.staged_bytes, site.jobs._table.attempt_count) == (
            2,
            size,
            2,
        )
        await check_committed(site, parts)
        assert site.jobs.counts.staged_bytes == site.jobs._table.attempt_count == 0

    run_scenario(disk, scenario)


def test_abort_after_a_restart_drops_each_run() -> None:
    disk = SimDisk()

    async def scenario(site: Site) -> None:
        await stage(site, RUN, 3)
        await stage(site, OTHER_RUN, 5)

    async def check_after_restart(site: Site) -> None:
        await abort(site, RUN)
        assert (await site.decide(Decision.QUERY)).deltas == 10
        assert await abort(site, RUN) is JobState.ABORTED
        await abort(site, OTHER_RUN)
        assert await refusal_code(site.decide(Decision.QUERY)) is ErrorCode.UNKNOWN_JOB
        assert part_paths(disk) == []
        assert (site.jobs.counts.active, site.jobs.counts.staged_bytes, site.jobs._table.attempt_count) == (
            0,
            0,
            0,
        )

    run_scenario(disk, scenario)
    run_scenario(disk, check_after_restart)


def test_open_task_of_another_run_continues_after_abort() -> None:
    async def scenario(site: Site) -> None:
        await stage(site, RUN, 3)
        async with site.connected() as raw:
            await staged_hello(raw, 0, attempt_of(OTHER_RUN, 0))
            await abort(site, RUN)
            await raw.send(frame(0, part_deltas(0, 4), 1))
            await raw.until_acked(4)
        await check_committed(site, [StagedPart(0, attempt_of(OTHER_RUN, 0), 4)])

    run_scenario(SimDisk(), scenario)


def test_late_parts_of_a_dropped_run_expire() -> None:
    disk = SimDisk()

    async def scenario(site: Site) -> None:
        await stage(site, RUN, 3)
        await abort(site, RUN)
        await site.stage(1, attempt_of(RUN, 8), part_deltas(1, 3))
        assert len(part_paths(disk)) == 1
        await check_committed(site, await stage(site, OTHER_RUN, 5))
        assert part_paths(disk) == []  # the decision removed the late part
        await site.stage(0, attempt_of(RUN, 8), part_deltas(0, 3), job="other")
        await anyio.sleep(0.9 * DECISION_TIMEOUT_S)
        assert len(part_paths(disk)) == 1, "the part should stay until the decision timeout"
        await anyio.sleep(0.4 * DECISION_TIMEOUT_S)
        assert part_paths(disk) == []

    run_scenario(disk, scenario, job_decision_timeout_s=DECISION_TIMEOUT_S)


def test_abort_of_an_unknown_run_succeeds_silently(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(site: Site) -> None:
        assert await abort(site, RUN) is JobState.ABORTED
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert (
            await refusal_code(site.decide(Decision.ABORT)) is ErrorCode.UNKNOWN_JOB
        )  # an abort without a run is refused
        parts = await stage(site, OTHER_RUN, 5)
        assert await abort(site, RUN) is JobState.ABORTED
        await check_committed(site, parts)
        for run in (RUN, OTHER_RUN):
            assert await refusal_code(site.decide(Decision.ABORT, run=run)) is ErrorCode.JOB_DECIDED

    run_scenario(SimDisk(), scenario)


@pytest.mark.parametrize("is_only_run", [False, True])
def test_unanswered_decision_is_dropped_with_its_run(is_only_run: bool) -> None:
    """The disk fails after the decision is stored, so the driver gets an error for a decided job."""
    disk = SimDisk()
    others: list[StagedPart] = []

    async def scenario(site: Site) -> None:
        others.extend([] if is_only_run else await stage(site, OTHER_RUN, 5))
        parts = await stage(site, RUN, 3)
        disk.fail(lambda call: call.name == "sync_directory" and call.path == "jobs", errno.EIO)
        assert await refusal_code(site.decide(Decision.COMMIT, parts)) is ErrorCode.LOG_FAILED
        assert any(path.endswith(".job") for path in disk.paths())
        await abort(site, RUN)

    async def check_after_restart(site: Site) -> None:
        if is_only_run:
            assert await refusal_code(site.decide(Decision.QUERY)) is ErrorCode.UNKNOWN_JOB
        else:
            await check_committed(site, others)

    run_scenario(disk, scenario, log=NO_RESERVE)
    run_scenario(disk, check_after_restart, log=NO_RESERVE)


def test_disk_failure_during_abort_drops_nothing() -> None:
    disk = SimDisk()

    async def scenario(site: Site) -> None:
        await stage(site, RUN, 3)
        parts = await stage(site, OTHER_RUN, 5)
        disk.fail(lambda call: call.name == "remove" and call.path.endswith(".part"), errno.EIO)
        assert await refusal_code(site.decide(Decision.ABORT, run=RUN)) is ErrorCode.LOG_FAILED
        assert (await site.decide(Decision.QUERY)).deltas == 16
        await abort(site, RUN)
        assert (await site.decide(Decision.QUERY, job=JOB)).deltas == 10
        await check_committed(site, parts)

    run_scenario(disk, scenario)
