"""Jobs in virtual time, frame by frame: expiry, permissions, and refused frames."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop import Settings
from delta_prop.server import job_table
from delta_prop.server.settings import ServerSettings
from delta_prop.testing import world as testing_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import Delta, Dot, opaque, transform
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.frames import (
    Ack,
    AckRange,
    BatchFrame,
    Decision,
    DeltaFrame,
    Hello,
    JobPart,
    JobState,
    JobStatus,
    Nack,
    OriginClaim,
    Subscribe,
)
from delta_prop_wire.packed_metadata import PackedMetadata
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.server.jobs import JOB, invalid_delta, keys_in, part_deltas, without_rows
from tests.delta_prop.server.jobs_virtual import (
    Site,
    frame,
    origin_of,
    part_paths,
    refusal_code,
    request_decision,
    run_scenario,
    stage_first_rows,
    staged_hello,
)
from tests.delta_prop.server.tokens import TokenFile, table

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.platform.ports import Threads

DAY_S = 60.0
"""A short day for these tests, because a server ticks twice per second."""
DAYS = {"job_decision_timeout_s": DAY_S, "job_name_retention_s": 7 * DAY_S}


# --- time


def test_default_timeouts_are_a_day_and_a_week() -> None:
    settings = ServerSettings()
    assert (settings.job_decision_timeout_s, settings.job_name_retention_s) == (86_400.0, 604_800.0)


def test_undecided_job_is_dropped_after_a_day() -> None:
    disk = SimDisk()

    async def scenario(site: Site) -> None:
        await site.stage(0, 1, part_deltas(0, 5))
        async with site.connected() as raw:
            await staged_hello(raw, 1, 1)
            await raw.send(frame(1, part_deltas(1, 2), 1))
            await raw.until_acked(2)
            await anyio.sleep(5)  # longer than the timeout of an idle connection
        await anyio.sleep(0.9 * DAY_S)
        await site.stage(2, 1, part_deltas(2, 5))
        await anyio.sleep(0.9 * DAY_S)
        assert (await site.decide(Decision.QUERY)).deltas == 12
        async with site.connected() as raw:
            await staged_hello(raw, 3, 1)
            site.jobs._table.jobs[JOB].touched_us -= int(DAY_S * 1e6)
            await anyio.sleep(61)
            await raw.send(frame(3, part_deltas(3, 1), 1))
            assert (await raw.until(Nack)).code is ErrorCode.UNKNOWN_JOB
        assert await refusal_code(site.decide(Decision.QUERY)) is ErrorCode.UNKNOWN_JOB
        assert part_paths(disk) == []
        assert (site.jobs.counts.expired, site.jobs.counts.staged_bytes, site.jobs.counts.active) == (1, 0, 0)
        await site.stage(0, 1, part_deltas(0, 5))

    run_scenario(disk, scenario, peer_timeout_s=1_000.0, heartbeat_interval_s=900.0, **DAYS)


def test_restart_does_not_extend_the_timeout_without_end() -> None:
    disk = SimDisk()

    async def stage(site: Site) -> None:
        await site.stage(0, 1, part_deltas(0, 5))

    async def check_after_restart(site: Site) -> None:
        assert (await site.decide(Decision.QUERY)).deltas == 5
        await anyio.sleep(1.3 * DAY_S)
        assert await refusal_code(site.decide(Decision.QUERY)) is ErrorCode.UNKNOWN_JOB

    run_scenario(disk, stage, **DAYS)
    run_scenario(disk, check_after_restart, **DAYS)
    assert part_paths(disk) == []


@pytest.mark.parametrize("days", [20, -20])
def test_clock_days_off_at_a_restart_drops_no_job_and_no_name(
    days: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimDisk()

    async def stage(site: Site) -> None:
        part = await site.stage(0, 1, part_deltas(0, 5), job="decided")
        await site.decide(Decision.COMMIT, [part], job="decided")
        await site.stage(0, 1, part_deltas(0, 5))

    async def check_after_restart(site: Site) -> None:
        await anyio.sleep(0.9 * DAY_S)
        assert (await site.decide(Decision.QUERY)).deltas == 5
        assert (await site.decide(Decision.QUERY, job="decided")).published == 5
        await anyio.sleep(0.4 * DAY_S)
        assert await refusal_code(site.decide(Decision.QUERY)) is ErrorCode.UNKNOWN_JOB
        await anyio.sleep(7 * DAY_S)
        assert await refusal_code(site.decide(Decision.QUERY, job="decided")) is ErrorCode.UNKNOWN_JOB

    run_scenario(disk, stage, **DAYS)
    monkeypatch.setattr(testing_world, "EPOCH_US", testing_world.EPOCH_US + days * 86_400_000_000)
    run_scenario(disk, check_after_restart, **DAYS)


def test_job_name_is_retained_for_a_week() -> None:
    disk = SimDisk()

    async def scenario(site: Site) -> None:
        part = await site.stage(0, 1, part_deltas(0, 5))
        await site.decide(Decision.COMMIT, [part])
        final = await site.wait_published()
        await anyio.sleep(6.7 * DAY_S)
        assert await site.decide(Decision.COMMIT, [part]) == final
        await anyio.sleep(0.6 * DAY_S)
        assert [path for path in disk.paths() if path.startswith("jobs")] == []
        await site.decide(Decision.COMMIT, [await site.stage(0, 1, part_deltas(0, 7))])
        assert await site.wait_published() == JobStatus(JobState.PUBLISHED, 7, published=2, duplicates=5)

    run_scenario(disk, scenario, **DAYS)


# --- tokens


def test_job_belongs_to_its_token() -> None:
    tokens = TokenFile(
        table("one", "t-1", publish=True, namespaces=["*"])
        + table("two", "t-2", publish=True, namespaces=["*"])
        + table("narrow", "t-3", publish=True, namespaces=["other"])
        + table("reads", "t-4", subscribe=True, namespaces=["*"])
    )

    async def scenario(site: Site) -> None:
        part = await site.stage(0, 1, part_deltas(0, 5), token="t-1")
        for token in ("t-2", "t-4", "wrong"):
            for decision in Decision:
                decision_call = site.decide(
                    decision, [part] if decision is Decision.COMMIT else [], token=token
                )
                assert await refusal_code(decision_call) is ErrorCode.UNAUTHORIZED
            assert (
                await refusal_code(site.stage(1, 1, part_deltas(1, 5), token=token)) is ErrorCode.UNAUTHORIZED
            )
        async with site.connected() as raw:
            await staged_hello(raw, 0, 1, "narrow", "t-3")
            await raw.send(frame(0, part_deltas(0, 2), 1))
            assert (await raw.until(Nack)).code is ErrorCode.UNAUTHORIZED
        await site.decide(Decision.COMMIT, [part], token="t-1")
        await anyio.sleep(1)
        assert (await site.decide(Decision.QUERY, token="t-1")).published == 5
        # Now the origin belongs to token `one`, whatever the job.
        assert (
            await refusal_code(site.stage(0, 1, part_deltas(0, 5), job="x", token="t-2"))
            is ErrorCode.UNAUTHORIZED
        )

    run_scenario(SimDisk(), scenario, tokens=tokens)


def test_token_rate_applies_to_staging() -> None:
    tokens = TokenFile(table("one", "t-1", publish=True, namespaces=["*"], rate=10, burst=10))

    async def scenario(site: Site) -> None:
        async with site.connected() as raw:
            await staged_hello(raw, 0, 1, token="t-1")
            await raw.send(frame(0, part_deltas(0, 10), 1), frame(0, part_deltas(0, 5, 10), 11))
            nack = await raw.until(Nack)
            assert (nack.code, nack.sequence) == (ErrorCode.RATE_LIMITED, 11)
            await anyio.sleep(0.6)
            await raw.send(frame(0, part_deltas(0, 5, 10), 11, 16))
            assert (await raw.until_acked(20)).ranges[-1] == AckRange(16, 20, 10)

    run_scenario(SimDisk(), scenario, tokens=tokens)


# --- loops


def test_jobs_run_on_trio() -> None:
    deltas = [*part_deltas(0, 20), invalid_delta(0, 20), *part_deltas(0, 20, 21)]

    async def scenario(site: Site) -> None:
        await site.decide(Decision.COMMIT, [await site.stage(0, 1, deltas)])
        assert without_rows(await site.wait_published()) == JobStatus(
            JobState.PUBLISHED, 41, published=40, refused=1
        )
        assert keys_in(site.propagator) == [delta.vector_id for delta in deltas if delta is not deltas[20]]

    run_scenario(SimDisk(), scenario, backend="trio")


# --- frames


def test_duplicates_overlaps_and_gaps_are_reported() -> None:
    async def scenario(site: Site) -> None:
        async with site.connected() as raw:
            await stage_first_rows(site, raw)
            await raw.send(frame(0, part_deltas(0, 4), 1, 5))
            assert (await raw.until_acked(8)).ranges == (AckRange(5, 8, 0, True),)
            await raw.send(frame(0, part_deltas(0, 4, 2), 3, 9))
            nack = await raw.until(Nack)
            assert (nack.code, nack.details) == (ErrorCode.OVERLAP, {"watermark": 4})
            await raw.send(frame(0, part_deltas(0, 4, 5), 6, 13))
            assert (await raw.until(Nack)).code is ErrorCode.DEP_TIMEOUT
            await raw.send(frame(0, part_deltas(0, 1, 4), 5, 17))
            await raw.until_acked(17)
        assert (await site.decide(Decision.QUERY)).deltas == 5
        async with site.connected() as raw:
            ack = await staged_hello(raw, 0, 1)
            assert ack.welcome.origins[0].watermark == 5

    run_scenario(SimDisk(), scenario)


class HeldThreads:
    """Threads that run no call before `opened` is set."""

    def __init__(self, threads: Threads) -> None:
        self.opened = anyio.Event()
        self._threads = threads

    async def run(self, function: Callable[[], Any]) -> Any:
        await self.opened.wait()
        return await self._threads.run(function)


@pytest.mark.parametrize("sync_fails", [False, True])
def test_duplicate_of_an_unwritten_batch_waits_for_it(sync_fails: bool) -> None:
    disk = SimDisk()

    async def scenario(site: Site) -> None:
        async with site.connected() as first, site.connected() as second:
            await staged_hello(first, 0, 1)
            site.jobs._threads = held_threads = HeldThreads(site.jobs._threads)  # type: ignore[assignment]
            await first.send(frame(0, part_deltas(0, 4), 1))
            await anyio.sleep(0.1)
            await staged_hello(second, 0, 1)
            await second.send(frame(0, part_deltas(0, 4), 1))
            await anyio.sleep(0.1)
            if sync_fails:
                disk.fail(lambda call: call.name == "sync" and call.path.endswith(".part"), errno.EIO)
            held_threads.opened.set()
            if sync_fails:
                for client in (first, second):
                    assert (await client.until(Nack)).code is ErrorCode.LOG_FAILED
                return
            assert (await second.until_acked(4)).ranges == (AckRange(1, 4, 0, True),)
            await first.send(frame(0, part_deltas(0, 4, 4), 5))
            nack = await first.until(Nack)
            assert (nack.code, nack.details) == (ErrorCode.FENCED, {"origin": origin_of(0), "epoch": 0})
            await second.send(frame(0, part_deltas(0, 4, 4), 5))
            await second.until_acked(8)

    run_scenario(disk, scenario)


def test_row_with_a_transform_ends_its_attempt() -> None:
    async def scenario(site: Site) -> None:
        async with site.connected() as raw:
            await staged_hello(raw, 0, 1)
            await raw.send(frame(0, [*part_deltas(0, 2), Delta("v", transform("double"))], 1, 1))
            nack = await raw.until(Nack)
            assert (nack.code, nack.field, nack.row) == (ErrorCode.INVALID_DELTA, "op", 2)

    run_scenario(SimDisk(), scenario)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"clock": (Dot(5, 1),)}, "clock"),
        ({"parents": (Dot(5, 1),)}, "parents"),
        ({"id": bytes(16)}, "id"),
        ({"expect": Dot(5, 1)}, "expect"),
        ({"counters": [1, 3]}, "counters"),
    ],
)
def test_rows_with_dependencies_cannot_be_staged(fields: dict[str, object], field: str) -> None:
    async def scenario(site: Site) -> None:
        delta_fields = {key: value for key, value in fields.items() if key not in ("clock", "counters")}
        deltas = [Delta(f"v{row}", opaque(b"x"), **delta_fields) for row in range(2)]  # type: ignore[arg-type]
        if field == "id":
            deltas[1] = Delta("v1", opaque(b"x"), id=bytes([1] * 16))
        batch_fields = {key: value for key, value in fields.items() if key in ("clock", "counters")}
        batch = encode_batch(deltas, origin=origin_of(0), base=1, epoch=0, **batch_fields)  # type: ignore[arg-type]
        async with site.connected() as raw:
            await staged_hello(raw, 0, 1)
            await raw.send(BatchFrame(1, batch, ack_wanted=True))
            nack = await raw.until(Nack)
            assert (nack.code, nack.field) == (ErrorCode.INVALID_DELTA, field)
            await raw.send(frame(0, part_deltas(0, 2), 1, 3))
            assert (await raw.until(Nack)).code is ErrorCode.INVALID_DELTA

    run_scenario(SimDisk(), scenario)


@pytest.mark.parametrize(
    ("invalid", "field"),
    [
        (Delta("v", transform("double")), "op"),
        (Delta("v", opaque(b"x"), topics=("",)), "topics"),
        (Delta("v", opaque(b"x"), metadata=PackedMetadata(b"\x81\x01\xc0")), "metadata"),
    ],
)
def test_staged_row_beyond_a_bound_ends_only_its_attempt(invalid: Delta, field: str) -> None:
    async def scenario(site: Site) -> None:
        batch = encode_batch([*part_deltas(0, 1), invalid], origin=origin_of(0), base=1, epoch=0)
        async with site.connected() as raw, site.connected() as other:
            await staged_hello(raw, 0, 1)
            await raw.send(BatchFrame(1, batch, ack_wanted=True))
            nack = await raw.until(Nack)
            assert (nack.code, nack.field, nack.row) == (ErrorCode.INVALID_DELTA, field, 1)
            await raw.send(frame(0, part_deltas(0, 2), 1, 3))
            assert (await raw.until(Nack)).code is ErrorCode.INVALID_DELTA
            await staged_hello(other, 0, 2)
            await other.send(frame(0, part_deltas(0, 2), 1))
            await other.until_acked(2)

    run_scenario(SimDisk(), scenario)


def test_frames_foreign_to_staging_are_refused() -> None:
    async def scenario(site: Site) -> None:
        async with site.connected() as raw:
            await stage_first_rows(site, raw)
            await raw.send(DeltaFrame(5, Delta("a", opaque(b"x")), True))
            assert (await raw.until(Nack)).code is ErrorCode.BAD_REQUEST
            await raw.send(frame(1, part_deltas(1, 1), 1, 6))
            assert (await raw.until(Nack)).code is ErrorCode.UNKNOWN_ORIGIN
            await raw.send(Subscribe(2, Hello(job=JobPart("other", 0, 1))))
            assert (await raw.until(Nack)).code is ErrorCode.BAD_REQUEST
            claims = (OriginClaim(origin_of(1)), OriginClaim(origin_of(2)))
            await raw.send(Subscribe(3, Hello(origins=claims)))
            assert (await raw.until(Nack)).code is ErrorCode.BAD_REQUEST
        async with site.connected() as raw:
            await raw.hello(origin_of(5))
            await raw.send(Subscribe(2, Hello(job=JobPart(JOB, 0, 7))))
            assert (await raw.until(Nack)).code is ErrorCode.BAD_REQUEST
        async with site.connected() as raw:  # the first hello names no job
            await raw.hello()
            await raw.send(Subscribe(2, Hello(origins=(OriginClaim(origin_of(0)),), job=JobPart(JOB, 0, 2))))
            assert (await raw.until(Ack)).welcome.origins == ((origin_of(0), 0, 0),)
            await raw.send(frame(0, part_deltas(0, 3), 1))
            await raw.until_acked(3)
        assert keys_in(site.propagator) == []

    run_scenario(SimDisk(), scenario)


def test_batch_larger_than_the_queue_is_refused_at_once() -> None:
    async def scenario(site: Site) -> None:
        async with site.connected() as raw:
            await staged_hello(raw, 0, 1)
            await raw.send(frame(0, part_deltas(0, 11), 1))
            assert (await raw.until(Nack)).code is ErrorCode.TOO_LARGE

    run_scenario(SimDisk(), scenario, settings=Settings(queue_deltas_max=10))


def test_unwritten_bytes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_table, "UNWRITTEN_BYTES_MAX", 400)

    async def scenario(site: Site) -> None:
        async with site.connected() as raw:
            await staged_hello(raw, 0, 1)
            site.jobs._threads = held_threads = HeldThreads(site.jobs._threads)  # type: ignore[assignment]
            await raw.send(frame(0, part_deltas(0, 4), 1), frame(0, part_deltas(0, 4, 4), 5))
            nack = await raw.until(Nack)
            assert (nack.code, nack.sequence) == (ErrorCode.QUEUE_FULL, 5)
            held_threads.opened.set()
            await raw.until_acked(4)
            await raw.send(frame(0, part_deltas(0, 4, 4), 5, 9))
            await raw.until_acked(12)

    run_scenario(SimDisk(), scenario)


def test_attempts_are_bounded_until_published_or_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_table, "ATTEMPTS_MAX", 3)
    disk = SimDisk()

    async def scenario(site: Site) -> None:
        parts = [await site.stage(number, 1, part_deltas(number, 1)) for number in range(3)]
        assert await refusal_code(site.stage(3, 1, part_deltas(3, 1))) is ErrorCode.RATE_LIMITED
        await site.decide(Decision.COMMIT, parts[:2])
        await site.wait_published()
        for number in range(3):
            await site.stage(number, 1, part_deltas(number, 1), job="other")
        assert await refusal_code(site.stage(3, 1, part_deltas(3, 1), job="other")) is ErrorCode.RATE_LIMITED

    async def check_after_restart(site: Site) -> None:
        assert await refusal_code(site.stage(3, 1, part_deltas(3, 1), job="other")) is ErrorCode.RATE_LIMITED
        await site.decide(Decision.ABORT, job="other")
        await site.stage(3, 1, part_deltas(3, 1), job="other")

    run_scenario(disk, scenario)
    run_scenario(disk, check_after_restart)


def test_number_of_jobs_is_bounded() -> None:
    async def scenario(site: Site) -> None:
        for number in range(3):
            await site.stage(0, 1, part_deltas(0, 1), job=f"job-{number}")
        assert await refusal_code(site.stage(0, 1, part_deltas(0, 1), job="more")) is ErrorCode.RATE_LIMITED
        await site.decide(Decision.ABORT, job="job-1")
        await site.stage(0, 1, part_deltas(0, 1), job="more")

    run_scenario(SimDisk(), scenario, jobs_max=3)


def test_shutdown_answers_staged_batches_and_decisions() -> None:
    disk = SimDisk()
    answers: list[object] = []

    async def scenario(site: Site) -> None:
        part = await site.stage(0, 1, part_deltas(0, 4))
        async with site.connected() as raw, site.connected() as driver:
            await staged_hello(raw, 1, 1)
            await driver.hello()
            await raw.send(frame(1, part_deltas(1, 4), 1))
            await anyio.sleep(0.0001)
            async with anyio.create_task_group() as tasks:

                async def send_commit() -> None:
                    answers.append(await request_decision(driver, Decision.COMMIT, [part]))

                tasks.start_soon(send_commit)
                await anyio.sleep(0.003)
                site.service.stop()
                answers.append(await raw.until_acked(4))

    run_scenario(disk, scenario)
    assert len(answers) == 2
