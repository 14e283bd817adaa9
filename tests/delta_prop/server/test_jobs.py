"""Jobs over real sockets: parts are staged until they are decided, and have one effect."""

from __future__ import annotations

import pytest

from delta_prop.client import ClientSettings, SyncProducer
from delta_prop.client.jobs import Decision, JobPart, JobState, JobStatus, StagedPart, decide
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import Delta, Priority, opaque
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.server.jobs import (
    JOB,
    block_of,
    invalid_delta,
    part_deltas,
    serve_jobs,
    stage,
    wait_published,
    without_rows,
)

QUICK = ClientSettings(open_timeout_s=5.0, publish_timeout_s=5.0, close_timeout_s=2.0)


def test_job_rows_are_logged_only_after_commit() -> None:
    with serve_jobs(SimDisk()) as site:
        parts = [stage(site.address, part, 7 + part, part_deltas(part, 25)) for part in (2, 0, 1)]
        assert site.keys() == []
        assert decide(site.address, JOB, Decision.QUERY) == JobStatus(JobState.STAGING, 75)
        status = decide(site.address, JOB, Decision.COMMIT, parts)
        assert (status.state, status.deltas) == (JobState.COMMITTED, 75)
        assert wait_published(site.address) == JobStatus(JobState.PUBLISHED, 75, published=75)
        assert site.keys() == [delta.vector_id for part in range(3) for delta in part_deltas(part, 25)]
        assert site.jobs.counts.staged_bytes == 0


def test_committed_attempt_counts_and_others_do_not() -> None:
    with serve_jobs(SimDisk()) as site:
        stage(site.address, 0, 1, part_deltas(0, 8))
        second = stage(site.address, 0, 2, part_deltas(0, 12))
        decide(site.address, JOB, Decision.COMMIT, [second])
        wait_published(site.address)
        assert site.keys() == [delta.vector_id for delta in part_deltas(0, 12)]


def test_aborted_job_leaves_nothing() -> None:
    disk = SimDisk()
    with serve_jobs(disk) as site:
        stage(site.address, 0, 1, part_deltas(0, 8))
        assert decide(site.address, JOB, Decision.ABORT).state is JobState.ABORTED
        assert site.jobs.counts.staged_bytes == 0
        assert not [path for path in disk.paths() if path.startswith("jobs")]
        for decision in (Decision.ABORT, Decision.QUERY):
            with pytest.raises(Refused, match="UNKNOWN_JOB"):
                decide(site.address, JOB, decision)
        with pytest.raises(Refused, match="UNKNOWN_JOB"):
            decide(site.address, JOB, Decision.COMMIT, [StagedPart(0, 1, 8)])
        assert site.keys() == []


def test_aborted_job_can_be_rerun_under_its_name() -> None:
    with serve_jobs(SimDisk()) as site:
        with SyncProducer(site.address, name="stale", job=JobPart(JOB, 0, 1), settings=QUICK) as stale:
            stale.offer_block(block_of(part_deltas(0, 8)))
            stale.flush()
            decide(site.address, JOB, Decision.ABORT)
            second = stage(site.address, 0, 2, part_deltas(0, 5))
            receipt = stale.offer_block(block_of(part_deltas(0, 8, 8)))
            with pytest.raises(Refused, match="aborted"):
                receipt.result()
        with pytest.raises(Refused, match="UNKNOWN_JOB"):  # the dropped attempt
            decide(site.address, JOB, Decision.COMMIT, [StagedPart(0, 1, 8)])
        decide(site.address, JOB, Decision.COMMIT, [second])
        assert wait_published(site.address) == JobStatus(JobState.PUBLISHED, 5, published=5)
        assert site.keys() == [delta.vector_id for delta in part_deltas(0, 5)]
        with pytest.raises(Refused, match="JOB_DECIDED"):
            decide(site.address, JOB, Decision.ABORT)
        with pytest.raises(Refused, match="JOB_DECIDED"):
            stage(site.address, 0, 3, part_deltas(0, 5))


def test_recommit_is_idempotent_and_other_parts_are_refused() -> None:
    with serve_jobs(SimDisk()) as site:
        parts = [stage(site.address, part, 1, part_deltas(part, 5)) for part in range(2)]
        decide(site.address, JOB, Decision.COMMIT, parts)
        final = wait_published(site.address)
        retried = [part._replace(attempt=9) for part in parts]
        assert decide(site.address, JOB, Decision.COMMIT, retried) == final
        for other in (parts[:1], [parts[0], parts[1]._replace(deltas=6)]):
            with pytest.raises(Refused, match="JOB_DECIDED") as refusal:
                decide(site.address, JOB, Decision.COMMIT, other)
            assert refusal.value.details == {"state": "published"}
        with pytest.raises(Refused, match="JOB_DECIDED"):
            decide(site.address, JOB, Decision.ABORT)
        assert len(site.keys()) == 10


def test_commit_with_partial_checksums_may_be_retried() -> None:
    with serve_jobs(SimDisk()) as site:
        parts = []
        for number in range(2):
            part = stage(site.address, number, 1, part_deltas(number, 5))
            position = site.jobs._table.jobs[JOB].attempts[number, 1].synced_position
            assert position is not None
            parts.append(part._replace(checksum=position.content_checksum))
        mixed_parts = [parts[0], parts[1]._replace(checksum=0)]
        decide(site.address, JOB, Decision.COMMIT, mixed_parts)
        final = wait_published(site.address)
        for retried in (mixed_parts, parts, [part._replace(checksum=0) for part in parts]):
            assert decide(site.address, JOB, Decision.COMMIT, retried) == final
        with pytest.raises(Refused, match="JOB_DECIDED"):
            decide(site.address, JOB, Decision.COMMIT, [parts[0], parts[1]._replace(checksum=7)])


def test_commit_of_an_incomplete_part_decides_nothing() -> None:
    with serve_jobs(SimDisk()) as site:
        part = stage(site.address, 0, 1, part_deltas(0, 5))
        for wrong in (part._replace(deltas=6), part._replace(attempt=2), part._replace(part=1)):
            with pytest.raises(Refused, match="UNKNOWN_JOB"):
                decide(site.address, JOB, Decision.COMMIT, [part, wrong] if wrong.part else [wrong])
        assert decide(site.address, JOB, Decision.QUERY).state is JobState.STAGING
        decide(site.address, JOB, Decision.COMMIT, [part, StagedPart(1, 0, 0)])
        assert wait_published(site.address).published == 5


@pytest.mark.parametrize("decision", [Decision.QUERY, Decision.ABORT, Decision.COMMIT])
def test_unstaged_job_is_unknown(decision: Decision) -> None:
    parts = [StagedPart(0, 1, 1)] if decision is Decision.COMMIT else []
    with serve_jobs(SimDisk()) as site, pytest.raises(Refused) as refusal:
        decide(site.address, "other", decision, parts)
    assert refusal.value.code is ErrorCode.UNKNOWN_JOB


def test_empty_job_is_published_at_once_and_stores_no_name() -> None:
    disk, empty = SimDisk(), [StagedPart(0, 1, 0), StagedPart(1, 2, 0)]
    with serve_jobs(disk) as site:
        for parts in (empty, []):
            assert decide(site.address, JOB, Decision.COMMIT, parts) == JobStatus(JobState.PUBLISHED)
        assert site.jobs.counts.active == 0
    assert not [path for path in disk.paths() if path.startswith("jobs")]
    with serve_jobs(disk) as site:
        with pytest.raises(Refused, match="UNKNOWN_JOB"):
            decide(site.address, JOB, Decision.QUERY)
        part = stage(site.address, 0, 3, part_deltas(0, 5))
        assert decide(site.address, JOB, Decision.COMMIT) == JobStatus(JobState.PUBLISHED)
        assert decide(site.address, JOB, Decision.QUERY) == JobStatus(JobState.STAGING, 5)
        with pytest.raises(Refused, match="UNKNOWN_JOB"):  # the part has 5 deltas
            decide(site.address, JOB, Decision.COMMIT, [part._replace(deltas=0)])
        decide(site.address, JOB, Decision.COMMIT, [part])
        assert wait_published(site.address) == JobStatus(JobState.PUBLISHED, 5, published=5)
        with pytest.raises(Refused, match="JOB_DECIDED"):
            decide(site.address, JOB, Decision.COMMIT, empty)


def test_refused_rows_are_counted_and_the_rest_stay_in_order() -> None:
    deltas = part_deltas(0, 40)
    for row in (3, 4, 11, 25):
        deltas[row] = invalid_delta(0, row)
    valid = [delta.vector_id for delta in deltas if not delta.vector_id.startswith("none")]
    with serve_jobs(SimDisk()) as site:
        decide(site.address, JOB, Decision.COMMIT, [stage(site.address, 0, 1, deltas)])
        assert without_rows(wait_published(site.address)) == JobStatus(
            JobState.PUBLISHED, 40, published=36, refused=4
        )
        assert site.keys() == valid
        assert (site.jobs.counts.published, site.jobs.counts.refused) == (36, 4)


def test_rows_published_earlier_count_as_duplicates() -> None:
    with serve_jobs(SimDisk()) as site:
        with SyncProducer(site.address, name=f"{JOB}/0") as producer:
            producer.offer_block(block_of(part_deltas(0, 13)))
            producer.flush()
        decide(site.address, JOB, Decision.COMMIT, [stage(site.address, 0, 1, part_deltas(0, 30))])
        assert wait_published(site.address) == JobStatus(JobState.PUBLISHED, 30, published=17, duplicates=13)
        assert site.keys() == [delta.vector_id for delta in part_deltas(0, 30)]


def test_attempt_cannot_be_reused_by_another_task() -> None:
    with serve_jobs(SimDisk()) as site:
        stage(site.address, 0, 1, part_deltas(0, 5))
        with pytest.raises(UsageError, match="a number of its own"):
            stage(site.address, 0, 1, part_deltas(0, 5))


def test_invalid_row_ends_its_attempt() -> None:
    with serve_jobs(SimDisk()) as site:
        with (
            pytest.raises(Refused) as refusal,
            SyncProducer(site.address, name="x", job=JobPart(JOB, 0, 1), settings=QUICK) as producer,
        ):
            producer.offer_block(block_of([Delta("", opaque(b"x"))])).result()
        assert (refusal.value.code, refusal.value.row, refusal.value.field) == (
            ErrorCode.INVALID_DELTA,
            0,
            "vector_id",
        )
        with pytest.raises(Refused, match="INVALID_DELTA"):
            stage(site.address, 0, 1, part_deltas(0, 5))
        assert stage(site.address, 0, 2, part_deltas(0, 5)).deltas == 5


def test_part_has_one_origin() -> None:
    def send(part: JobPart, *priorities: Priority) -> None:
        with SyncProducer(site.address, name="x", job=part, settings=QUICK) as producer:
            for priority in priorities:
                producer.offer_block(block_of(part_deltas(0, 5)), priority=priority).result()

    with serve_jobs(SimDisk()) as site:
        with pytest.raises(Refused, match="one priority"):
            send(JobPart(JOB, 0, 1), Priority.NORMAL, Priority.HIGH)
        for part in (0, 1):
            send(JobPart(JOB, part, 2), Priority.HIGH)
        with pytest.raises(Refused, match="JOB/PART"):
            decide(site.address, JOB, Decision.COMMIT, [StagedPart(0, 2, 5), StagedPart(1, 2, 5)])


def test_full_staging_is_refused_until_space_is_freed() -> None:
    with serve_jobs(SimDisk(), staged_bytes_max=3_300) as site:
        stage(site.address, 0, 1, part_deltas(0, 40), job="first")
        with (
            pytest.raises(Refused) as refusal,
            SyncProducer(site.address, name="x", job=JobPart(JOB, 0, 1), settings=QUICK) as producer,
        ):
            producer.publish(Delta("a", opaque(b"x" * 2_800)), timeout_s=0.3)
        assert refusal.value.code is ErrorCode.LOG_FULL
        decide(site.address, "first", Decision.ABORT)
        stage(site.address, 0, 2, [Delta("a", opaque(b"x" * 2_800))])


def test_memory_log_has_no_jobs() -> None:
    with serve_jobs(None) as site:
        with pytest.raises(UsageError, match="has no jobs"):
            decide(site.address, JOB, Decision.QUERY)
        with pytest.raises(Refused, match="in memory"):
            stage(site.address, 0, 1, part_deltas(0, 5))


def test_commit_of_a_duplicate_part_reports_a_missing_part_first() -> None:
    with serve_jobs(SimDisk()) as site:
        part = stage(site.address, 0, 1, part_deltas(0, 5))
        with pytest.raises(Refused, match="BAD_REQUEST: parts 0 and 0"):
            decide(site.address, JOB, Decision.COMMIT, [part, part])
        for missing in (part._replace(part=4), part._replace(part=4, checksum=7)):
            with pytest.raises(Refused, match="UNKNOWN_JOB: part 4"):
                decide(site.address, JOB, Decision.COMMIT, [part, part, missing])
        decide(site.address, JOB, Decision.COMMIT, [part])
        assert wait_published(site.address).published == 5
