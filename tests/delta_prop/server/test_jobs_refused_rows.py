"""A job with refused and already published rows: the effect of each row, the report of refused rows."""

from __future__ import annotations

import errno
from dataclasses import replace

import anyio
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from delta_prop.api.propagator import Propagator
from delta_prop.server import jobs as server_jobs
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import Delta, opaque
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.frames import (
    BatchFrame,
    Decision,
    Hello,
    JobState,
    JobStatus,
    Nack,
    OriginClaim,
    Subscribe,
)
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.stamp import Stamp
from tests.delta_prop.server.jobs import (
    NAMESPACE,
    block_of,
    invalid_delta,
    keys_in,
    part_deltas,
    without_rows,
)
from tests.delta_prop.server.jobs_virtual import (
    NO_RESERVE,
    Site,
    frame,
    origin_of,
    run_scenario,
    serve_virtual,
    staged_hello,
)

FIRST = Delta("first", opaque(b"x"), NAMESPACE)
"""Makes the namespace known to the service, which then refuses changes of vectors that do not exist."""


async def publish_first_rows(site: Site, count: int, published_count: int) -> None:
    """Publish the first `published_count` rows of part 0, as an earlier run of the job would have."""
    await site.propagator.publish(FIRST)
    if published_count:
        async with site.connected() as raw:
            (grant,) = (await raw.hello(origin_of(0))).welcome.origins  # type: ignore[union-attr]
            batch = block_of(part_deltas(0, count)[:published_count]).encode(
                origin=origin_of(0), base=1, epoch=grant.epoch
            )
            await raw.send(BatchFrame(1, batch, ack_wanted=True))
            await raw.until_acked(published_count)


async def run_job(
    count: int, invalid_rows: set[int], published_count: int, block_rows: int
) -> tuple[JobStatus, list[str]]:
    """Run a job of one part whose first rows are already published."""
    async with serve_virtual(SimDisk()) as site:
        await publish_first_rows(site, count, published_count)
        deltas = [
            invalid_delta(0, row) if row in invalid_rows else delta
            for row, delta in enumerate(part_deltas(0, count))
        ]
        await site.decide(Decision.COMMIT, [await site.stage(0, 1, deltas, block_rows=block_rows)])
        return await site.wait_published(), keys_in(site.propagator)


@st.composite
def job_cases(draw: st.DrawFn) -> tuple[int, set[int], int, int]:
    count, block_rows = draw(st.integers(1, 40)), draw(st.integers(1, 13))
    published_count = draw(st.integers(0, count))
    invalid_rows = (
        draw(st.sets(st.integers(published_count, count - 1))) if published_count < count else set[int]()
    )
    return count, invalid_rows, published_count, block_rows


@settings(max_examples=25, deadline=None)
@given(job_cases())
@example((12, {5, 8, 10}, 4, 10))
@example((30, set(range(3, 28)), 0, 13))
def test_each_row_has_one_effect_or_is_reported(job: tuple[int, set[int], int, int]) -> None:
    """One batch may have published rows, refused rows, and new rows."""
    count, invalid_rows, published_count, block_rows = job
    status, keys = run_virtual(run_job, count, invalid_rows, published_count, block_rows)
    new_count = count - published_count - len(invalid_rows)
    assert without_rows(status) == JobStatus(
        JobState.PUBLISHED, count, new_count, published_count, len(invalid_rows)
    )
    assert keys == ["first", *(f"0-{row}" for row in range(count) if row not in invalid_rows)]
    expected = sorted(invalid_rows)[:10]
    assert [refused[:3] for refused in status.refused_rows] == [(0, row, f"none-0-{row}") for row in expected]
    assert {refused.code for refused in status.refused_rows} <= {ErrorCode.INVALID_DELTA}
    assert all(
        refused.text.startswith(f"vector_id: '{refused.vector_id}' in namespace")
        for refused in status.refused_rows
    )


def test_refused_rows_survive_a_restart() -> None:
    disk, statuses = SimDisk(), list[JobStatus]()

    async def scenario(site: Site) -> None:
        deltas = [*part_deltas(0, 5), invalid_delta(0, 5)]
        await site.decide(Decision.COMMIT, [await site.stage(0, 1, deltas)])
        statuses.append(await site.wait_published())

    async def check_after_restart(site: Site) -> None:
        assert await site.decide(Decision.QUERY) == statuses[0]
        (listed,) = site.jobs.to_json()
        (row,) = listed["refused_rows"]
        assert (row["row"], row["code"]) == (5, "INVALID_DELTA")
        assert row["text"].startswith("vector_id: 'none-0-5'")

    run_scenario(disk, scenario)
    run_scenario(disk, check_after_restart)


def has_bytes(disk: SimDisk, content: bytes) -> bool:
    return any(content in disk.peek(path) for path in disk.paths())


def test_erased_vector_is_in_no_file_of_a_job() -> None:
    disk = SimDisk()

    async def scenario(site: Site) -> None:
        async def erase() -> None:
            with anyio.fail_after(60):
                await site.propagator.erase("none-0-5", NAMESPACE)

        staged = await site.stage(0, 1, [*part_deltas(0, 5), invalid_delta(0, 5), invalid_delta(0, 6)])
        with pytest.raises(Refused, match="1 jobs are staged"):
            await erase()
        await site.decide(Decision.COMMIT, [staged])
        await site.wait_published()
        assert has_bytes(disk, b"none-0-5")
        await erase()
        assert not has_bytes(disk, b"none-0-5")
        erased, other = (await site.decide(Decision.QUERY)).refused_rows
        assert (erased.row, erased.vector_id, erased.text) == (5, "", "its vector was erased since")
        assert other.vector_id == "none-0-6"

    async def check_after_restart(site: Site) -> None:
        erased, other = (await site.decide(Decision.QUERY)).refused_rows
        assert (erased.vector_id, other.vector_id) == ("", "none-0-6")

    run_scenario(disk, scenario)
    run_scenario(disk, check_after_restart)

    async def erase_without_a_server() -> None:
        async with Propagator(data="x", log=NO_RESERVE, world=virtual_world(disk=disk)) as p:
            with pytest.raises(UsageError, match="files of a server's jobs"):
                await p.erase("none-0-6", NAMESPACE)

    run_virtual(erase_without_a_server)


def test_job_list_shows_refused_rows_of_the_latest_jobs_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(site: Site) -> None:
        for part in range(4):
            name = f"job-{part}"
            staged = await site.stage(part, 1, [*part_deltas(part, 1), invalid_delta(part, 1)], job=name)
            await site.decide(Decision.COMMIT, [staged], name)
            await site.wait_published(name)
        (row,) = site.jobs.to_json()[3]["refused_rows"]
        size = server_jobs.ROW_OVERHEAD_BYTES + len(row["vector_id"]) + len(row["text"])
        for bound, listed_counts in (
            (4 * size, [1, 1, 1, 1]),
            (2 * size, [0, 0, 1, 1]),
            (size - 1, [0, 0, 0, 0]),
        ):
            monkeypatch.setattr(server_jobs, "LISTED_ROWS_BYTES_MAX", bound)
            listed = site.jobs.to_json()
            assert [entry["job"] for entry in listed] == [f"job-{part}" for part in range(4)]
            assert [(entry["refused"], len(entry["refused_rows"])) for entry in listed] == [
                (1, count) for count in listed_counts
            ]

    run_scenario(SimDisk(), main)


def test_rows_refused_before_a_wait_are_reported_with_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused batch is retried row by row. If the queue fills halfway, the retry goes on from there:
    earlier rows are not sent again.
    """
    invalid_rows = {2, 3, 6}
    deltas = [
        invalid_delta(0, row) if row in invalid_rows else valid for row, valid in enumerate(part_deltas(0, 8))
    ]

    async def scenario(site: Site) -> None:
        await site.propagator.publish(FIRST)
        part = await site.stage(0, 1, deltas, block_rows=8)
        pipeline, offers = site.propagator.internals().partition.pipeline, 0
        offer = pipeline.offer

        def refuse_some_offers(work: object, now: float) -> object:
            nonlocal offers
            offers += 1
            if offers in (4, 7, 8):
                work.receipt.refuse(Refused(ErrorCode.QUEUE_FULL, "full", retry_after_ms=5))  # type: ignore[attr-defined]
                return work.receipt  # type: ignore[attr-defined]
            return offer(work, now)  # type: ignore[arg-type]

        monkeypatch.setattr(pipeline, "offer", refuse_some_offers)
        await site.decide(Decision.COMMIT, [part])
        status = await site.wait_published()
        assert [refused.row for refused in status.refused_rows] == sorted(invalid_rows)
        assert all("is unknown or deleted" in refused.text for refused in status.refused_rows)

    run_scenario(SimDisk(), scenario)


@pytest.mark.parametrize("nth", [1, 2, 3, 4, 5])
def test_rows_are_retried_if_log_fails_before_refusal_is_stored(nth: int) -> None:
    disk = SimDisk(3)  # with this seed, some unsynced rows survive
    deltas = [*part_deltas(0, 3), invalid_delta(0, 3), invalid_delta(0, 4), *part_deltas(0, 1, 5)]

    async def scenario(site: Site) -> None:
        await site.propagator.publish(FIRST)
        part = await site.stage(0, 1, deltas, block_rows=6)
        sync_count = 0

        def is_nth_sync(call: object) -> bool:
            nonlocal sync_count
            sync_count += call.name == "sync" and call.path.startswith("streams")  # type: ignore[attr-defined]
            return sync_count == nth

        await site.decide(Decision.COMMIT, [part])
        disk.fail(is_nth_sync, errno.EIO)
        with anyio.fail_after(60):
            status = await site.wait_published()
        assert site.propagator.internals().partition.pipeline.recoveries
        assert without_rows(status) == JobStatus(JobState.PUBLISHED, 6, published=4, refused=2)
        assert [(refused.row, refused.code) for refused in status.refused_rows] == [
            (row, ErrorCode.INVALID_DELTA) for row in (3, 4)
        ]

    run_scenario(disk, scenario, log=NO_RESERVE)


def test_part_is_bound_to_its_origin_and_stream() -> None:
    async def main() -> None:
        async with serve_virtual(SimDisk()) as site, site.connected() as raw:
            await staged_hello(raw, 0, 1)
            valid = frame(0, part_deltas(0, 1), 1)
            await raw.send(replace(valid, stamp=Stamp(stream=1)))
            nack = await raw.until(Nack)
            assert (nack.code, nack.sequence) == (ErrorCode.WRONG_PARTITION, 1)
            await raw.send(replace(valid, sequence=2))
            await raw.until_acked(2)
            await raw.send(Subscribe(2, Hello(origins=(OriginClaim(origin_of(1)),))))
            nack = await raw.until(Nack)
            assert (nack.code, nack.correlation_id) == (ErrorCode.BAD_REQUEST, 2)

    run_virtual(main)
