"""A disk that crashes at any step of a job (staging, decision, publishing): one effect of each delta."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import pytest

from delta_prop.testing import run_virtual
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import Decision, JobState, JobStatus
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.server.jobs import invalid_delta, keys_in, part_deltas, without_rows
from tests.delta_prop.server.jobs_virtual import Site, serve_virtual

PARTS = [part_deltas(0, 9), part_deltas(1, 13), part_deltas(2, 2)]
for row in (4, 5, 9):
    PARTS[1][row] = invalid_delta(1, row)
REFUSED_COUNT = 3
DELTA_COUNT = sum(map(len, PARTS))
VALID_KEYS = [[delta.vector_id for delta in part if not delta.vector_id.startswith("none")] for part in PARTS]


@dataclass
class JobRun:
    """The starts of the service, and the knowledge of the job's driver.

    `committed`: the driver got the answer to its commit. `missed_answers`: how often it found the job decided
    without having got that answer.
    """

    starts: int = 0
    committed: bool = False
    missed_answers: int = 0


async def run_service(disk: SimDisk, run: JobRun) -> tuple[JobStatus, list[str]]:
    """Run the service once; the job is rerun unless its driver knows that it is committed."""
    run.starts += 1
    async with serve_virtual(disk, run.starts) as site:
        if not run.committed:
            await run_job(site, run)
        status = await site.wait_published()
        return status, keys_in(site.propagator)


async def run_job(site: Site, run: JobRun) -> None:
    parts = []
    try:
        for number, deltas in enumerate(PARTS):
            parts.append(await site.stage(number, run.starts, deltas))
    except Refused as refused:
        if refused.code is not ErrorCode.JOB_DECIDED:
            raise
        run.missed_answers += 1
        return
    status = await site.decide(Decision.COMMIT, parts)
    assert status.state in (JobState.COMMITTED, JobState.PUBLISHED)
    run.committed = True


def run_until_crash(disk: SimDisk, run: JobRun) -> tuple[JobStatus, list[str]] | None:
    """Run the service once; return None if the disk crashed."""
    try:
        return run_virtual(run_service, disk, run)
    except BaseException:  # any error may follow, because a machine that is off closes nothing
        if not disk.is_off:
            raise
        return None


def check_result(result: tuple[JobStatus, list[str]] | None) -> None:
    assert result is not None
    status, keys = result
    assert without_rows(status) == JobStatus(
        JobState.PUBLISHED, DELTA_COUNT, published=DELTA_COUNT - REFUSED_COUNT, refused=REFUSED_COUNT
    )
    assert [refused_row[:4] for refused_row in status.refused_rows] == [
        (1, row, f"none-1-{row}", ErrorCode.INVALID_DELTA) for row in (4, 5, 9)
    ]
    assert all(
        not refused_row.text or "is unknown or deleted" in refused_row.text
        for refused_row in status.refused_rows
    )
    assert keys == [key for part in VALID_KEYS for key in part]


@pytest.mark.parametrize("power_loss", [True, False])
def test_any_crash_leaves_each_delta_applied_once(power_loss: bool, full: bool) -> None:
    probe = SimDisk(0)
    check_result(run_until_crash(probe, JobRun()))
    first_call = next(call.number for call in probe.trace if call.path.startswith("jobs"))
    decision_call = next(call.number for call in probe.trace if call.name == "rename" and ".job" in call.path)
    missed_answers = committed_runs = 0
    for number in sorted(
        {*range(first_call, probe.calls + 1, 1 if full else 11), decision_call, decision_call + 1}
    ):
        run, disk = JobRun(), SimDisk(number)
        disk.crash_at(
            number, "after" if number == decision_call + 1 else None
        )  # the decision is durable, but the driver got no answer
        assert run_until_crash(disk, run) is None
        is_committed = run.committed
        result = run_until_crash(disk.crash(number) if power_loss else disk.kill(), run)
        check_result(result)
        missed_answers += run.missed_answers
        committed_runs += is_committed
    assert missed_answers
    assert committed_runs


def test_several_crashes_leave_each_delta_applied_once(full: bool) -> None:
    for seed in range(60 if full else 6):
        run, disk = JobRun(), SimDisk(seed)
        for _ in range(4):
            disk.crash_at(disk.calls + 1 + disk.rng.randrange(150))
            if run_until_crash(disk, run) is not None:
                break
            disk = disk.crash() if disk.rng.random() < 0.5 else disk.kill()
        disk.heal()
        check_result(run_until_crash(disk, run))


@pytest.mark.parametrize("power_loss", [True, False])
def test_crash_during_abort_leaves_the_name_free(power_loss: bool) -> None:
    calls_before_abort: list[int] = []

    async def abort_job(disk: SimDisk) -> None:
        async with serve_virtual(disk) as site:
            for number, deltas in enumerate(PARTS):
                await site.stage(number, 1_000, deltas)
            calls_before_abort.append(disk.calls)
            await site.decide(Decision.ABORT)

    probe = SimDisk(0)
    run_virtual(abort_job, probe)
    for number in range(calls_before_abort[0] + 1, probe.calls + 1, 2):
        disk, run = SimDisk(number), JobRun()
        disk.crash_at(number)
        with suppress(BaseException):
            run_virtual(abort_job, disk)
        assert disk.is_off
        check_result(run_until_crash(disk.crash(number) if power_loss else disk.kill(), run))
