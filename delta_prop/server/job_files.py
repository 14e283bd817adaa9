"""Jobs as small files: what was decided of each, and how far its publication is.

A job's name is hashed into the names of its files. A decision is one file, written aside, synced and given
its name: there is one or there is none. Files that no decision needs are removed when the directory is read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from delta_prop.server.part_file import DIRECTORY, SUFFIX, Mark, PartHead, frames, path_of, read_head
from delta_prop_broker.log.files.identity import read_small, replace_file
from delta_prop_broker.log.files.names import TEMPORARY
from delta_prop_wire.crc import crc32c
from delta_prop_wire.errors import DeltaPropError
from delta_prop_wire.frames import JobState, JobStatus, RefusedRow
from delta_prop_wire.packing import cut
from delta_prop_wire.requests import REFUSED_ID_BYTES_MAX, REFUSED_ROWS_MAX, REFUSED_TEXT_BYTES_MAX
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from delta_prop_broker.disk import Disk
    from delta_prop_wire.frames import StagedPart

VERSION = 1
_DECISION, _PROGRESS = ".job", ".at"
_CRC_BYTES = 4


class JobDamaged(DeltaPropError):
    """A decision that was written down cannot be read."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(
            f"damage in {path}: {reason}; nothing was changed; put a sound copy in its place, or remove it "
            "and run that job again, which repeats nothing that was published"
        )
        self.path = path


class KeptPart(NamedTuple):
    """A part that is published. `size`, `checksum`: of its file; `behind`: its origin's watermark when the
    job was decided, up to which its deltas are repeats.
    """

    part: int
    attempt: int
    deltas: int
    size: int
    checksum: int
    behind: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a publication is: part `index` up to `mark`. `again`: the first counter of the origin of
    refused rows that the frame behind the mark may take; 0 where none was refused. `refused_rows`: the first.
    """

    index: int = 0
    mark: Mark = field(default_factory=Mark)
    again: int = 0
    published: int = 0
    duplicates: int = 0
    refused: int = 0
    refused_rows: tuple[RefusedRow, ...] = ()

    def with_refused(self, row: RefusedRow, deltas: int = 1) -> Progress:
        """So many deltas more are refused, from this row on; the first rows are told of."""
        rows = self.refused_rows
        if len(rows) < REFUSED_ROWS_MAX:
            short = cut(row.vector_id, REFUSED_ID_BYTES_MAX), row.code, cut(row.text, REFUSED_TEXT_BYTES_MAX)
            rows = (*rows, RefusedRow(row.part, row.row, *short))
        return replace(self, refused=self.refused + deltas, refused_rows=rows)


@dataclass(frozen=True, slots=True)
class Decided:
    """What was decided of a job, and what became of it. `parts`: until it is published; `content`: a digest
    of (part, deltas) of all; `said`: one of what they say as well. `decided_us`: log time.
    """

    job: str
    owner: str
    state: JobState
    decided_us: int
    content: bytes
    deltas: int = 0
    parts: tuple[KeptPart, ...] = ()
    progress: Progress = field(default_factory=Progress)
    said: bytes = b""

    @property
    def bytes(self) -> int:
        """What its parts take on disk."""
        return sum(part.size for part in self.parts)

    def status(self) -> JobStatus:
        """How it is, as clients are told."""
        done = self.progress
        counts = done.published, done.duplicates, done.refused
        return JobStatus(self.state, self.deltas, *counts, done.refused_rows)


def job_told(job: str, owner: str, status: JobStatus, size: int) -> dict[str, Any]:
    """A job, for JSON."""
    told: dict[str, Any] = {"job": job, "state": status.state.value, "token": owner, "bytes": size}
    told |= {"deltas": status.deltas, "published": status.published}
    rows = [one._asdict() | {"code": one.code.name, "text": one.why} for one in status.refused_rows]
    return told | {"duplicates": status.duplicates, "refused": status.refused, "refused_rows": rows}


class Found(NamedTuple):
    """A part that nobody has decided of, as its file has it."""

    head: PartHead
    end: Mark


def stem_of(job: str) -> str:
    """What stands for a job in the names of its files."""
    return blake2b(job.encode(), digest_size=16).hexdigest()


def content_of(parts: Iterable[StagedPart]) -> bytes:
    """A digest that is the same for the same parts with as many deltas, whichever attempts brought them."""
    return _digest(sorted((one.part, one.deltas) for one in parts if one.deltas))


def said_of(parts: Iterable[StagedPart]) -> bytes:
    """A digest that is the same for parts that say the same."""
    return _digest(sorted((one.part, one.deltas, one.checksum) for one in parts if one.deltas))


def _digest(told: list[tuple[int, ...]]) -> bytes:
    return blake2b(msgpack.packb(told), digest_size=16).digest()


class JobFiles:
    """The directory. Calls block; those that write come from one thread at a time. Raises OSError."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self._prepared = False

    def prepare(self) -> None:
        """Have the directory there, durably."""
        if not self._prepared:
            self.disk.make_directory(DIRECTORY)
            self.disk.sync_directory("")
            self._prepared = True

    def read_decided(self) -> tuple[list[Decided], dict[str, JobDamaged]]:
        """All decisions, in the order in which they were made; by stem, those that cannot be read."""
        found, damaged = [], {}
        for name in self.disk.list(DIRECTORY):
            stem = name.removesuffix(_DECISION)
            if stem == name:
                continue
            try:
                decided = read_decision(self.disk, f"{DIRECTORY}/{name}")
            except JobDamaged as error:
                damaged[stem] = error
                continue
            progress = self._read_progress(stem) if decided.parts else None
            found.append(decided if progress is None else replace(decided, progress=progress))
        return sorted(found, key=lambda one: (one.decided_us, one.job)), damaged

    def read_staged(
        self, decided: Iterable[Decided], damaged: Iterable[str] = (), *, read_only: bool = False
    ) -> list[Found]:
        """Read all parts that nobody has decided of. Unless `read_only`, cut what is unsound behind them, and
        remove what no decision needs; nothing of the stems `damaged` is touched.
        """
        left_alone = frozenset(damaged)
        needed: dict[str, set[str]] = {}
        for one in decided:
            stem = stem_of(one.job)
            needed[stem] = {path_of(stem, part.part, part.attempt) for part in one.parts}
            needed[stem].add(f"{DIRECTORY}/{stem}{_DECISION}")
            if one.parts:
                needed[stem].add(f"{DIRECTORY}/{stem}{_PROGRESS}")
        found, gone = [], []
        for name in self.disk.list(DIRECTORY):
            path, stem = f"{DIRECTORY}/{name}", name.partition("-")[0].partition(".")[0]
            if stem in left_alone:
                continue
            kept, staged = needed.get(stem), None
            if kept is None and name.endswith(SUFFIX):
                staged = self._read_part(path, read_only=read_only)
            if staged is not None:
                found.append(staged)
            elif path not in (kept or ()) and name.endswith((SUFFIX, _PROGRESS, TEMPORARY)):
                gone.append(path)
        if not read_only:
            self.remove(gone)
        return found

    def count(self) -> dict[str, int]:
        """How many jobs there are, by state, without a look into what is staged."""
        decided, damaged = self.read_decided()
        known = damaged.keys() | {stem_of(one.job) for one in decided}
        parts = {name.partition("-")[0] for name in self.disk.list(DIRECTORY) if name.endswith(SUFFIX)}
        counts = Counter(one.state.value for one in decided)
        counts |= Counter({JobState.STAGING.value: len(parts - known), "damaged": len(damaged)})
        return {state: count for state, count in counts.items() if count}

    def write_decided(self, decided: Decided) -> None:
        """Write a decision down; durable when this returns."""
        self.prepare()
        path = f"{DIRECTORY}/{stem_of(decided.job)}{_DECISION}"
        replace_file(self.disk, DIRECTORY, path, [_signed(_packed(decided))])

    def write_progress(self, job: str, progress: Progress) -> None:
        """Write down how far a publication is; durable when this returns."""
        path = f"{DIRECTORY}/{stem_of(job)}{_PROGRESS}"
        replace_file(self.disk, DIRECTORY, path, [_signed(msgpack.packb(_plain(progress)))])

    def forget(self, job: str) -> None:
        """Remove what was decided of a job."""
        self.remove([f"{DIRECTORY}/{stem_of(job)}{_DECISION}"])

    def drop(self, job: str, paths: Iterable[str]) -> None:
        """Remove what is staged of a job, and first of all a decision of which nobody was told."""
        stem = stem_of(job)
        self.remove([f"{DIRECTORY}/{stem}{_DECISION}", *paths])

    def remove_parts(self, decided: Decided) -> None:
        """Remove what a decision needs no more."""
        stem = stem_of(decided.job)
        paths = {path_of(stem, part.part, part.attempt) for part in decided.parts}
        self.remove([*paths, f"{DIRECTORY}/{stem}{_PROGRESS}"])

    def remove(self, paths: Iterable[str]) -> None:
        """Remove files, as far as they are there; durable when this returns."""
        there = {f"{DIRECTORY}/{name}" for name in self.disk.list(DIRECTORY)}
        gone = [path for path in paths if path in there]
        for path in gone:
            self.disk.remove(path)
        if gone:
            self.disk.sync_directory(DIRECTORY)

    # --- helpers

    def _read_progress(self, stem: str) -> Progress | None:
        """None where there is none, or none that is sound: what is done is found by dots in any case."""
        raw = read_small(self.disk, f"{DIRECTORY}/{stem}{_PROGRESS}")
        content = None if raw is None else _checked(raw)
        if content is None:
            return None
        return _progress(msgpack.unpackb(content))

    def _read_part(self, path: str, *, read_only: bool) -> Found | None:
        file = self.disk.open(path, read_only=read_only)
        try:
            known = read_head(file)
            if known is None:
                return None
            head, end = known
            for frame in frames(file, end):
                end = frame.end
            if not read_only and file.size() > end.position:
                file.truncate(end.position)
                file.sync()
            return Found(head, end)
        finally:
            file.close()


def read_decision(disk: Disk, path: str) -> Decided:
    """What was decided. Raises JobDamaged, OSError."""
    raw = read_small(disk, path)
    content = None if raw is None else _checked(raw)
    if content is None:
        raise JobDamaged(path, "it does not fit its checksum")
    version, job, owner, state, decided_us, digest, deltas, parts, progress, said = msgpack.unpackb(content)
    if version != VERSION:
        raise JobDamaged(path, f"it says version {version}, this program knows {VERSION}")
    kept = tuple(KeptPart(*one) for one in parts)
    return Decided(job, owner, JobState(state), decided_us, digest, deltas, kept, _progress(progress), said)


def _packed(decided: Decided) -> bytes:
    packed: bytes = msgpack.packb(
        [
            VERSION,
            decided.job,
            decided.owner,
            decided.state.value,
            decided.decided_us,
            decided.content,
            decided.deltas,
            decided.parts,
            _plain(decided.progress),
            decided.said,
        ]
    )
    return packed


def _plain(progress: Progress) -> list[Any]:
    mark = progress.mark
    told = progress.index, mark.position, mark.checksum, mark.counter, progress.again
    rows = [[*one[:3], int(one.code), one.text] for one in progress.refused_rows]
    return [*told, progress.published, progress.duplicates, progress.refused, rows]


def _progress(fields: list[Any]) -> Progress:
    index, position, checksum, counter, again, published, duplicates, refused, *more = fields
    rows = tuple(
        RefusedRow(part, row, vector_id, ErrorCode(code), text)
        for part, row, vector_id, code, text in (more[0] if more else ())  # files from before have none
    )
    mark = Mark(position, checksum, counter)
    return Progress(index, mark, again, published, duplicates, refused, rows)


def _signed(content: bytes) -> bytes:
    return content + crc32c(content).to_bytes(_CRC_BYTES, "little")


def _checked(raw: bytes) -> bytes | None:
    content = raw[:-_CRC_BYTES]
    return content if _signed(content) == raw and content else None
