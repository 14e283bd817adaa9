"""Files of parts and decisions against a model list, on a disk that crashes, tears writes, and fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop.receipt import Receipt
from delta_prop.server.job_files import (
    CommittedPart,
    JobCorrupted,
    JobDecision,
    JobFiles,
    Progress,
    digest_parts,
    read_decision,
    stem_of,
)
from delta_prop.server.job_rules import no_capacity
from delta_prop.server.part_file import PartHead, PartPosition, path_of, read_frames, read_head
from delta_prop.server.part_writing import write_parts
from delta_prop.server.staging import Attempt
from delta_prop_simulations.disk import SimCrash, SimDisk
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import Delta, opaque
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.frames import JobState, RefusedRow, StagedPart
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop_wire.batch import Batch

JOB = "nightly"
NUMBERS = st.integers(0, 2**63)


def batch(base: int, count: int) -> Batch:
    deltas = [Delta(f"v{base + row}", opaque(b"%d" % (base + row) * 9)) for row in range(count)]
    return encode_batch(deltas, origin=7, base=base, epoch=0)


def attempt(part: int = 0, number: int = 1) -> Attempt:
    head = PartHead(JOB, part, number, 7, 0, "token", 17)
    return Attempt(part, number, path_of(stem_of(JOB), part, number), head)


def write_part(files: JobFiles, one: Attempt, batches: list[Batch]) -> bool:
    """Write batches as the jobs do; return True if they are acknowledged."""
    for each in batches:
        one.add(each, Receipt())
    work = [(one, one.take_pending())]
    (outcome,) = write_parts(files, work).outcomes
    if isinstance(outcome, PartPosition):
        one.on_written(work[0][1], outcome)
        return True
    one.on_failed(work[0][1], no_capacity("refused by the test"))
    return False


def read_bodies(disk: SimDisk, one: Attempt) -> list[bytes]:
    """Return the bodies that a start reads."""
    found = JobFiles(disk).read_staged([])
    if not found:
        return []
    ((head, end),) = found
    assert head == one.head
    file = disk.open(one.path)
    begun = read_head(file)
    assert begun is not None
    bodies = list(read_frames(file, begun[1]))
    assert file.size() == end.byte_offset, "the torn tail should be truncated"
    assert end == (bodies[-1].end if bodies else begun[1])
    return [bytes(each.batch.raw) for each in bodies]


@given(
    groups=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), max_size=6),
    crash=st.integers(1, 60),
    seed=st.integers(0, 1000),
    power=st.booleans(),
)
def test_acknowledged_batches_survive_any_crash(
    groups: list[list[int]], crash: int, seed: int, power: bool
) -> None:
    disk, one = SimDisk(seed), attempt()
    disk.crash_at(crash)
    sent: list[bytes] = []
    acknowledged = 0
    base = 1
    try:
        files = JobFiles(disk)
        for group in groups:
            batches = []
            for count in group:
                batches.append(batch(base, count))
                base += count
            sent += [bytes(each.raw) for each in batches]
            assert write_part(files, one, batches)
            acknowledged = len(sent)
    except SimCrash:
        pass
    found = read_bodies(disk.crash(seed) if power else disk.kill(), one)
    assert found == sent[: len(found)]
    assert len(found) >= acknowledged


@given(
    failing=st.lists(st.tuples(st.sampled_from(["open", "write", "sync", "sync_directory"]), st.booleans())),
    seed=st.integers(0, 1000),
)
def test_writing_continues_after_failed_calls(failing: list[tuple[str, bool]], seed: int) -> None:
    disk, one, acked_bodies = SimDisk(seed), attempt(), list[bytes]()
    files = JobFiles(disk)
    for name, fails in [*failing, ("", False)]:
        if fails:
            disk.fail(lambda call, name=name: call.name == name and call.path.startswith("jobs"), 5)
        new = batch(one.taken_counter + 1, 3 if fails else 2)  # the failed batch was longer
        if write_part(files, one, [new]):
            acked_bodies.append(bytes(new.raw))
        disk.heal()
    assert one.synced_position is not None
    assert len(disk.peek(one.path)) == one.synced_position.byte_offset
    assert read_bodies(disk.crash(seed), one) == acked_bodies
    assert acked_bodies


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_flipped_bit_shortens_the_part_and_never_alters_it(at: int, bit: int) -> None:
    disk, one = SimDisk(1), attempt()
    batches = [batch(1, 3), batch(4, 2), batch(6, 1)]
    write_part(JobFiles(disk), one, batches)
    size = len(disk.peek(one.path))
    disk.flip(one.path, at % size, bit)
    found = read_bodies(disk, one)
    assert len(found) < len(batches)
    assert found == [bytes(each.raw) for each in batches[: len(found)]]


def test_checksum_depends_on_the_batches() -> None:
    marks = set()
    for counts in ([3, 2], [3, 2], [2, 3], [5]):
        disk, one, base = SimDisk(1), attempt(), 1
        batches = []
        for count in counts:
            batches.append(batch(base, count))
            base += count
        write_part(JobFiles(disk), one, batches)
        marks.add(one.synced_position)
    assert len(marks) == 3


# --- decisions

PROGRESS = st.builds(
    Progress,
    st.integers(0, 3_000),
    st.builds(PartPosition, NUMBERS, st.integers(0, 2**32 - 1), NUMBERS),
    NUMBERS,
    NUMBERS,
    NUMBERS,
    NUMBERS,
    st.lists(
        st.builds(RefusedRow, NUMBERS, NUMBERS, st.text(), st.sampled_from(ErrorCode), st.text()), max_size=3
    ).map(tuple),
)
DECIDED = st.builds(
    JobDecision,
    job=st.text(min_size=1, max_size=9),
    owner=st.text(max_size=5),
    state=st.sampled_from([JobState.COMMITTED, JobState.PUBLISHED]),
    decided_us=NUMBERS,
    parts_digest=st.binary(min_size=16, max_size=16),
    deltas=NUMBERS,
    parts=st.lists(st.builds(CommittedPart, *[NUMBERS] * 6), max_size=3).map(tuple),
    progress=PROGRESS,
)


@given(DECIDED, PROGRESS)
def test_decision_is_read_back_as_written(decided: JobDecision, later: Progress) -> None:
    disk = SimDisk(1)
    JobFiles(disk).write_decision(decided)
    assert JobFiles(disk.crash()).read_decisions() == ([decided], {})
    JobFiles(disk).write_progress(decided.job, later)
    (found,), _ = JobFiles(disk.crash()).read_decisions()
    assert found.progress == (later if decided.parts else decided.progress)
    JobFiles(disk).forget(decided.job)
    assert JobFiles(disk.crash()).read_decisions() == ([], {})


def test_progress_file_without_refused_rows_is_read() -> None:
    disk, progress = SimDisk(1), Progress(1, PartPosition(2, 3, 4), 5, 6, 7, 8)
    part = CommittedPart(0, 1, 5, 9, 9, 0)
    JobFiles(disk).write_decision(JobDecision(JOB, "", JobState.COMMITTED, 1, digest_parts(()), 5, (part,)))
    content = msgpack.packb([1, 2, 3, 4, 5, 6, 7, 8])
    disk.put(f"jobs/{stem_of(JOB)}.at", content + crc32c(content).to_bytes(4, "little"))
    (found,), _ = JobFiles(disk).read_decisions()
    assert found.progress == progress


def test_stored_refused_rows_are_bounded() -> None:
    progress = Progress()
    for row in range(12):
        progress = progress.with_refused(RefusedRow(0, row, "ä" * 200, ErrorCode.INVALID_DELTA, "ö" * 200), 2)
    assert progress.refused == 24
    assert [one.row for one in progress.refused_rows] == list(range(10))
    assert {(one.vector_id, one.text) for one in progress.refused_rows} == {("ä" * 64, "ö" * 150)}


@given(st.integers(1, 12), st.booleans(), st.integers(0, 100))
def test_crash_leaves_the_old_or_the_new_decision(crash: int, power: bool, seed: int) -> None:
    first = JobDecision(
        JOB, "", JobState.COMMITTED, 1, digest_parts(()), 5, (CommittedPart(0, 1, 5, 9, 9, 0),)
    )
    second = JobDecision(JOB, "", JobState.PUBLISHED, 1, digest_parts(()), 5)
    disk = SimDisk(seed)
    JobFiles(disk).write_decision(first)
    disk.crash_at(disk.calls + crash)
    try:
        JobFiles(disk).write_decision(second)
        done = True
    except SimCrash:
        done = False
    (found,), corrupted = JobFiles(disk.crash(seed) if power else disk.kill()).read_decisions()
    assert not corrupted
    assert found in ((second,) if done else (first, second))


def test_corrupted_decision_is_reported_and_its_parts_stay() -> None:
    disk, one, other = SimDisk(1), attempt(), attempt(1)
    files = JobFiles(disk)
    for each in (one, other):
        write_part(files, each, [batch(1, 3)])
    part = CommittedPart(0, 1, 3, 9, 9, 0)
    files.write_decision(JobDecision(JOB, "", JobState.COMMITTED, 1, digest_parts(()), 3, (part,)))
    path = f"jobs/{stem_of(JOB)}.job"
    disk.flip(path)
    decided, corrupted = files.read_decisions()
    assert (decided, list(corrupted)) == ([], [stem_of(JOB)])
    assert path in str(corrupted[stem_of(JOB)])
    with pytest.raises(JobCorrupted):
        read_decision(disk, path)
    assert files.read_staged(decided, corrupted) == []
    assert {one.path, other.path} <= set(disk.paths())


def test_files_that_no_decision_needs_are_removed() -> None:
    disk = SimDisk(1)
    files = JobFiles(disk)
    for each in (attempt(0, 1), attempt(0, 2), attempt(1, 1)):
        write_part(files, each, [batch(1, 3)])
    files.write_decision(
        JobDecision(JOB, "", JobState.COMMITTED, 1, digest_parts(()), 3, (CommittedPart(0, 2, 3, 9, 9, 0),))
    )
    files.write_progress(JOB, Progress())
    disk.put(f"jobs/{stem_of(JOB)}.at.new", b"half")
    disk.put("jobs/other.txt", b"not ours")
    decided, corrupted = files.read_decisions()
    assert files.read_staged(decided, corrupted, read_only=True) == []
    assert len(disk.paths()) == 7
    assert files.read_staged(decided, corrupted) == []
    left = {path.rpartition("/")[2] for path in disk.crash().paths()}
    stem = stem_of(JOB)
    assert left == {f"{stem}-0-2.part", f"{stem}.job", f"{stem}.at", "other.txt"}


def test_digest_of_parts_covers_parts_and_deltas_only() -> None:
    parts = [StagedPart(0, 5, 10), StagedPart(1, 6, 20)]
    assert digest_parts(parts) == digest_parts(
        [StagedPart(1, 9, 20), StagedPart(2, 1, 0), StagedPart(0, 9, 10)]
    )
    assert digest_parts(parts) != digest_parts(parts[:1])
    assert digest_parts(parts) != digest_parts([StagedPart(0, 5, 20), StagedPart(1, 6, 10)])
