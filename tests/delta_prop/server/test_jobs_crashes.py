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
from tests.delta_prop.server.jobs import invalid_delta, keys_in, rows, without_rows
from tests.delta_prop.server.jobs_virtual import Site, serve_virtual

PARTS = [rows(0, 9), rows(1, 13), rows(2, 2)]
for one in (4, 5, 9):
    PARTS[1][one] = invalid_delta(1, one)
REFUSED = 3
DELTAS = sum(map(len, PARTS))
VALID_KEYS = [[one.vector_id for one in part if not one.vector_id.startswith("none")] for part in PARTS]


@dataclass
class JobRun:
    """The runs of a service; whether the driver got its commit answer, or missed it."""

    lives: int = 0
    committed: bool = False
    decided_unseen: int = 0


async def run_life(disk: SimDisk, run: JobRun) -> tuple[JobStatus, list[str]]:
    """Run the service once; the job is rerun unless its driver knows that it is committed."""
    run.lives += 1
    async with serve_virtual(disk, run.lives) as site:
        if not run.committed:
            await run_job(site, run)
        status = await site.wait_published()
        return status, keys_in(site.propagator)


async def run_job(site: Site, run: JobRun) -> None:
    parts = []
    try:
        for number, deltas in enumerate(PARTS):
            parts.append(await site.stage(number, run.lives, deltas))
    except Refused as refused:
        if refused.code is not ErrorCode.JOB_DECIDED:
            raise
        run.decided_unseen += 1
        return
    status = await site.decide(Decision.COMMIT, parts)
    assert status.state in (JobState.COMMITTED, JobState.PUBLISHED)
    run.committed = True


def try_life(disk: SimDisk, run: JobRun) -> tuple[JobStatus, list[str]] | None:
    """Run the service once; return None if the disk crashed."""
    try:
        return run_virtual(run_life, disk, run)
    except BaseException:  # any error may follow, because a machine that is off closes nothing
        if not disk.is_off:
            raise
        return None


def check(found: tuple[JobStatus, list[str]] | None) -> None:
    assert found is not None
    status, keys = found
    assert without_rows(status) == JobStatus(
        JobState.PUBLISHED, DELTAS, published=DELTAS - REFUSED, refused=REFUSED
    )
    assert [one[:4] for one in status.refused_rows] == [
        (1, row, f"none-1-{row}", ErrorCode.INVALID_DELTA) for row in (4, 5, 9)
    ]
    assert all(not one.text or "is unknown or deleted" in one.text for one in status.refused_rows)
    assert keys == [key for part in VALID_KEYS for key in part]


@pytest.mark.parametrize("power", [True, False])
def test_any_crash_leaves_each_delta_applied_once(power: bool, full: bool) -> None:
    probe = SimDisk(0)
    check(try_life(probe, JobRun()))
    begin = next(call.number for call in probe.trace if call.path.startswith("jobs"))
    deciding = next(call.number for call in probe.trace if call.name == "rename" and ".job" in call.path)
    unseen = published = 0
    for number in sorted({*range(begin, probe.calls + 1, 1 if full else 11), deciding, deciding + 1}):
        run, disk = JobRun(), SimDisk(number)
        disk.crash_at(
            number, "after" if number == deciding + 1 else None
        )  # the decision is durable, but the driver got no answer
        assert try_life(disk, run) is None
        seen = run.committed
        found = try_life(disk.crash(number) if power else disk.kill(), run)
        check(found)
        unseen += run.decided_unseen
        published += seen
    assert unseen
    assert published


def test_several_crashes_leave_each_delta_applied_once(full: bool) -> None:
    for seed in range(60 if full else 6):
        run, disk = JobRun(), SimDisk(seed)
        for _ in range(4):
            disk.crash_at(disk.calls + 1 + disk.rng.randrange(150))
            if try_life(disk, run) is not None:
                break
            disk = disk.crash() if disk.rng.random() < 0.5 else disk.kill()
        disk.heal()
        check(try_life(disk, run))


@pytest.mark.parametrize("power", [True, False])
def test_crash_during_abort_leaves_the_name_free(power: bool) -> None:
    async def abort_job(disk: SimDisk) -> None:
        async with serve_virtual(disk) as site:
            for number, deltas in enumerate(PARTS):
                await site.stage(number, 1_000, deltas)
            if not disk.struck["ready"]:
                disk.struck["ready"] = disk.calls
            await site.decide(Decision.ABORT)

    probe = SimDisk(0)
    run_virtual(abort_job, probe)
    for number in range(probe.struck["ready"] + 1, probe.calls + 1, 2):
        disk, run = SimDisk(number), JobRun()
        disk.crash_at(number)
        with suppress(BaseException):
            run_virtual(abort_job, disk)
        assert disk.is_off
        check(try_life(disk.crash(number) if power else disk.kill(), run))
