"""Jobs on disks and logs that fail, are full, or lose what was not synced; in virtual time."""

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
from tests.delta_prop.server.jobs import JOB, at_fault, block_of, counts, keys_in, rows
from tests.delta_prop.server.jobs_virtual import (
    NO_ROOM_KEPT,
    Site,
    begun,
    frame,
    on,
    origin_of,
    parts_of,
    staged_hello,
)


def test_a_full_disk_refuses_what_is_staged_until_there_is_room() -> None:
    disk = SimDisk()
    big = [Delta(f"v{row}", opaque(bytes(40_000))) for row in range(4)]

    async def story(at: Site) -> None:
        disk.capacity_bytes = disk.used_bytes + 100_000
        async with at.connected() as raw:
            await staged_hello(raw, 0, 1)
            await raw.send(frame(0, big[:2], 1))
            await raw.told(2)
            for number in range(3):
                await raw.send(frame(0, big[2:], 3, 3 + 2 * number))
                nack = await raw.until(Nack)
                assert (nack.code, nack.retry_after_ms) == (ErrorCode.LOG_FULL, 1_000)
            disk.capacity_bytes = None
            await anyio.sleep(1)
            await raw.send(frame(0, big[2:], 3, 9))
            while not isinstance(found := await raw.next(), Ack) or found.sequence < 10:
                if isinstance(found, Nack):  # the disk had not been asked again yet
                    await anyio.sleep(1)
                    await raw.send(frame(0, big[2:], 3, 11))
        await at.decide(Decision.COMMIT, [StagedPart(0, 1, 4)])
        assert (await at.published()).published == 4

    on(disk, story, log=NO_ROOM_KEPT)


def test_a_disk_that_fails_at_the_decision_decides_nothing() -> None:
    disk = SimDisk()

    async def story(at: Site) -> None:
        part = await at.stage(0, 1, rows(0, 4))
        for name in ("open", "write", "sync", "rename"):
            disk.fail(lambda call, name=name: call.name == name and "job" in call.path, errno.EIO)
            with pytest.raises(Refused) as told:
                await at.decide(Decision.COMMIT, [part])
            assert (told.value.code, told.value.retryable) == (ErrorCode.LOG_FAILED, True)
            assert (await at.decide(Decision.QUERY)).state is JobState.STAGING
        await at.decide(Decision.COMMIT, [part])
        assert (await at.published()).published == 4

    on(disk, story, log=NO_ROOM_KEPT)


@pytest.mark.parametrize("name", ["write", "sync"])
def test_a_disk_that_fails_while_staging_loses_nothing(name: str) -> None:
    disk = SimDisk()

    async def story(at: Site) -> None:
        async with at.connected() as raw:
            await begun(at, raw)
            disk.fail(lambda call: call.name == name and call.path.endswith(".part"), errno.EIO)
            await raw.send(frame(0, rows(0, 4, 4), 5))
            assert (await raw.until(Nack)).code is ErrorCode.LOG_FAILED
            await raw.send(frame(0, rows(0, 4, 4), 5, 9))
            await raw.told(12)
        await at.decide(Decision.COMMIT, [StagedPart(0, 1, 8)])
        await at.published()
        assert keys_in(at.propagator) == [one.vector_id for one in rows(0, 8)]

    on(disk, story)


@pytest.mark.parametrize("times", [1, 7])
def test_a_log_that_fails_amid_publishing_comes_back_and_nothing_is_lost(times: int) -> None:
    disk = SimDisk()
    deltas = rows(0, 200)
    deltas[150] = at_fault(0, 150)
    sound = [one.vector_id for one in deltas if one is not deltas[150]]

    async def story(at: Site) -> None:
        part = await at.stage(0, 1, deltas)
        seen = 0

        def strikes(call: object) -> bool:
            nonlocal seen
            if call.name in ("write", "sync") and call.path.startswith("streams"):  # type: ignore[attr-defined]
                seen += 1
                return seen > 1
            return False

        await at.decide(Decision.COMMIT, [part])
        disk.fail(strikes, errno.EIO, times=times)
        ended = await at.published()
        assert at.propagator.internals().pipeline.recoveries
        assert counts(ended) == JobStatus(JobState.PUBLISHED, 200, published=199, refused=1)
        assert keys_in(at.propagator) == sound
        assert (at.jobs.counts.published, at.jobs.counts.refused) == (199, 1)

    on(disk, story, log=NO_ROOM_KEPT)


def test_a_full_log_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_publishing, "UNACKED_BYTES_MAX", 1)

    async def story(at: Site) -> None:
        part = await at.stage(0, 1, rows(0, 40))
        chain = at.propagator.internals().pipeline
        offer, refused = chain.offer, 0

        def full(work: object, now: float) -> object:
            nonlocal refused
            if refused < 5:
                refused += 1
                work.receipt.refuse(Refused(ErrorCode.LOG_FULL, "full", retry_after_ms=200))  # type: ignore[attr-defined]
                return work.receipt  # type: ignore[attr-defined]
            return offer(work, now)  # type: ignore[arg-type]

        monkeypatch.setattr(chain, "offer", full)
        began = anyio.current_time()
        await at.decide(Decision.COMMIT, [part])
        assert await at.published() == JobStatus(JobState.PUBLISHED, 40, published=40)
        assert anyio.current_time() - began >= 1.0
        assert keys_in(at.propagator) == [one.vector_id for one in rows(0, 40)]

    on(SimDisk(), story)


def test_who_takes_its_origin_amid_publishing_does_not_stop_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(at: Site) -> None:
        part = await at.stage(0, 1, rows(0, 40))
        chain, offers = at.propagator.internals().pipeline, 0
        offer = chain.offer

        def fenced(work: Any, now: float) -> Any:
            nonlocal offers
            offers += 1
            if offers in (3, 7):
                chain.claim([OriginClaim(origin_of(0), 0)], work.sender.owner, now)
            return offer(work, now)

        monkeypatch.setattr(chain, "offer", fenced)
        await at.decide(Decision.COMMIT, [part])
        with anyio.fail_after(5):
            assert await at.published() == JobStatus(JobState.PUBLISHED, 40, published=40)
        assert keys_in(at.propagator) == [one.vector_id for one in rows(0, 40)]

    on(SimDisk(), story)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("power", [True, False])
def test_what_is_found_in_the_log_is_not_taken_for_kept(power: bool, seed: int) -> None:
    """Some of a part is in the log and not synced when the publisher has to begin again; then it is lost."""
    disk = SimDisk(seed)
    wanted = [one.vector_id for one in rows(0, 40)]

    async def story(at: Site) -> None:
        part = await at.stage(0, 1, rows(0, 40))
        chain, offers = at.propagator.internals().pipeline, 0
        offer = chain.offer

        def held_up(work: Any, now: float) -> Any:
            nonlocal offers
            offers += 1
            if offers == 10:
                work.receipt.refuse(Refused(ErrorCode.QUEUE_FULL, "full", retry_after_ms=1))
                return work.receipt
            return offer(work, now)

        chain.offer = held_up  # type: ignore[method-assign]
        if not power:
            disk.fail(lambda call: call.name == "sync" and call.path.startswith("streams"), errno.EIO)
        await at.decide(Decision.COMMIT, [part])
        while (await at.decide(Decision.QUERY)).state is not JobState.PUBLISHED:  # noqa: ASYNC110
            await anyio.sleep(0.001)
        if power:
            disk.crash_at(disk.calls + 1, "before")
        else:
            assert chain.recoveries
            assert keys_in(at.propagator) == wanted

    async def later(at: Site) -> None:
        assert (await at.decide(Decision.QUERY)).published == 40
        assert keys_in(at.propagator) == wanted

    try:
        on(disk, story, seed=seed, log=NO_ROOM_KEPT, thread_delay_s_max=0.1)
    except BaseException:
        if not disk.is_off:
            raise
    if power:
        on(disk.crash(seed), later, log=NO_ROOM_KEPT)


def test_a_job_whose_file_cannot_be_read_now_holds_up_no_other() -> None:
    disk = SimDisk()

    async def story(at: Site) -> None:
        first = await at.stage(0, 1, rows(0, 5))
        async with at.connected() as raw:
            origin = origin_of(0, "second")
            claims = (OriginClaim(origin),)
            await raw.send(Subscribe(1, Hello(origins=claims, job=JobPart("second", 0, 1))))
            await raw.next()
            batch = block_of(rows(1, 5)).encode(origin=origin, base=1, epoch=0)
            await raw.send(BatchFrame(1, batch, ack_wanted=True))
            await raw.told(5)
        path = next(one for one in parts_of(disk) if stem_of(JOB) in one)
        disk.fail(lambda call: call.path == path and call.name == "read", errno.EIO, times=None)
        await at.decide(Decision.COMMIT, [first])
        await at.decide(Decision.COMMIT, [StagedPart(0, 1, 5)], job="second")
        await anyio.sleep(20)
        assert (await at.decide(Decision.QUERY, job="second")).state is JobState.PUBLISHED
        assert (await at.decide(Decision.QUERY)).state is JobState.COMMITTED
        disk.heal()
        assert (await at.published()).published == 5

    on(disk, story)


@pytest.mark.parametrize("gone", [True, False])
def test_a_committed_part_that_cannot_be_read_is_told_and_the_next_goes_on(
    gone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SimDisk()

    async def story(at: Site) -> None:
        parts = [await at.stage(number, 1, rows(number, 20)) for number in range(2)]
        (path, _) = sorted(parts_of(disk))
        if gone:
            disk.remove(path)
        else:
            disk.flip(path, len(disk.peek(path)) - 200)
        await at.decide(Decision.COMMIT, parts)
        ended = await at.published()
        assert ended.published + ended.refused == 40
        assert ended.refused == 20 if gone else 4 <= ended.refused < 20
        assert keys_in(at.propagator)[-20:] == [one.vector_id for one in rows(1, 20)]
        (told,) = ended.refused_rows
        assert (told.part, told.row, told.vector_id) == (0, 20 - ended.refused, "")
        assert str(told).endswith(
            "PROCESSING_FAILED: the part's file is corrupted or missing: none of its last "
            f"{ended.refused} rows, from this one on, is published"
        )

    on(disk, story)
    assert "cannot be published" in caplog.text
