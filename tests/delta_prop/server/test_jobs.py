"""Jobs over real sockets: parts are kept aside until they are decided, and have their effect once."""

from __future__ import annotations

import pytest

from delta_prop.client import ClientSettings, SyncProducer
from delta_prop.client.jobs import Decision, JobPart, JobState, JobStatus, StagedPart, decide
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import Delta, Priority, opaque
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.server.jobs import JOB, at_fault, block_of, counts, place, published, rows, stage

QUICK = ClientSettings(open_timeout_s=5.0, publish_timeout_s=5.0, close_timeout_s=2.0)


def test_a_job_is_seen_when_it_is_committed_and_not_before() -> None:
    with place(SimDisk()) as at:
        parts = [stage(at.address, part, 7 + part, rows(part, 25)) for part in (2, 0, 1)]
        assert at.keys() == []
        assert decide(at.address, JOB, Decision.QUERY) == JobStatus(JobState.STAGING, 75)
        told = decide(at.address, JOB, Decision.COMMIT, parts)
        assert (told.state, told.deltas) == (JobState.COMMITTED, 75)
        assert published(at.address) == JobStatus(JobState.PUBLISHED, 75, published=75)
        assert at.keys() == [one.vector_id for part in range(3) for one in rows(part, 25)]
        assert at.jobs.counts.staged_bytes == 0


def test_of_two_attempts_the_one_that_is_named_counts() -> None:
    with place(SimDisk()) as at:
        stage(at.address, 0, 1, rows(0, 8))
        second = stage(at.address, 0, 2, rows(0, 12))
        decide(at.address, JOB, Decision.COMMIT, [second])
        published(at.address)
        assert at.keys() == [one.vector_id for one in rows(0, 12)]


def test_an_aborted_job_leaves_nothing() -> None:
    disk = SimDisk()
    with place(disk) as at:
        stage(at.address, 0, 1, rows(0, 8))
        assert decide(at.address, JOB, Decision.ABORT).state is JobState.ABORTED
        assert at.jobs.counts.staged_bytes == 0
        assert not [path for path in disk.paths() if path.startswith("jobs")]
        for decision in (Decision.ABORT, Decision.QUERY):
            with pytest.raises(Refused, match="UNKNOWN_JOB"):
                decide(at.address, JOB, decision)
        with pytest.raises(Refused, match="UNKNOWN_JOB"):
            decide(at.address, JOB, Decision.COMMIT, [StagedPart(0, 1, 8)])
        assert at.keys() == []


def test_a_job_that_was_aborted_is_run_again_under_its_name() -> None:
    with place(SimDisk()) as at:
        with SyncProducer(at.address, name="late", job=JobPart(JOB, 0, 1), settings=QUICK) as late:
            late.offer_block(block_of(rows(0, 8)))
            late.flush()
            decide(at.address, JOB, Decision.ABORT)
            again = stage(at.address, 0, 2, rows(0, 5))
            receipt = late.offer_block(block_of(rows(0, 8, 8)))
            with pytest.raises(Refused, match="aborted"):
                receipt.result()
        with pytest.raises(Refused, match="UNKNOWN_JOB"):  # the attempt that was dropped
            decide(at.address, JOB, Decision.COMMIT, [StagedPart(0, 1, 8)])
        decide(at.address, JOB, Decision.COMMIT, [again])
        assert published(at.address) == JobStatus(JobState.PUBLISHED, 5, published=5)
        assert at.keys() == [one.vector_id for one in rows(0, 5)]
        with pytest.raises(Refused, match="JOB_DECIDED"):
            decide(at.address, JOB, Decision.ABORT)
        with pytest.raises(Refused, match="JOB_DECIDED"):
            stage(at.address, 0, 3, rows(0, 5))


def test_the_same_job_again_is_answered_and_another_one_under_its_name_refused() -> None:
    with place(SimDisk()) as at:
        parts = [stage(at.address, part, 1, rows(part, 5)) for part in range(2)]
        decide(at.address, JOB, Decision.COMMIT, parts)
        ended = published(at.address)
        again = [part._replace(attempt=9) for part in parts]
        assert decide(at.address, JOB, Decision.COMMIT, again) == ended
        for other in (parts[:1], [parts[0], parts[1]._replace(deltas=6)]):
            with pytest.raises(Refused, match="JOB_DECIDED") as told:
                decide(at.address, JOB, Decision.COMMIT, other)
            assert told.value.details == {"state": "published"}
        with pytest.raises(Refused, match="JOB_DECIDED"):
            decide(at.address, JOB, Decision.ABORT)
        assert len(at.keys()) == 10


def test_commit_that_tells_some_checksums_may_be_sent_again() -> None:
    with place(SimDisk()) as at:
        parts = []
        for number in range(2):
            part = stage(at.address, number, 1, rows(number, 5))
            mark = at.jobs._jobs[JOB].attempts[number, 1].synced_position
            assert mark is not None
            parts.append(part._replace(checksum=mark.content_checksum))
        some = [parts[0], parts[1]._replace(checksum=0)]
        decide(at.address, JOB, Decision.COMMIT, some)
        ended = published(at.address)
        for again in (some, parts, [part._replace(checksum=0) for part in parts]):
            assert decide(at.address, JOB, Decision.COMMIT, again) == ended
        with pytest.raises(Refused, match="JOB_DECIDED"):
            decide(at.address, JOB, Decision.COMMIT, [parts[0], parts[1]._replace(checksum=7)])


def test_a_part_that_is_not_there_whole_decides_nothing() -> None:
    with place(SimDisk()) as at:
        part = stage(at.address, 0, 1, rows(0, 5))
        for wrong in (part._replace(deltas=6), part._replace(attempt=2), part._replace(part=1)):
            with pytest.raises(Refused, match="UNKNOWN_JOB"):
                decide(at.address, JOB, Decision.COMMIT, [part, wrong] if wrong.part else [wrong])
        assert decide(at.address, JOB, Decision.QUERY).state is JobState.STAGING
        decide(at.address, JOB, Decision.COMMIT, [part, StagedPart(1, 0, 0)])
        assert published(at.address).published == 5


@pytest.mark.parametrize("decision", [Decision.QUERY, Decision.ABORT, Decision.COMMIT])
def test_a_job_that_nobody_staged_is_unknown(decision: Decision) -> None:
    parts = [StagedPart(0, 1, 1)] if decision is Decision.COMMIT else []
    with place(SimDisk()) as at, pytest.raises(Refused) as told:
        decide(at.address, "other", decision, parts)
    assert told.value.code is ErrorCode.UNKNOWN_JOB


def test_a_job_without_deltas_is_published_at_once_and_takes_no_name() -> None:
    disk, empty = SimDisk(), [StagedPart(0, 1, 0), StagedPart(1, 2, 0)]
    with place(disk) as at:
        for parts in (empty, []):
            assert decide(at.address, JOB, Decision.COMMIT, parts) == JobStatus(JobState.PUBLISHED)
        assert at.jobs.counts.active == 0
    assert not [path for path in disk.paths() if path.startswith("jobs")]
    with place(disk) as at:
        with pytest.raises(Refused, match="UNKNOWN_JOB"):
            decide(at.address, JOB, Decision.QUERY)
        part = stage(at.address, 0, 3, rows(0, 5))
        assert decide(at.address, JOB, Decision.COMMIT) == JobStatus(JobState.PUBLISHED)
        assert decide(at.address, JOB, Decision.QUERY) == JobStatus(JobState.STAGING, 5)
        with pytest.raises(Refused, match="UNKNOWN_JOB"):  # it has 5
            decide(at.address, JOB, Decision.COMMIT, [part._replace(deltas=0)])
        decide(at.address, JOB, Decision.COMMIT, [part])
        assert published(at.address) == JobStatus(JobState.PUBLISHED, 5, published=5)
        with pytest.raises(Refused, match="JOB_DECIDED"):
            decide(at.address, JOB, Decision.COMMIT, empty)


def test_rows_at_fault_are_counted_and_the_others_come_in_order() -> None:
    deltas = rows(0, 40)
    for place_of in (3, 4, 11, 25):
        deltas[place_of] = at_fault(0, place_of)
    sound = [one.vector_id for one in deltas if not one.vector_id.startswith("none")]
    with place(SimDisk()) as at:
        decide(at.address, JOB, Decision.COMMIT, [stage(at.address, 0, 1, deltas)])
        assert counts(published(at.address)) == JobStatus(JobState.PUBLISHED, 40, published=36, refused=4)
        assert at.keys() == sound
        assert (at.jobs.counts.published, at.jobs.counts.refused) == (36, 4)


def test_what_the_job_had_published_before_is_a_repeat() -> None:
    with place(SimDisk()) as at:
        with SyncProducer(at.address, name=f"{JOB}/0") as producer:
            producer.offer_block(block_of(rows(0, 13)))
            producer.flush()
        decide(at.address, JOB, Decision.COMMIT, [stage(at.address, 0, 1, rows(0, 30))])
        assert published(at.address) == JobStatus(JobState.PUBLISHED, 30, published=17, duplicates=13)
        assert at.keys() == [one.vector_id for one in rows(0, 30)]


def test_an_attempt_is_one_tasks_alone() -> None:
    with place(SimDisk()) as at:
        stage(at.address, 0, 1, rows(0, 5))
        with pytest.raises(UsageError, match="a number of its own"):
            stage(at.address, 0, 1, rows(0, 5))


def test_a_bad_row_ends_its_attempt() -> None:
    with place(SimDisk()) as at:
        with (
            pytest.raises(Refused) as told,
            SyncProducer(at.address, name="x", job=JobPart(JOB, 0, 1), settings=QUICK) as producer,
        ):
            producer.offer_block(block_of([Delta("", opaque(b"x"))])).result()
        assert (told.value.code, told.value.row, told.value.field) == (
            ErrorCode.INVALID_DELTA,
            0,
            "vector_id",
        )
        with pytest.raises(Refused, match="INVALID_DELTA"):
            stage(at.address, 0, 1, rows(0, 5))
        assert stage(at.address, 0, 2, rows(0, 5)).deltas == 5


def test_a_part_has_one_origin() -> None:
    def send(part: JobPart, *priorities: Priority) -> None:
        with SyncProducer(at.address, name="x", job=part, settings=QUICK) as producer:
            for priority in priorities:
                producer.offer_block(block_of(rows(0, 5)), priority=priority).result()

    with place(SimDisk()) as at:
        with pytest.raises(Refused, match="one priority"):
            send(JobPart(JOB, 0, 1), Priority.NORMAL, Priority.HIGH)
        for part in (0, 1):
            send(JobPart(JOB, part, 2), Priority.HIGH)
        with pytest.raises(Refused, match="JOB/PART"):
            decide(at.address, JOB, Decision.COMMIT, [StagedPart(0, 2, 5), StagedPart(1, 2, 5)])


def test_no_room_is_told_and_passes() -> None:
    with place(SimDisk(), staged_bytes_max=3_300) as at:
        stage(at.address, 0, 1, rows(0, 40), job="first")
        with (
            pytest.raises(Refused) as told,
            SyncProducer(at.address, name="x", job=JobPart(JOB, 0, 1), settings=QUICK) as producer,
        ):
            producer.publish(Delta("a", opaque(b"x" * 2_800)), timeout_s=0.3)
        assert told.value.code is ErrorCode.LOG_FULL
        decide(at.address, "first", Decision.ABORT)
        stage(at.address, 0, 2, [Delta("a", opaque(b"x" * 2_800))])


def test_beside_a_log_in_memory_there_are_no_jobs() -> None:
    with place(None) as at:
        with pytest.raises(UsageError, match="has no jobs"):
            decide(at.address, JOB, Decision.QUERY)
        with pytest.raises(Refused, match="in memory"):
            stage(at.address, 0, 1, rows(0, 5))


def test_commit_of_a_duplicate_part_reports_a_missing_part_first() -> None:
    with place(SimDisk()) as at:
        part = stage(at.address, 0, 1, rows(0, 5))
        with pytest.raises(Refused, match="BAD_REQUEST: parts 0 and 0"):
            decide(at.address, JOB, Decision.COMMIT, [part, part])
        for missing in (part._replace(part=4), part._replace(part=4, checksum=7)):
            with pytest.raises(Refused, match="UNKNOWN_JOB: part 4"):
                decide(at.address, JOB, Decision.COMMIT, [part, part, missing])
        decide(at.address, JOB, Decision.COMMIT, [part])
        assert published(at.address).published == 5
