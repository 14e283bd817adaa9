"""Files of parts and decisions, compared with a list, on a disk that crashes, tears writes, and fails."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop.calls.receipt import Receipt
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
from delta_prop.server.part_file import PartHead, PartPosition, path_of, read_frames, read_head, write_parts
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


def make_batch(base: int, count: int) -> Batch:
    deltas = [Delta(f"v{base + row}", opaque(b"%d" % (base + row) * 9)) for row in range(count)]
    return encode_batch(deltas, origin=7, base=base, epoch=0)


def make_attempt(part: int = 0, number: int = 1) -> Attempt:
    head = PartHead(JOB, part, number, 7, 0, "token", 17)
    return Attempt(path_of(stem_of(JOB), part, number), head)


def write_part(files: JobFiles, staged: Attempt, batches: list[Batch]) -> bool:
    """Write batches as `Jobs` does; return True if they are acknowledged."""
    for new_batch in batches:
        staged.add(new_batch, Receipt())
    work = [(staged, staged.take_pending())]
    (outcome,) = write_parts(files, work).outcomes
    if isinstance(outcome, PartPosition):
        staged.on_written(work[0][1], outcome)
        return True
    staged.on_failed(work[0][1], no_capacity("refused by the test"))
    return False


def read_bodies(disk: SimDisk, staged: Attempt) -> list[bytes]:
    """Return the batches that a restarted server reads from the part."""
    parts = JobFiles(disk).read_staged([])
    if not parts:
        return []
    ((head, end),) = parts
    assert head == staged.head
    file = disk.open(staged.path)
    head_end = read_head(file)
    assert head_end is not None
    bodies = list(read_frames(file, head_end[1]))
    assert file.size() == end.byte_offset, "the torn tail should be truncated"
    assert end == (bodies[-1].end if bodies else head_end[1])
    return [bytes(body.batch.raw) for body in bodies]


@given(
    groups=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), max_size=6),
    crash_call=st.integers(1, 60),
    seed=st.integers(0, 1000),
    power_loss=st.booleans(),
)
def test_acknowledged_batches_survive_any_crash(
    groups: list[list[int]], crash_call: int, seed: int, power_loss: bool
) -> None:
    disk, staged = SimDisk(seed), make_attempt()
    disk.crash_at(crash_call)
    written: list[bytes] = []
    acknowledged = 0
    base = 1
    try:
        files = JobFiles(disk)
        for group in groups:
            batches = []
            for count in group:
                batches.append(make_batch(base, count))
                base += count
            written += [bytes(new_batch.raw) for new_batch in batches]
            assert write_part(files, staged, batches)
            acknowledged = len(written)
    except SimCrash:
        pass
    bodies = read_bodies(disk.crash(seed) if power_loss else disk.kill(), staged)
    assert bodies == written[: len(bodies)]
    assert len(bodies) >= acknowledged


@given(
    failing=st.lists(st.tuples(st.sampled_from(["open", "write", "sync", "sync_directory"]), st.booleans())),
    seed=st.integers(0, 1000),
)
def test_writing_continues_after_failed_calls(failing: list[tuple[str, bool]], seed: int) -> None:
    disk, staged, acked_bodies = SimDisk(seed), make_attempt(), list[bytes]()
    files = JobFiles(disk)
    for name, fails in [*failing, ("", False)]:
        if fails:
            disk.fail(lambda call, name=name: call.name == name and call.path.startswith("jobs"), errno.EIO)
        new_batch = make_batch(staged.taken_counter + 1, 3 if fails else 2)  # the failed batch was longer
        if write_part(files, staged, [new_batch]):
            acked_bodies.append(bytes(new_batch.raw))
        disk.heal()
    assert staged.synced_position is not None
    assert len(disk.peek(staged.path)) == staged.synced_position.byte_offset
    assert read_bodies(disk.crash(seed), staged) == acked_bodies
    assert acked_bodies


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_flipped_bit_shortens_the_part_and_never_alters_it(position: int, bit: int) -> None:
    disk, staged = SimDisk(1), make_attempt()
    batches = [make_batch(1, 3), make_batch(4, 2), make_batch(6, 1)]
    write_part(JobFiles(disk), staged, batches)
    size = len(disk.peek(staged.path))
    disk.flip(staged.path, position % size, bit)
    bodies = read_bodies(disk, staged)
    assert len(bodies) < len(batches)
    assert bodies == [bytes(new_batch.raw) for new_batch in batches[: len(bodies)]]


def test_checksum_depends_on_the_batches() -> None:
    positions = set()
    for counts in ([3, 2], [3, 2], [2, 3], [5]):
        disk, staged, base = SimDisk(1), make_attempt(), 1
        batches = []
        for count in counts:
            batches.append(make_batch(base, count))
            base += count
        write_part(JobFiles(disk), staged, batches)
        positions.add(staged.synced_position)
    assert len(positions) == 3


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
    (stored,), _ = JobFiles(disk.crash()).read_decisions()
    assert stored.progress == (later if decided.parts else decided.progress)
    JobFiles(disk).forget(decided.job)
    assert JobFiles(disk.crash()).read_decisions() == ([], {})


def test_progress_file_without_refused_rows_is_read() -> None:
    disk, progress = SimDisk(1), Progress(1, PartPosition(2, 3, 4), 5, 6, 7, 8)
    part = CommittedPart(0, 1, 5, 9, 9, 0)
    JobFiles(disk).write_decision(JobDecision(JOB, "", JobState.COMMITTED, 1, digest_parts(()), 5, (part,)))
    content = msgpack.packb([1, 2, 3, 4, 5, 6, 7, 8])
    disk.put(f"jobs/{stem_of(JOB)}.at", content + crc32c(content).to_bytes(4, "little"))
    (stored,), _ = JobFiles(disk).read_decisions()
    assert stored.progress == progress


def test_stored_refused_rows_are_bounded() -> None:
    progress = Progress()
    for row in range(12):
        progress = progress.with_refused(RefusedRow(0, row, "ä" * 200, ErrorCode.INVALID_DELTA, "ö" * 200), 2)
    assert progress.refused == 24
    assert [refused_row.row for refused_row in progress.refused_rows] == list(range(10))
    assert {(refused_row.vector_id, refused_row.text) for refused_row in progress.refused_rows} == {
        ("ä" * 64, "ö" * 150)
    }


@given(st.integers(1, 12), st.booleans(), st.integers(0, 100))
def test_crash_leaves_the_old_or_the_new_decision(crash_call: int, power_loss: bool, seed: int) -> None:
    first = JobDecision(
        JOB, "", JobState.COMMITTED, 1, digest_parts(()), 5, (CommittedPart(0, 1, 5, 9, 9, 0),)
    )
    second = JobDecision(JOB, "", JobState.PUBLISHED, 1, digest_parts(()), 5)
    disk = SimDisk(seed)
    JobFiles(disk).write_decision(first)
    disk.crash_at(disk.calls + crash_call)
    try:
        JobFiles(disk).write_decision(second)
        is_written = True
    except SimCrash:
        is_written = False
    (stored,), corrupted = JobFiles(disk.crash(seed) if power_loss else disk.kill()).read_decisions()
    assert not corrupted
    assert stored in ((second,) if is_written else (first, second))


def test_corrupted_decision_is_reported_and_its_parts_stay() -> None:
    disk, staged, other = SimDisk(1), make_attempt(), make_attempt(1)
    files = JobFiles(disk)
    for part_attempt in (staged, other):
        write_part(files, part_attempt, [make_batch(1, 3)])
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
    assert {staged.path, other.path} <= set(disk.paths())


def test_files_that_no_decision_needs_are_removed() -> None:
    disk = SimDisk(1)
    files = JobFiles(disk)
    for part_attempt in (make_attempt(0, 1), make_attempt(0, 2), make_attempt(1, 1)):
        write_part(files, part_attempt, [make_batch(1, 3)])
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
    remaining_files = {path.rpartition("/")[2] for path in disk.crash().paths()}
    stem = stem_of(JOB)
    assert remaining_files == {f"{stem}-0-2.part", f"{stem}.job", f"{stem}.at", "other.txt"}


def test_digest_of_parts_covers_parts_and_deltas_only() -> None:
    parts = [StagedPart(0, 5, 10), StagedPart(1, 6, 20)]
    assert digest_parts(parts) == digest_parts(
        [StagedPart(1, 9, 20), StagedPart(2, 1, 0), StagedPart(0, 9, 10)]
    )
    assert digest_parts(parts) != digest_parts(parts[:1])
    assert digest_parts(parts) != digest_parts([StagedPart(0, 5, 20), StagedPart(1, 6, 10)])
