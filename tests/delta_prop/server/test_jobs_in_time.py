"""Jobs in virtual time, frame by frame: what expires, who may, what may be sent."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop import Settings
from delta_prop.server import jobs
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
from tests.delta_prop.server.jobs import JOB, at_fault, counts, keys_in, rows
from tests.delta_prop.server.jobs_virtual import (
    Site,
    begun,
    code_of,
    decided,
    frame,
    on,
    origin_of,
    parts_of,
    staged_hello,
)
from tests.delta_prop.server.tokens import File, table

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.ports import Threads

DAY_S = 60.0
"""A short one: a server ticks twice a second."""
DAYS = {"job_decision_timeout_s": DAY_S, "job_name_retention_s": 7 * DAY_S}


# --- time


def test_a_job_is_kept_a_day_and_a_name_a_week() -> None:
    settings = ServerSettings()
    assert (settings.job_decision_timeout_s, settings.job_name_retention_s) == (86_400.0, 604_800.0)


def test_what_nobody_decides_of_is_dropped_after_a_day() -> None:
    disk = SimDisk()

    async def story(at: Site) -> None:
        await at.stage(0, 1, rows(0, 5))
        async with at.connected() as raw:
            await staged_hello(raw, 1, 1)
            await raw.send(frame(1, rows(1, 2), 1))
            await raw.told(2)
            await anyio.sleep(5)  # a connection would not live so long
        await anyio.sleep(0.9 * DAY_S)
        await at.stage(2, 1, rows(2, 5))
        await anyio.sleep(0.9 * DAY_S)
        assert (await at.decide(Decision.QUERY)).deltas == 12
        async with at.connected() as raw:
            await staged_hello(raw, 3, 1)
            at.jobs._jobs[JOB].touched_us -= int(DAY_S * 1e6)
            await anyio.sleep(61)
            await raw.send(frame(3, rows(3, 1), 1))
            assert (await raw.until(Nack)).code is ErrorCode.UNKNOWN_JOB
        assert await code_of(at.decide(Decision.QUERY)) is ErrorCode.UNKNOWN_JOB
        assert parts_of(disk) == []
        assert (at.jobs.counts.expired, at.jobs.counts.staged_bytes, at.jobs.counts.active) == (1, 0, 0)
        await at.stage(0, 1, rows(0, 5))

    on(disk, story, peer_timeout_s=1_000.0, heartbeat_interval_s=900.0, **DAYS)


def test_a_restart_does_not_begin_the_day_anew_for_ever() -> None:
    disk = SimDisk()

    async def stage(at: Site) -> None:
        await at.stage(0, 1, rows(0, 5))

    async def later(at: Site) -> None:
        assert (await at.decide(Decision.QUERY)).deltas == 5
        await anyio.sleep(1.3 * DAY_S)
        assert await code_of(at.decide(Decision.QUERY)) is ErrorCode.UNKNOWN_JOB

    on(disk, stage, **DAYS)
    on(disk, later, **DAYS)
    assert parts_of(disk) == []


@pytest.mark.parametrize("days", [20, -20])
def test_clock_days_off_at_a_restart_drops_no_job_and_no_name(
    days: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimDisk()

    async def stage(at: Site) -> None:
        part = await at.stage(0, 1, rows(0, 5), job="decided")
        await at.decide(Decision.COMMIT, [part], job="decided")
        await at.stage(0, 1, rows(0, 5))

    async def later(at: Site) -> None:
        await anyio.sleep(0.9 * DAY_S)
        assert (await at.decide(Decision.QUERY)).deltas == 5
        assert (await at.decide(Decision.QUERY, job="decided")).published == 5
        await anyio.sleep(0.4 * DAY_S)
        assert await code_of(at.decide(Decision.QUERY)) is ErrorCode.UNKNOWN_JOB
        await anyio.sleep(7 * DAY_S)
        assert await code_of(at.decide(Decision.QUERY, job="decided")) is ErrorCode.UNKNOWN_JOB

    on(disk, stage, **DAYS)
    monkeypatch.setattr(testing_world, "EPOCH_US", testing_world.EPOCH_US + days * 86_400_000_000)
    on(disk, later, **DAYS)


def test_a_name_is_remembered_for_a_week() -> None:
    disk = SimDisk()

    async def story(at: Site) -> None:
        part = await at.stage(0, 1, rows(0, 5))
        await at.decide(Decision.COMMIT, [part])
        ended = await at.published()
        await anyio.sleep(6.7 * DAY_S)
        assert await at.decide(Decision.COMMIT, [part]) == ended
        await anyio.sleep(0.6 * DAY_S)
        assert [path for path in disk.paths() if path.startswith("jobs")] == []
        await at.decide(Decision.COMMIT, [await at.stage(0, 1, rows(0, 7))])
        assert await at.published() == JobStatus(JobState.PUBLISHED, 7, published=2, duplicates=5)

    on(disk, story, **DAYS)


# --- who


def test_a_job_is_its_tokens_own() -> None:
    tokens = File(
        table("one", "t-1", publish=True, namespaces=["*"])
        + table("two", "t-2", publish=True, namespaces=["*"])
        + table("narrow", "t-3", publish=True, namespaces=["other"])
        + table("reads", "t-4", subscribe=True, namespaces=["*"])
    )

    async def story(at: Site) -> None:
        part = await at.stage(0, 1, rows(0, 5), token="t-1")
        for token in ("t-2", "t-4", "wrong"):
            for decision in Decision:
                asked = at.decide(decision, [part] if decision is Decision.COMMIT else [], token=token)
                assert await code_of(asked) is ErrorCode.UNAUTHORIZED
            assert await code_of(at.stage(1, 1, rows(1, 5), token=token)) is ErrorCode.UNAUTHORIZED
        async with at.connected() as raw:
            await staged_hello(raw, 0, 1, "narrow", "t-3")
            await raw.send(frame(0, rows(0, 2), 1))
            assert (await raw.until(Nack)).code is ErrorCode.UNAUTHORIZED
        await at.decide(Decision.COMMIT, [part], token="t-1")
        await anyio.sleep(1)
        assert (await at.decide(Decision.QUERY, token="t-1")).published == 5
        # Its origin is token one's now, under whatever job.
        assert await code_of(at.stage(0, 1, rows(0, 5), job="x", token="t-2")) is ErrorCode.UNAUTHORIZED

    on(SimDisk(), story, tokens=tokens)


def test_the_rate_of_a_token_holds_while_staging() -> None:
    tokens = File(table("one", "t-1", publish=True, namespaces=["*"], rate=10, burst=10))

    async def story(at: Site) -> None:
        async with at.connected() as raw:
            await staged_hello(raw, 0, 1, token="t-1")
            await raw.send(frame(0, rows(0, 10), 1), frame(0, rows(0, 5, 10), 11))
            nack = await raw.until(Nack)
            assert (nack.code, nack.sequence) == (ErrorCode.RATE_LIMITED, 11)
            await anyio.sleep(0.6)
            await raw.send(frame(0, rows(0, 5, 10), 11, 16))
            assert (await raw.told(20)).ranges[-1] == AckRange(16, 20, 10)

    on(SimDisk(), story, tokens=tokens)


# --- loops


def test_it_runs_on_another_loop() -> None:
    deltas = [*rows(0, 20), at_fault(0, 20), *rows(0, 20, 21)]

    async def story(at: Site) -> None:
        await at.decide(Decision.COMMIT, [await at.stage(0, 1, deltas)])
        assert counts(await at.published()) == JobStatus(JobState.PUBLISHED, 41, published=40, refused=1)
        assert keys_in(at.propagator) == [one.vector_id for one in deltas if one is not deltas[20]]

    on(SimDisk(), story, backend="trio")


# --- frames


def test_repeats_overlaps_and_gaps_are_told() -> None:
    async def story(at: Site) -> None:
        async with at.connected() as raw:
            await begun(at, raw)
            await raw.send(frame(0, rows(0, 4), 1, 5))
            assert (await raw.told(8)).ranges == (AckRange(5, 8, 0, True),)
            await raw.send(frame(0, rows(0, 4, 2), 3, 9))
            nack = await raw.until(Nack)
            assert (nack.code, nack.details) == (ErrorCode.OVERLAP, {"watermark": 4})
            await raw.send(frame(0, rows(0, 4, 5), 6, 13))
            assert (await raw.until(Nack)).code is ErrorCode.DEP_TIMEOUT
            await raw.send(frame(0, rows(0, 1, 4), 5, 17))
            await raw.told(17)
        assert (await at.decide(Decision.QUERY)).deltas == 5
        async with at.connected() as raw:
            ack = await staged_hello(raw, 0, 1)
            assert ack.welcome.origins[0].watermark == 5

    on(SimDisk(), story)


class Gate:
    """A thread that does nothing before it is let."""

    def __init__(self, threads: Threads) -> None:
        self.opened = anyio.Event()
        self._threads = threads

    async def run(self, function: Callable[[], Any]) -> Any:
        await self.opened.wait()
        return await self._threads.run(function)


@pytest.mark.parametrize("fails", [False, True])
def test_a_repeat_of_what_is_being_written_waits_for_it(fails: bool) -> None:
    disk = SimDisk()

    async def story(at: Site) -> None:
        async with at.connected() as first, at.connected() as second:
            await staged_hello(first, 0, 1)
            at.jobs._threads = gate = Gate(at.jobs._threads)  # type: ignore[assignment]
            await first.send(frame(0, rows(0, 4), 1))
            await anyio.sleep(0.1)
            await staged_hello(second, 0, 1)
            await second.send(frame(0, rows(0, 4), 1))
            await anyio.sleep(0.1)
            if fails:
                disk.fail(lambda call: call.name == "sync" and call.path.endswith(".part"), errno.EIO)
            gate.opened.set()
            if fails:
                for one in (first, second):
                    assert (await one.until(Nack)).code is ErrorCode.LOG_FAILED
                return
            assert (await second.told(4)).ranges == (AckRange(1, 4, 0, True),)
            await first.send(frame(0, rows(0, 4, 4), 5))
            nack = await first.until(Nack)
            assert (nack.code, nack.details) == (ErrorCode.FENCED, {"origin": origin_of(0), "epoch": 0})
            await second.send(frame(0, rows(0, 4, 4), 5))
            await second.told(8)

    on(disk, story)


def test_row_that_names_a_transform_ends_its_attempt() -> None:
    async def story(at: Site) -> None:
        async with at.connected() as raw:
            await staged_hello(raw, 0, 1)
            await raw.send(frame(0, [*rows(0, 2), Delta("v", transform("double"))], 1, 1))
            nack = await raw.until(Nack)
            assert (nack.code, nack.field, nack.row) == (ErrorCode.INVALID_DELTA, "op", 2)

    on(SimDisk(), story)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"clock": (Dot(5, 1),)}, "clock"),
        ({"parents": (Dot(5, 1),)}, "parents"),
        ({"id": bytes(16)}, "id"),
        ({"expect": Dot(5, 1)}, "expect"),
        ({"counters": [1, 3]}, "counters"),
    ],
)
def test_what_depends_on_other_deltas_cannot_wait_aside(more: dict[str, object], field: str) -> None:
    async def story(at: Site) -> None:
        named = {key: value for key, value in more.items() if key not in ("clock", "counters")}
        deltas = [Delta(f"v{row}", opaque(b"x"), **named) for row in range(2)]  # type: ignore[arg-type]
        if field == "id":
            deltas[1] = Delta("v1", opaque(b"x"), id=bytes([1] * 16))
        others = {key: value for key, value in more.items() if key in ("clock", "counters")}
        batch = encode_batch(deltas, origin=origin_of(0), base=1, epoch=0, **others)  # type: ignore[arg-type]
        async with at.connected() as raw:
            await staged_hello(raw, 0, 1)
            await raw.send(BatchFrame(1, batch, ack_wanted=True))
            nack = await raw.until(Nack)
            assert (nack.code, nack.field) == (ErrorCode.INVALID_DELTA, field)
            await raw.send(frame(0, rows(0, 2), 1, 3))
            assert (await raw.until(Nack)).code is ErrorCode.INVALID_DELTA

    on(SimDisk(), story)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (Delta("v", transform("double")), "op"),
        (Delta("v", opaque(b"x"), topics=("",)), "topics"),
        (Delta("v", opaque(b"x"), metadata=PackedMetadata(b"\x81\x01\xc0")), "metadata"),
    ],
)
def test_staged_row_beyond_a_bound_ends_its_attempt_alone(wrong: Delta, field: str) -> None:
    async def story(at: Site) -> None:
        batch = encode_batch([*rows(0, 1), wrong], origin=origin_of(0), base=1, epoch=0)
        async with at.connected() as raw, at.connected() as other:
            await staged_hello(raw, 0, 1)
            await raw.send(BatchFrame(1, batch, ack_wanted=True))
            nack = await raw.until(Nack)
            assert (nack.code, nack.field, nack.row) == (ErrorCode.INVALID_DELTA, field, 1)
            await raw.send(frame(0, rows(0, 2), 1, 3))
            assert (await raw.until(Nack)).code is ErrorCode.INVALID_DELTA
            await staged_hello(other, 0, 2)
            await other.send(frame(0, rows(0, 2), 1))
            await other.told(2)

    on(SimDisk(), story)


def test_frames_that_have_no_place_there_are_refused() -> None:
    async def story(at: Site) -> None:
        async with at.connected() as raw:
            await begun(at, raw)
            await raw.send(DeltaFrame(5, Delta("a", opaque(b"x")), True))
            assert (await raw.until(Nack)).code is ErrorCode.BAD_REQUEST
            await raw.send(frame(1, rows(1, 1), 1, 6))
            assert (await raw.until(Nack)).code is ErrorCode.UNKNOWN_ORIGIN
            await raw.send(Subscribe(2, Hello(job=JobPart("other", 0, 1))))
            assert (await raw.until(Nack)).code is ErrorCode.BAD_REQUEST
            claims = (OriginClaim(origin_of(1)), OriginClaim(origin_of(2)))
            await raw.send(Subscribe(3, Hello(origins=claims)))
            assert (await raw.until(Nack)).code is ErrorCode.BAD_REQUEST
        async with at.connected() as raw:
            await raw.hello(origin_of(5))
            await raw.send(Subscribe(2, Hello(job=JobPart(JOB, 0, 7))))
            assert (await raw.until(Nack)).code is ErrorCode.BAD_REQUEST
        async with at.connected() as raw:  # one that asked for the features first
            await raw.hello()
            await raw.send(Subscribe(2, Hello(origins=(OriginClaim(origin_of(0)),), job=JobPart(JOB, 0, 2))))
            assert (await raw.until(Ack)).welcome.origins == ((origin_of(0), 0, 0),)
            await raw.send(frame(0, rows(0, 3), 1))
            await raw.told(3)
        assert keys_in(at.propagator) == []

    on(SimDisk(), story)


def test_a_batch_that_the_queue_would_never_take_is_refused_at_once() -> None:
    async def story(at: Site) -> None:
        async with at.connected() as raw:
            await staged_hello(raw, 0, 1)
            await raw.send(frame(0, rows(0, 11), 1))
            assert (await raw.until(Nack)).code is ErrorCode.TOO_LARGE

    on(SimDisk(), story, settings=Settings(queue_deltas_max=10))


def test_what_waits_for_the_disk_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "UNWRITTEN_BYTES_MAX", 400)

    async def story(at: Site) -> None:
        async with at.connected() as raw:
            await staged_hello(raw, 0, 1)
            at.jobs._threads = gate = Gate(at.jobs._threads)  # type: ignore[assignment]
            await raw.send(frame(0, rows(0, 4), 1), frame(0, rows(0, 4, 4), 5))
            nack = await raw.until(Nack)
            assert (nack.code, nack.sequence) == (ErrorCode.QUEUE_FULL, 5)
            gate.opened.set()
            await raw.told(4)
            await raw.send(frame(0, rows(0, 4, 4), 5, 9))
            await raw.told(12)

    on(SimDisk(), story)


def test_attempts_are_bounded_until_they_are_published_or_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "ATTEMPTS_MAX", 3)
    disk = SimDisk()

    async def story(at: Site) -> None:
        parts = [await at.stage(number, 1, rows(number, 1)) for number in range(3)]
        assert await code_of(at.stage(3, 1, rows(3, 1))) is ErrorCode.RATE_LIMITED
        await at.decide(Decision.COMMIT, parts[:2])
        await at.published()
        for number in range(3):
            await at.stage(number, 1, rows(number, 1), job="other")
        assert await code_of(at.stage(3, 1, rows(3, 1), job="other")) is ErrorCode.RATE_LIMITED

    async def later(at: Site) -> None:
        assert await code_of(at.stage(3, 1, rows(3, 1), job="other")) is ErrorCode.RATE_LIMITED
        await at.decide(Decision.ABORT, job="other")
        await at.stage(3, 1, rows(3, 1), job="other")

    on(disk, story)
    on(disk, later)


def test_there_are_bounds_for_jobs() -> None:
    async def story(at: Site) -> None:
        for number in range(3):
            await at.stage(0, 1, rows(0, 1), job=f"job-{number}")
        assert await code_of(at.stage(0, 1, rows(0, 1), job="more")) is ErrorCode.RATE_LIMITED
        await at.decide(Decision.ABORT, job="job-1")
        await at.stage(0, 1, rows(0, 1), job="more")

    on(SimDisk(), story, jobs_max=3)


def test_a_server_that_ends_answers_what_was_staged_and_asked() -> None:
    disk = SimDisk()
    told: list[object] = []

    async def story(at: Site) -> None:
        part = await at.stage(0, 1, rows(0, 4))
        async with at.connected() as raw, at.connected() as driver:
            await staged_hello(raw, 1, 1)
            await driver.hello()
            await raw.send(frame(1, rows(1, 4), 1))
            await anyio.sleep(0.0001)
            async with anyio.create_task_group() as tasks:

                async def ask() -> None:
                    told.append(await decided(driver, Decision.COMMIT, [part]))

                tasks.start_soon(ask)
                await anyio.sleep(0.003)
                at.service.stop()
                told.append(await raw.told(4))

    on(disk, story)
    assert len(told) == 2
