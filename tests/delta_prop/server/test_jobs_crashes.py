"""A job on a disk that crashes at any step of it: staged, decided, published; each delta has one effect."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import pytest

from delta_prop.testing import run_virtual
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import Decision, JobState, JobStatus
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.server.jobs import at_fault, counts, keys_in, rows
from tests.delta_prop.server.jobs_virtual import Site, site

PARTS = [rows(0, 9), rows(1, 13), rows(2, 2)]
for one in (4, 5, 9):
    PARTS[1][one] = at_fault(1, one)
REFUSED = 3
DELTAS = sum(map(len, PARTS))
SOUND = [[one.vector_id for one in part if not one.vector_id.startswith("none")] for part in PARTS]


@dataclass
class Story:
    """Lives of a service, and its commit answers heard or missed."""

    lives: int = 0
    committed: bool = False
    decided_unheard: int = 0


async def live(disk: SimDisk, story: Story) -> tuple[JobStatus, list[str]]:
    """One life: the job is run again unless it was told that it is committed."""
    story.lives += 1
    async with site(disk, story.lives) as at:
        if not story.committed:
            await run_job(at, story)
        status = await at.published()
        return status, keys_in(at.propagator)


async def run_job(at: Site, story: Story) -> None:
    parts = []
    try:
        for number, deltas in enumerate(PARTS):
            parts.append(await at.stage(number, story.lives, deltas))
    except Refused as refused:
        if refused.code is not ErrorCode.JOB_DECIDED:
            raise
        story.decided_unheard += 1
        return
    told = await at.decide(Decision.COMMIT, parts)
    assert told.state in (JobState.COMMITTED, JobState.PUBLISHED)
    story.committed = True


def life(disk: SimDisk, story: Story) -> tuple[JobStatus, list[str]] | None:
    """One life, None where the disk crashed under it."""
    try:
        return run_virtual(live, disk, story)
    except BaseException:  # whatever comes of that: a machine that is off closes nothing
        if not disk.is_off:
            raise
        return None


def check(found: tuple[JobStatus, list[str]] | None) -> None:
    assert found is not None
    status, keys = found
    assert counts(status) == JobStatus(
        JobState.PUBLISHED, DELTAS, published=DELTAS - REFUSED, refused=REFUSED
    )
    assert [one[:4] for one in status.refused_rows] == [
        (1, row, f"none-1-{row}", ErrorCode.INVALID_DELTA) for row in (4, 5, 9)
    ]
    assert all(not one.text or "is unknown or deleted" in one.text for one in status.refused_rows)
    assert keys == [key for part in SOUND for key in part]


@pytest.mark.parametrize("power", [True, False])
def test_any_crash_leaves_one_effect_of_each_delta(power: bool, full: bool) -> None:
    probe = SimDisk(0)
    check(life(probe, Story()))
    begin = next(call.number for call in probe.trace if call.path.startswith("jobs"))
    deciding = next(call.number for call in probe.trace if call.name == "rename" and ".job" in call.path)
    unheard = published = 0
    for number in sorted({*range(begin, probe.calls + 1, 1 if full else 11), deciding, deciding + 1}):
        story, disk = Story(), SimDisk(number)
        disk.crash_at(number, "after" if number == deciding + 1 else None)  # durable, and nobody was told
        assert life(disk, story) is None
        heard = story.committed
        found = life(disk.crash(number) if power else disk.kill(), story)
        check(found)
        unheard += story.decided_unheard
        published += heard
    assert unheard
    assert published


def test_it_may_crash_again_and_again(full: bool) -> None:
    for seed in range(60 if full else 6):
        story, disk = Story(), SimDisk(seed)
        for _ in range(4):
            disk.crash_at(disk.calls + 1 + disk.rng.randrange(150))
            if life(disk, story) is not None:
                break
            disk = disk.crash() if disk.rng.random() < 0.5 else disk.kill()
        disk.heal()
        check(life(disk, story))


@pytest.mark.parametrize("power", [True, False])
def test_a_crash_while_it_aborts_leaves_the_name_free(power: bool) -> None:
    async def aborted(disk: SimDisk) -> None:
        async with site(disk) as at:
            for number, deltas in enumerate(PARTS):
                await at.stage(number, 1_000, deltas)
            if not disk.struck["ready"]:
                disk.struck["ready"] = disk.calls
            await at.decide(Decision.ABORT)

    probe = SimDisk(0)
    run_virtual(aborted, probe)
    for number in range(probe.struck["ready"] + 1, probe.calls + 1, 2):
        disk, story = SimDisk(number), Story()
        disk.crash_at(number)
        with suppress(BaseException):
            run_virtual(aborted, disk)
        assert disk.is_off
        check(life(disk.crash(number) if power else disk.kill(), story))
