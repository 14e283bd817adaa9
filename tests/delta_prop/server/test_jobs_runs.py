"""Two drivers under one job's name, in virtual time: the one that fails drops what its own run has staged."""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.frames import Decision, JobState, JobStatus, Nack, StagedPart, attempt_of, job_run_of
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.server.jobs import JOB, keys_in, rows
from tests.delta_prop.server.jobs_virtual import (
    NO_ROOM_KEPT,
    Site,
    code_of,
    frame,
    on,
    parts_of,
    staged_hello,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

ONE, OTHER = 0xFFFF_FFFF, 7
DAY_S = 60.0


async def stage(at: Site, run: int, count: int, parts: int = 2) -> list[StagedPart]:
    """All parts of a run of the job."""
    return [await at.stage(part, attempt_of(run, part), rows(part, count)) for part in range(parts)]


async def abort(at: Site, run: int) -> JobState:
    return (await at.decide(Decision.ABORT, run=run)).state


async def check(at: Site, parts: Sequence[StagedPart]) -> None:
    """These are committed, and all is published."""
    deltas = sum(part.deltas for part in parts)
    await at.decide(Decision.COMMIT, parts)
    assert await at.published() == JobStatus(JobState.PUBLISHED, deltas, published=deltas)
    wanted = [one.vector_id for part in parts for one in rows(part.part, part.deltas)]
    assert keys_in(at.propagator) == wanted


def test_a_run_and_its_attempts() -> None:
    assert attempt_of(ONE, (5 << 32) + 9) == (ONE << 32) + 9 < 1 << 64
    assert job_run_of(attempt_of(ONE, 9)) == ONE
    assert job_run_of(9) == 0


def test_a_driver_that_fails_leaves_the_parts_of_another() -> None:
    disk = SimDisk()

    async def story(at: Site) -> None:
        await stage(at, ONE, 3)
        parts = await stage(at, OTHER, 5)
        async with at.connected() as late:
            await staged_hello(late, 0, attempt_of(ONE, 9))
            await late.send(frame(0, rows(0, 4), 1))
            await late.told(4)
            assert await abort(at, ONE) is JobState.ABORTED
            await late.send(frame(0, rows(0, 4, 4), 5))
            assert (await late.until(Nack)).code is ErrorCode.UNKNOWN_JOB
        assert await at.decide(Decision.QUERY) == JobStatus(JobState.STAGING, 10)
        size = sum(len(disk.peek(path)) for path in parts_of(disk))
        assert (len(parts_of(disk)), at.jobs.counts.staged_bytes, at.jobs._attempt_count) == (2, size, 2)
        await check(at, parts)
        assert at.jobs.counts.staged_bytes == at.jobs._attempt_count == 0

    on(disk, story)


def test_after_a_restart_too_and_then_none_is_left() -> None:
    disk = SimDisk()

    async def story(at: Site) -> None:
        await stage(at, ONE, 3)
        await stage(at, OTHER, 5)

    async def later(at: Site) -> None:
        await abort(at, ONE)
        assert (await at.decide(Decision.QUERY)).deltas == 10
        assert await abort(at, ONE) is JobState.ABORTED
        await abort(at, OTHER)
        assert await code_of(at.decide(Decision.QUERY)) is ErrorCode.UNKNOWN_JOB
        assert parts_of(disk) == []
        assert (at.jobs.counts.active, at.jobs.counts.staged_bytes, at.jobs._attempt_count) == (0, 0, 0)

    on(disk, story)
    on(disk, later)


def test_who_has_said_hello_for_another_run_goes_on() -> None:
    async def story(at: Site) -> None:
        await stage(at, ONE, 3)
        async with at.connected() as raw:
            await staged_hello(raw, 0, attempt_of(OTHER, 0))
            await abort(at, ONE)
            await raw.send(frame(0, rows(0, 4), 1))
            await raw.told(4)
        await check(at, [StagedPart(0, attempt_of(OTHER, 0), 4)])

    on(SimDisk(), story)


def test_what_comes_late_of_a_run_that_was_dropped_is_dropped_in_its_time() -> None:
    disk = SimDisk()

    async def story(at: Site) -> None:
        await stage(at, ONE, 3)
        await abort(at, ONE)
        await at.stage(1, attempt_of(ONE, 8), rows(1, 3))
        await check(at, await stage(at, OTHER, 5))
        assert parts_of(disk) == []  # it does not outlive the decision
        await at.stage(0, attempt_of(ONE, 8), rows(0, 3), job="other")
        await anyio.sleep(1.3 * DAY_S)
        assert parts_of(disk) == []

    on(disk, story, job_decision_timeout_s=DAY_S)


def test_a_run_that_has_nothing_here_is_dropped_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    async def story(at: Site) -> None:
        assert await abort(at, ONE) is JobState.ABORTED
        assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
        assert await code_of(at.decide(Decision.ABORT)) is ErrorCode.UNKNOWN_JOB  # who names none is told
        parts = await stage(at, OTHER, 5)
        assert await abort(at, ONE) is JobState.ABORTED
        await check(at, parts)
        for run in (ONE, OTHER):
            assert await code_of(at.decide(Decision.ABORT, run=run)) is ErrorCode.JOB_DECIDED

    on(SimDisk(), story)


@pytest.mark.parametrize("of_all", [False, True])
def test_a_decision_of_which_nobody_was_told_goes_with_the_run(of_all: bool) -> None:
    """The disk fails behind the decision's name: it stands there, and its driver was told it does not."""
    disk = SimDisk()
    others: list[StagedPart] = []

    async def story(at: Site) -> None:
        others.extend([] if of_all else await stage(at, OTHER, 5))
        parts = await stage(at, ONE, 3)
        disk.fail(lambda call: call.name == "sync_directory" and call.path == "jobs", errno.EIO)
        assert await code_of(at.decide(Decision.COMMIT, parts)) is ErrorCode.LOG_FAILED
        assert any(path.endswith(".job") for path in disk.paths())
        await abort(at, ONE)

    async def later(at: Site) -> None:
        if of_all:
            assert await code_of(at.decide(Decision.QUERY)) is ErrorCode.UNKNOWN_JOB
        else:
            await check(at, others)

    on(disk, story, log=NO_ROOM_KEPT)
    on(disk, later, log=NO_ROOM_KEPT)


def test_a_disk_that_fails_while_a_run_is_dropped() -> None:
    disk = SimDisk()

    async def story(at: Site) -> None:
        await stage(at, ONE, 3)
        parts = await stage(at, OTHER, 5)
        disk.fail(lambda call: call.name == "remove" and call.path.endswith(".part"), errno.EIO)
        assert await code_of(at.decide(Decision.ABORT, run=ONE)) is ErrorCode.LOG_FAILED
        assert (await at.decide(Decision.QUERY)).deltas == 16
        await abort(at, ONE)
        assert (await at.decide(Decision.QUERY, job=JOB)).deltas == 10
        await check(at, parts)

    on(disk, story)
