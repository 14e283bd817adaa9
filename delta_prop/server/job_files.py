"""The files of jobs: the decision about each, and the progress of its publication.

The names of a job's files begin with a hash of its name. A decision is one file, written under a temporary
name, synced and renamed, so that it is complete or missing. Files that no decision needs are removed when the
directory is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from delta_prop.server.part_file import (
    PART_SUFFIX,
    PartHead,
    PartPosition,
    path_of,
    read_frames,
    read_head,
)
from delta_prop_broker.corruption import LogCorrupted
from delta_prop_broker.segments.paths import JOBS, TEMPORARY
from delta_prop_broker.segments.small_file import Checksum, read_checked, replace_checked
from delta_prop_wire.errors import DeltaPropError
from delta_prop_wire.frames import JobState, JobStatus, RefusedRow, StagedPart
from delta_prop_wire.packing import truncate
from delta_prop_wire.requests import REFUSED_ID_BYTES_MAX, REFUSED_ROWS_MAX, REFUSED_TEXT_BYTES_MAX
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk

VERSION = 1
_DECISION_SUFFIX, _PROGRESS_SUFFIX = ".job", ".at"
ERASED = "its vector was erased since"


class JobCorrupted(DeltaPropError):
    """A stored decision that cannot be read."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(
            f"{path}: corrupted: {reason}; nothing was changed: replace it with an intact copy, or remove it "
            "and rerun the job: its deltas are recognised as duplicates"
        )
        self.path = path


class CommittedPart(NamedTuple):
    """A part that a committed job publishes. `deltas`: their number; `size`, `checksum`: of its file.

    `watermark`: that of the part's origin at the decision; the part's deltas up to it are duplicates.
    """

    part: int
    attempt: int
    deltas: int
    size: int
    checksum: int
    watermark: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a publication: the parts before `index`, and part `index` up to `position`, are done.

    `published`, `duplicates`, `refused`: numbers of deltas. `refused_rows`: the first refused rows.

    `retry_base`: if rows of the frame after `position` were refused, the first counter in the retry origin
    under which its rows are sent again; else 0.
    """

    index: int = 0
    position: PartPosition = field(default_factory=PartPosition)
    retry_base: int = 0
    published: int = 0
    duplicates: int = 0
    refused: int = 0
    refused_rows: tuple[RefusedRow, ...] = ()

    def with_refused(self, row: RefusedRow, count: int = 1) -> Progress:
        """Return the progress with `count` more refused deltas, from `row` on; only the first are listed."""
        rows = self.refused_rows
        if len(rows) < REFUSED_ROWS_MAX:
            truncated = (
                truncate(row.vector_id, REFUSED_ID_BYTES_MAX),
                row.code,
                truncate(row.text, REFUSED_TEXT_BYTES_MAX),
            )
            rows = (*rows, RefusedRow(row.part, row.row, *truncated))
        return replace(self, refused=self.refused + count, refused_rows=rows)

    def without_vector(self, vector_id: str) -> Progress:
        """Return the progress without the id of a vector, and without reasons that name it."""
        listed = truncate(vector_id, REFUSED_ID_BYTES_MAX)
        rows = tuple(
            row._replace(vector_id="", text=ERASED)
            if row.vector_id == listed or vector_id in row.text
            else row
            for row in self.refused_rows
        )
        return self if rows == self.refused_rows else replace(self, refused_rows=rows)


@dataclass(frozen=True, slots=True)
class JobDecision:
    """A decision about a job, and its outcome. `decided_us`: log time. `deltas`: the number in all parts.

    `parts`: none once published. `parts_digest`: of (part, deltas) of all parts; `content_digest`: of their
    contents as well.
    """

    job: str
    owner: str
    state: JobState
    decided_us: int
    parts_digest: bytes
    deltas: int = 0
    parts: tuple[CommittedPart, ...] = ()
    progress: Progress = field(default_factory=Progress)
    content_digest: bytes = b""

    @property
    def bytes(self) -> int:
        """Bytes of its parts on disk."""
        return sum(part.size for part in self.parts)

    def status(self) -> JobStatus:
        """Return its status for clients."""
        progress = self.progress
        counts = progress.published, progress.duplicates, progress.refused
        return JobStatus(self.state, self.deltas, *counts, progress.refused_rows)


def job_to_json(job: str, owner: str, status: JobStatus, size: int) -> dict[str, Any]:
    """Return a job as a JSON object."""
    fields: dict[str, Any] = {"job": job, "state": status.state.value, "token": owner, "bytes": size}
    fields |= {"deltas": status.deltas, "published": status.published}
    rows = [row._asdict() | {"code": row.code.name, "text": row.reason} for row in status.refused_rows]
    return fields | {"duplicates": status.duplicates, "refused": status.refused, "refused_rows": rows}


class FoundPart(NamedTuple):
    """A part without a decision, as found in its file."""

    head: PartHead
    end: PartPosition


def stem_of(job: str) -> str:
    """Return the hash that names a job's files."""
    return blake2b(job.encode(), digest_size=16).hexdigest()


def digest_parts(parts: Iterable[StagedPart]) -> bytes:
    """Return a digest of the parts and their counts of deltas, the same for all attempts."""
    return _digest(sorted((part.part, part.deltas) for part in parts if part.deltas))


def digest_content(parts: Iterable[StagedPart]) -> bytes:
    """Return a digest that is the same for parts with the same content."""
    return _digest(sorted((part.part, part.deltas, part.checksum) for part in parts if part.deltas))


def _digest(rows: list[tuple[int, ...]]) -> bytes:
    return blake2b(msgpack.packb(rows), digest_size=16).digest()


class JobFiles:
    """The directory of jobs. Calls block; writes come from one thread at a time. Raises OSError."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self._prepared = False

    def prepare(self) -> None:
        """Create the directory, durably."""
        if not self._prepared:
            self.disk.make_directory(JOBS)
            self.disk.sync_directory("")
            self._prepared = True

    def read_decisions(self) -> tuple[list[JobDecision], dict[str, JobCorrupted]]:
        """Return all decisions, in the order in which they were made, and the corrupted ones, by stem."""
        decisions, corrupted = [], {}
        for name in self.disk.list(JOBS):
            stem = name.removesuffix(_DECISION_SUFFIX)
            if stem == name:
                continue
            try:
                decision = read_decision(self.disk, f"{JOBS}/{name}")
            except JobCorrupted as error:
                corrupted[stem] = error
                continue
            progress = self._read_progress(stem) if decision.parts else None
            decisions.append(decision if progress is None else replace(decision, progress=progress))
        return sorted(decisions, key=lambda decision: (decision.decided_us, decision.job)), corrupted

    def read_staged(
        self, decisions: Iterable[JobDecision], corrupted: Iterable[str] = (), *, read_only: bool = False
    ) -> list[FoundPart]:
        """Read all parts without a decision; skip the files of corrupted decisions, given by their stems.

        Unless `read_only`, truncate torn tails, and remove the files that no decision needs.
        """
        skipped = frozenset(corrupted)
        needed = _needed_paths(decisions)
        parts, unneeded = [], []
        for name in self.disk.list(JOBS):
            path, stem = f"{JOBS}/{name}", _stem_in(name)
            if stem in skipped:
                continue
            needed_paths, staged = needed.get(stem), None
            if needed_paths is None and name.endswith(PART_SUFFIX):
                staged = self._read_part(path, read_only=read_only)
            if staged is not None:
                parts.append(staged)
            elif path not in (needed_paths or ()) and name.endswith(
                (PART_SUFFIX, _PROGRESS_SUFFIX, TEMPORARY)
            ):
                unneeded.append(path)
        if not read_only:
            self.remove(unneeded)
        return parts

    def remove_unneeded(self, decisions: Iterable[JobDecision]) -> None:
        """Remove the files of decided jobs that no decision needs; a failing disk has left them."""
        needed = _needed_paths(decisions)
        paths = {f"{JOBS}/{name}": needed.get(_stem_in(name)) for name in self.disk.list(JOBS)}
        self.remove(path for path, needed_paths in paths.items() if needed_paths and path not in needed_paths)

    def count_by_state(self) -> dict[str, int]:
        """Count the jobs by state, without reading staged parts."""
        decisions, corrupted = self.read_decisions()
        known = corrupted.keys() | {stem_of(decision.job) for decision in decisions}
        parts = {name.partition("-")[0] for name in self.disk.list(JOBS) if name.endswith(PART_SUFFIX)}
        counts = Counter(decision.state.value for decision in decisions)
        counts |= Counter({JobState.STAGING.value: len(parts - known), "corrupted": len(corrupted)})
        return {state: count for state, count in counts.items() if count}

    def write_decision(self, decision: JobDecision) -> None:
        """Write a decision; durable when this returns."""
        self.prepare()
        path = f"{JOBS}/{stem_of(decision.job)}{_DECISION_SUFFIX}"
        replace_checked(self.disk, path, _pack_decision(decision), Checksum.TRAILER)

    def write_progress(self, job: str, progress: Progress) -> None:
        """Write the progress of a publication; durable when this returns."""
        path = f"{JOBS}/{stem_of(job)}{_PROGRESS_SUFFIX}"
        replace_checked(self.disk, path, msgpack.packb(_pack_progress(progress)), Checksum.TRAILER)

    def forget(self, job: str) -> None:
        """Remove the decision about a job."""
        self.remove([f"{JOBS}/{stem_of(job)}{_DECISION_SUFFIX}"])

    def drop(self, job: str, paths: Iterable[str]) -> None:
        """Remove the staged parts of a job, and before them its unreported decision, if there is one."""
        stem = stem_of(job)
        self.remove([f"{JOBS}/{stem}{_DECISION_SUFFIX}", *paths])

    def remove_parts(self, decision: JobDecision) -> None:
        """Remove the parts of a published job and its progress, which the decision no longer needs."""
        stem = stem_of(decision.job)
        paths = {path_of(stem, part.part, part.attempt) for part in decision.parts}
        self.remove([*paths, f"{JOBS}/{stem}{_PROGRESS_SUFFIX}"])

    def remove(self, paths: Iterable[str]) -> None:
        """Remove files, if they exist; durable when this returns."""
        existing = {f"{JOBS}/{name}" for name in self.disk.list(JOBS)}
        removed = [path for path in paths if path in existing]
        for path in removed:
            self.disk.remove(path)
        if removed:
            self.disk.sync_directory(JOBS)

    # --- helpers

    def _read_progress(self, stem: str) -> Progress | None:
        """Return the progress; None if it is missing or corrupted.

        In both cases the dots in the log show what is published.
        """
        try:
            content = read_checked(self.disk, f"{JOBS}/{stem}{_PROGRESS_SUFFIX}", Checksum.TRAILER)
        except LogCorrupted:
            return None
        return None if content is None else _unpack_progress(msgpack.unpackb(content))

    def _read_part(self, path: str, *, read_only: bool) -> FoundPart | None:
        with closing(self.disk.open(path, read_only=read_only)) as file:
            head_and_end = read_head(file)
            if head_and_end is None:
                return None
            head, end = head_and_end
            for frame in read_frames(file, end):
                end = frame.end
            if not read_only and file.size() > end.byte_offset:
                file.truncate(end.byte_offset)
                file.sync()
            return FoundPart(head, end)


def _stem_in(name: str) -> str:
    return name.partition("-")[0].partition(".")[0]


def _needed_paths(decisions: Iterable[JobDecision]) -> dict[str, set[str]]:
    """Return the paths of the files that decisions need, by the stem of their job."""
    needed: dict[str, set[str]] = {}
    for decision in decisions:
        stem = stem_of(decision.job)
        needed[stem] = {path_of(stem, part.part, part.attempt) for part in decision.parts}
        needed[stem].add(f"{JOBS}/{stem}{_DECISION_SUFFIX}")
        if decision.parts:
            needed[stem].add(f"{JOBS}/{stem}{_PROGRESS_SUFFIX}")
    return needed


def read_decision(disk: Disk, path: str) -> JobDecision:
    """Read a decision. Raises JobCorrupted, OSError."""
    try:
        content = read_checked(disk, path, Checksum.TRAILER)
    except LogCorrupted:
        content = None
    if content is None:
        raise JobCorrupted(path, "it does not match its checksum")
    version, job, owner, state, decided_us, parts_digest, deltas, parts, progress, content_digest = (
        msgpack.unpackb(content)
    )
    if version != VERSION:
        raise JobCorrupted(path, f"version {version} is not {VERSION}, the one that this program reads")
    committed = tuple(CommittedPart(*part) for part in parts)
    return JobDecision(
        job,
        owner,
        JobState(state),
        decided_us,
        parts_digest,
        deltas,
        committed,
        _unpack_progress(progress),
        content_digest,
    )


def _pack_decision(decision: JobDecision) -> bytes:
    packed: bytes = msgpack.packb(
        [
            VERSION,
            decision.job,
            decision.owner,
            decision.state.value,
            decision.decided_us,
            decision.parts_digest,
            decision.deltas,
            decision.parts,
            _pack_progress(decision.progress),
            decision.content_digest,
        ]
    )
    return packed


def _pack_progress(progress: Progress) -> list[Any]:
    position = progress.position
    fields = progress.index, position.byte_offset, position.checksum, position.counter, progress.retry_base
    rows = [[*row[:3], int(row.code), row.text] for row in progress.refused_rows]
    return [*fields, progress.published, progress.duplicates, progress.refused, rows]


def _unpack_progress(fields: list[Any]) -> Progress:
    index, byte_offset, checksum, counter, retry_base, published, duplicates, refused, *more = fields
    rows = tuple(
        RefusedRow(part, row, vector_id, ErrorCode(code), text)
        for part, row, vector_id, code, text in (more[0] if more else ())  # older files list no rows
    )
    position = PartPosition(byte_offset, checksum, counter)
    return Progress(index, position, retry_base, published, duplicates, refused, rows)
