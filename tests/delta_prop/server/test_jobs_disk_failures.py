"""Jobs on disks and logs that fail, are full, or lose unsynced data; in virtual time."""

from __future__ import annotations

import errno
from typing import Any

import anyio
import pytest

from delta_prop.server import job_publishing
from delta_prop.server.job_files import stem_of
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import Delta, opaque
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import (
    Ack,
    BatchFrame,
    Decision,
    Hello,
    JobPart,
    JobState,
    JobStatus,
    Nack,
    OriginClaim,
    StagedPart,
    Subscribe,
)
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.server.jobs import JOB, block_of, invalid_delta, keys_in, part_deltas, without_rows
from tests.delta_prop.server.jobs_virtual import (
    NO_RESERVE,
    Site,
    frame,
    origin_of,
    part_paths,
    run_scenario,
    stage_first_rows,
    staged_hello,
)


def test_full_disk_refuses_staging_until_space_is_free() -> None:
    disk = SimDisk()
    big = [Delta(f"v{row}", opaque(bytes(40_000))) for row in range(4)]

    async def scenario(site: Site) -> None:
        disk.capacity_bytes = disk.used_bytes + 100_000
        async with site.connected() as raw:
            await staged_hello(raw, 0, 1)
            await raw.send(frame(0, big[:2], 1))
            await raw.until_acked(2)
            for number in range(3):
                await raw.send(frame(0, big[2:], 3, 3 + 2 * number))
                nack = await raw.until(Nack)
                assert (nack.code, nack.retry_after_ms) == (ErrorCode.LOG_FULL, 1_000)
            disk.capacity_bytes = None
            await anyio.sleep(1)
            await raw.send(frame(0, big[2:], 3, 9))
            while not isinstance(answer := await raw.next(), Ack) or answer.sequence < 10:
                if isinstance(answer, Nack):  # the service has not retried the disk yet
                    await anyio.sleep(1)
                    await raw.send(frame(0, big[2:], 3, 11))
        await site.decide(Decision.COMMIT, [StagedPart(0, 1, 4)])
        assert (await site.wait_published()).published == 4

    run_scenario(disk, scenario, log=NO_RESERVE)


def test_disk_failure_at_commit_decides_nothing() -> None:
    disk = SimDisk()

    async def scenario(site: Site) -> None:
        part = await site.stage(0, 1, part_deltas(0, 4))
        for name in ("open", "write", "sync", "rename"):
            disk.fail(lambda call, name=name: call.name == name and "job" in call.path, errno.EIO)
            with pytest.raises(Refused) as refusal:
                await site.decide(Decision.COMMIT, [part])
            assert (refusal.value.code, refusal.value.retryable) == (ErrorCode.LOG_FAILED, True)
            assert (await site.decide(Decision.QUERY)).state is JobState.STAGING
        await site.decide(Decision.COMMIT, [part])
        assert (await site.wait_published()).published == 4

    run_scenario(disk, scenario, log=NO_RESERVE)


@pytest.mark.parametrize("name", ["write", "sync"])
def test_disk_failure_while_staging_loses_nothing(name: str) -> None:
    disk = SimDisk()

    async def scenario(site: Site) -> None:
        async with site.connected() as raw:
            await stage_first_rows(site, raw)
            disk.fail(lambda call: call.name == name and call.path.endswith(".part"), errno.EIO)
            await raw.send(frame(0, part_deltas(0, 4, 4), 5))
            assert (await raw.until(Nack)).code is ErrorCode.LOG_FAILED
            await raw.send(frame(0, part_deltas(0, 4, 4), 5, 9))
            await raw.until_acked(12)
        await site.decide(Decision.COMMIT, [StagedPart(0, 1, 8)])
        await site.wait_published()
        assert keys_in(site.propagator) == [delta.vector_id for delta in part_deltas(0, 8)]

    run_scenario(disk, scenario)


@pytest.mark.parametrize("times", [1, 7])
def test_log_failure_while_publishing_loses_nothing(times: int) -> None:
    disk = SimDisk()
    deltas = part_deltas(0, 200)
    deltas[150] = invalid_delta(0, 150)
    valid = [delta.vector_id for delta in deltas if delta is not deltas[150]]

    async def scenario(site: Site) -> None:
        part = await site.stage(0, 1, deltas)
        log_writes = 0

        def is_later_log_write(call: object) -> bool:
            nonlocal log_writes
            if call.name in ("write", "sync") and call.path.startswith("streams"):  # type: ignore[attr-defined]
                log_writes += 1
                return log_writes > 1
            return False

        await site.decide(Decision.COMMIT, [part])
        disk.fail(is_later_log_write, errno.EIO, times=times)
        status = await site.wait_published()
        assert site.propagator.internals().partition.pipeline.recoveries
        assert without_rows(status) == JobStatus(JobState.PUBLISHED, 200, published=199, refused=1)
        assert keys_in(site.propagator) == valid
        assert (site.jobs.counts.published, site.jobs.counts.refused) == (199, 1)

    run_scenario(disk, scenario, log=NO_RESERVE)


def test_publishing_waits_while_the_log_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_publishing, "UNACKED_BYTES_MAX", 1)

    async def scenario(site: Site) -> None:
        part = await site.stage(0, 1, part_deltas(0, 40))
        pipeline = site.propagator.internals().partition.pipeline
        offer, refused_offers = pipeline.offer, 0

        def refuse_first(work: object, now: float) -> object:
            nonlocal refused_offers
            if refused_offers < 5:
                refused_offers += 1
                work.receipt.refuse(Refused(ErrorCode.LOG_FULL, "full", retry_after_ms=200))  # type: ignore[attr-defined]
                return work.receipt  # type: ignore[attr-defined]
            return offer(work, now)  # type: ignore[arg-type]

        monkeypatch.setattr(pipeline, "offer", refuse_first)
        began = anyio.current_time()
        await site.decide(Decision.COMMIT, [part])
        assert await site.wait_published() == JobStatus(JobState.PUBLISHED, 40, published=40)
        assert anyio.current_time() - began >= 1.0
        assert keys_in(site.propagator) == [delta.vector_id for delta in part_deltas(0, 40)]

    run_scenario(SimDisk(), scenario)


def test_publishing_continues_after_its_origin_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: Site) -> None:
        part = await site.stage(0, 1, part_deltas(0, 40))
        pipeline, offers = site.propagator.internals().partition.pipeline, 0
        offer = pipeline.offer

        def claim_then_offer(work: Any, now: float) -> Any:
            nonlocal offers
            offers += 1
            if offers in (3, 7):
                pipeline.claim([OriginClaim(origin_of(0), 0)], work.sender.owner, now)
            return offer(work, now)

        monkeypatch.setattr(pipeline, "offer", claim_then_offer)
        await site.decide(Decision.COMMIT, [part])
        with anyio.fail_after(5):
            assert await site.wait_published() == JobStatus(JobState.PUBLISHED, 40, published=40)
        assert keys_in(site.propagator) == [delta.vector_id for delta in part_deltas(0, 40)]

    run_scenario(SimDisk(), scenario)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("power_loss", [True, False])
def test_unsynced_rows_in_the_log_do_not_count_as_published(power_loss: bool, seed: int) -> None:
    """When the publisher restarts, some of the rows are logged but not synced; these rows are then lost."""
    disk = SimDisk(seed)
    expected_keys = [delta.vector_id for delta in part_deltas(0, 40)]

    async def scenario(site: Site) -> None:
        part = await site.stage(0, 1, part_deltas(0, 40))
        pipeline, offers = site.propagator.internals().partition.pipeline, 0
        offer = pipeline.offer

        def refuse_one(work: Any, now: float) -> Any:
            nonlocal offers
            offers += 1
            if offers == 10:
                work.receipt.refuse(Refused(ErrorCode.QUEUE_FULL, "full", retry_after_ms=1))
                return work.receipt
            return offer(work, now)

        pipeline.offer = refuse_one  # type: ignore[method-assign]
        if not power_loss:
            disk.fail(lambda call: call.name == "sync" and call.path.startswith("streams"), errno.EIO)
        await site.decide(Decision.COMMIT, [part])
        while (await site.decide(Decision.QUERY)).state is not JobState.PUBLISHED:  # noqa: ASYNC110
            await anyio.sleep(0.001)
        if power_loss:
            disk.crash_at(disk.calls + 1, "before")
        else:
            assert pipeline.recoveries
            assert keys_in(site.propagator) == expected_keys

    async def check_after_crash(site: Site) -> None:
        assert (await site.decide(Decision.QUERY)).published == 40
        assert keys_in(site.propagator) == expected_keys

    try:
        run_scenario(disk, scenario, seed=seed, log=NO_RESERVE, thread_delay_s_max=0.1)
    except BaseException:
        if not disk.is_off:
            raise
    if power_loss:
        run_scenario(disk.crash(seed), check_after_crash, log=NO_RESERVE)


def test_unreadable_part_does_not_block_other_jobs() -> None:
    disk = SimDisk()

    async def scenario(site: Site) -> None:
        first = await site.stage(0, 1, part_deltas(0, 5))
        async with site.connected() as raw:
            origin = origin_of(0, "second")
            claims = (OriginClaim(origin),)
            await raw.send(Subscribe(1, Hello(origins=claims, job=JobPart("second", 0, 1))))
            await raw.next()
            batch = block_of(part_deltas(1, 5)).encode(origin=origin, base=1, epoch=0)
            await raw.send(BatchFrame(1, batch, ack_wanted=True))
            await raw.until_acked(5)
        path = next(part_path for part_path in part_paths(disk) if stem_of(JOB) in part_path)
        disk.fail(lambda call: call.path == path and call.name == "read", errno.EIO, times=None)
        await site.decide(Decision.COMMIT, [first])
        await site.decide(Decision.COMMIT, [StagedPart(0, 1, 5)], job="second")
        await anyio.sleep(20)
        assert (await site.decide(Decision.QUERY, job="second")).state is JobState.PUBLISHED
        assert (await site.decide(Decision.QUERY)).state is JobState.COMMITTED
        disk.heal()
        assert (await site.wait_published()).published == 5

    run_scenario(disk, scenario)


@pytest.mark.parametrize("removed", [True, False])
def test_lost_committed_part_is_reported_and_the_next_published(
    removed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SimDisk()

    async def scenario(site: Site) -> None:
        parts = [await site.stage(number, 1, part_deltas(number, 20)) for number in range(2)]
        (path, _) = sorted(part_paths(disk))
        if removed:
            disk.remove(path)
        else:
            disk.flip(path, len(disk.peek(path)) - 200)
        await site.decide(Decision.COMMIT, parts)
        status = await site.wait_published()
        assert status.published + status.refused == 40
        assert status.refused == 20 if removed else 4 <= status.refused < 20
        assert keys_in(site.propagator)[-20:] == [delta.vector_id for delta in part_deltas(1, 20)]
        (refused_row,) = status.refused_rows
        assert (refused_row.part, refused_row.row, refused_row.vector_id) == (0, 20 - status.refused, "")
        assert str(refused_row).endswith(
            "PROCESSING_FAILED: the part's file is corrupted or missing: none of its last "
            f"{status.refused} rows, from this one on, is published"
        )

    run_scenario(disk, scenario)
    assert "cannot be published" in caplog.text
