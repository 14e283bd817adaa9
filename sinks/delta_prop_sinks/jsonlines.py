"""A sink that appends each delta to a file as one JSON line, with its offset.

It writes each delta once: a line holds the cursor behind it, so a restart reads the last line, cuts a torn
one, and skips what is there. It never rewrites a whole line. Let one process write a file.

Lines stand in the order of delivery. That is the log's order, but for deltas out of the quarantine: these
stand where they were written, marked `"late": true`, behind lines with higher offsets; of each vector the
lines are in the log's order all the same.
"""

from __future__ import annotations

import json
import os
from base64 import b64encode
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import anyio

from delta_prop_sinks.bounds import check_path, check_sink_name
from delta_prop_sinks.sink import ResumePoint, StopSink, TryAgain
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Delta, Dot, Kind, Priority
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from delta_prop_sinks.sink import Delivery, SinkContext
    from delta_prop_wire.batch import LoggedBatch

_SPARSE_KINDS = frozenset({Kind.SPARSE, Kind.SPARSE_ADD})
_VECTOR_KINDS = frozenset({Kind.CREATE, Kind.DENSE})
_NUMBER_NAMES = {Kind.SCALE: "factor", Kind.OFFSET: "amount"}
_TAIL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class JsonLinesStatistics:
    """How far the file is, and what was written since it was opened."""

    applied_offset: int
    lines: int
    bytes: int
    repeats: int


class JsonLinesSink:
    """Appends to the file at `path`.

    A line survives kill -9 once applied; with `fsync=True` (off by default, some milliseconds an apply)
    a power cut too.
    """

    def __init__(self, path: str | Path, *, name: str = "jsonlines", fsync: bool = False) -> None:
        self.name = check_sink_name(name)
        check_path(path)
        self.path = Path(path)
        self.fsync = fsync
        self._context: SinkContext | None = None
        self._file: BinaryIO | None = None
        self._good = 0
        self._torn = False
        self._end = _End(None, 0, frozenset())  # as the last line tells
        self._next_offset = 0
        self._lines = self._bytes = self._repeats = 0

    def check_file(self) -> None:
        """Check that the file can be this sink's; nothing is changed. Raises UsageError."""
        if not self.path.is_file():
            return
        try:
            with self.path.open("rb") as file:
                self._check_opening(file.read(len(_OPENING)))
        except OSError:  # opening it tells why
            return

    async def open(self, context: SinkContext) -> ResumePoint:
        """Open or create the file, cut a torn last line, read how far it is. Raises UsageError, StopSink."""
        try:
            self._end = end = await context.threads.run(self._recover)
        except BaseException as error:
            self._let_go()
            if isinstance(error, OSError):
                raise StopSink(
                    f"{self.path} cannot be read: {error}; mend it, or name another file"
                ) from error
            raise
        self._context = context
        cursor = end.cursor or Cursor(context.log_id, context.epoch, 0)
        self._next_offset = cursor.next_offset if cursor.log_id == context.log_id else 0
        if cursor.log_id != context.log_id:
            self._end = end._replace(ahead=frozenset())
        return ResumePoint(cursor, end.lamport)

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Append a line a delta. Raises TryAgain where the file cannot be written, with no part line left;
        StopSink where it was deleted.
        """
        context = self._context
        if context is None:
            raise UsageError(f"sink {self.name!r} is not open: attach it first")
        try:
            with anyio.CancelScope(shield=True):
                await context.threads.run(partial(self._append, deliveries, context.log_id, context.epoch))
        except OSError as error:
            raise TryAgain(f"{self.path} cannot be written: {error.strerror}") from error
        cursor = self._end.cursor
        if cursor is not None and cursor.log_id == context.log_id:
            context.committed(cursor.next_offset)  # as safe as `fsync` makes it: the log need not keep it

    async def aclose(self) -> None:
        """Sync and close the file. Raises TryAgain where it could not be synced; it is closed anyway."""
        context, self._context = self._context, None
        if context is None:
            return
        try:
            with anyio.CancelScope(shield=True):
                await context.threads.run(self._sync)
        except OSError as error:
            raise TryAgain(f"{self.path} was closed and could not be synced: {error.strerror}") from error
        finally:
            self._let_go()

    def statistics(self) -> JsonLinesStatistics:
        """A snapshot of the sink's numbers."""
        return JsonLinesStatistics(self._next_offset, self._lines, self._bytes, self._repeats)

    # --- on the thread

    def _recover(self) -> _End:
        try:
            self._file = file = self.path.open("a+b", buffering=0)
        except OSError as error:
            raise UsageError(f"{self.path} cannot be opened for appending: {error.strerror}") from None
        length = file.seek(0, os.SEEK_END)
        line, self._good = _last_line(file, length)
        file.seek(0)
        self._check_opening(file.read(len(_OPENING)))
        try:
            found = _End.of(line)
        except (ValueError, KeyError, TypeError, UsageError):
            raise self._foreign() from None
        file.truncate(self._good)  # only now: nothing of a foreign file is touched
        return found

    def _check_opening(self, begin: bytes) -> None:
        if not _OPENING.startswith(begin):  # part of it, where the first line was torn
            raise self._foreign()

    def _foreign(self) -> UsageError:
        return UsageError(f"{self.path} holds lines that this sink did not write: name another file")

    def _append(self, deliveries: Sequence[Delivery], log_id: bytes, epoch: int) -> None:
        lines: list[str] = []
        reached, end = self._next_offset, self._end
        there = end.ahead | self._written_late(deliveries, log_id)
        for delivery in deliveries:
            logged = delivery.logged
            if delivery.batch.is_control:
                continue
            for row in range(logged.count) if delivery.rows is None else delivery.rows.tolist():
                at = logged.offset + row
                if at in there or (at < self._next_offset and not delivery.late):
                    self._repeats += 1
                    continue
                # A late row tells nothing of those below it, so the cursor stays.
                cursor = Cursor(log_id, epoch, reached if delivery.late else at + 1)
                ahead = {other for other in end.ahead if other >= cursor.next_offset}
                if delivery.late:
                    there |= {at}
                    ahead |= {at} if at >= reached else set()
                end = _End(cursor, max(end.lamport, logged.lamport + row), frozenset(ahead))
                lines.append(_line(logged, row, end, late=delivery.late))
            if not delivery.late:
                reached = max(reached, delivery.next_offset)
        data = "".join(lines).encode()
        self._write(data)
        self._next_offset, self._end = reached, end
        self._lines += len(lines)
        self._bytes += len(data)

    def _written_late(self, deliveries: Sequence[Delivery], log_id: bytes) -> frozenset[int]:
        """Offsets of late rows that have a line: the whole file is read, since late rows are rare."""
        wanted = {
            delivery.first_offset + row
            for delivery in deliveries
            if delivery.late and delivery.rows is not None
            for row in delivery.rows.tolist()
        }
        if not wanted:
            return frozenset()
        found: set[int] = set()
        with self.path.open("rb") as file:
            for line in file:
                offset = line[len(_OPENING) : line.find(b",")]
                if offset.isdigit() and int(offset) in wanted and line.endswith(b"\n"):
                    cursor = _End.of(line).cursor
                    if cursor is not None and cursor.log_id == log_id:
                        found.add(int(offset))
        return frozenset(found)

    def _write(self, data: bytes) -> None:
        file = self._file
        assert file is not None
        if os.fstat(file.fileno()).st_nlink == 0:
            raise StopSink(
                f"{self.path} was deleted while in use: detach the sink and attach it again, "
                "which begins a new file"
            )
        try:
            if self._torn:
                file.truncate(self._good)
            self._torn = True
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) or 0 :]
            if self.fsync:
                os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):  # else it is cut before the next line
                file.truncate(self._good)
                self._torn = False
            raise
        self._torn = False
        self._good += len(data)

    def _sync(self) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())

    def _let_go(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()  # unbuffered: nothing is left to write


class _End(NamedTuple):
    """What the last line tells of all lines: the cursor, the highest Lamport number, and the offsets of
    late rows that were written although they do not lie below the cursor.
    """

    cursor: Cursor | None
    lamport: int
    ahead: frozenset[int]

    @classmethod
    def of(cls, line: bytes) -> _End:
        """Raises ValueError, KeyError, TypeError, UsageError where the line is not ours."""
        if not line:
            return cls(None, 0, frozenset())
        form = json.loads(line)
        return cls(
            Cursor.parse(form["cursor"]),
            int(form.get("lamport_max", form["lamport"])),
            frozenset(map(int, form.get("ahead", ()))),
        )


def to_json(delta: Delta) -> dict[str, Any]:
    """A delta in the form that `publish` reads: what is at its default is left out."""
    operation = delta.operation
    kind, values = operation.kind, operation.values
    known = kind in Kind._value2member_map_
    form: dict[str, Any] = {
        "vector_id": delta.vector_id,
        "namespace": delta.namespace,
        "op": Kind(kind).name.lower() if known else kind,
    }
    if kind in _SPARSE_KINDS and operation.indices is not None:
        form["indices"] = operation.indices.tolist()
    if values is not None and kind in _NUMBER_NAMES:
        form[_NUMBER_NAMES[Kind(kind)]] = _numbers(values)[0]
    elif values is not None:
        form["vector" if kind in _VECTOR_KINDS else "values"] = _numbers(values)
    if kind == Kind.TRANSFORM:
        form["name"] = operation.data.decode(errors="replace")
    elif operation.data or kind == Kind.OPAQUE:
        form["data"] = b64encode(operation.data).decode()
    form.update(_extras(delta))
    return form


def _extras(delta: Delta) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    if delta.id is not None:
        extras["id"] = delta.id.hex()
    if delta.parents:
        extras["parents"] = [str(one) if isinstance(one, Dot) else one.hex() for one in delta.parents]
    if delta.priority != Priority.NORMAL:
        extras["priority"] = delta.priority.name.lower()
    if delta.metadata is not None:
        extras["metadata"] = delta.metadata
    if delta.topics:
        extras["topics"] = list(delta.topics)
    if delta.timestamp:
        extras["timestamp"] = delta.timestamp
    return extras


def _numbers(values: NDArray[Any]) -> list[float]:
    # The shortest decimals that give the same float32 back; tolist() would print float64's 17 digits.
    return [float(text) for text in values.astype("U32").tolist()]


_OPENING = b'{"offset":'
"""How every line begins."""


def _line(logged: LoggedBatch, row: int, end: _End, *, late: bool) -> str:
    form = {"offset": logged.offset + row, **to_json(logged.batch.delta(row, logged.source))}
    form["dot"] = str(logged.batch.dot(row))
    form["lamport"] = logged.lamport + row
    if late:
        form["late"] = True
    if end.lamport != form["lamport"]:  # forwarded and late rows fall behind
        form["lamport_max"] = end.lamport
    if end.ahead:
        form["ahead"] = sorted(end.ahead)
    form["cursor"] = str(end.cursor)
    return json.dumps(form, ensure_ascii=False, separators=(",", ":")) + "\n"


def _last_line(file: BinaryIO, length: int) -> tuple[bytes, int]:
    """The last whole line, and where it ends; what follows is torn."""
    tail, start = b"", length
    while start:
        step = min(_TAIL_BYTES, start)
        start -= step
        file.seek(start)
        tail = file.read(step) + tail
        end = tail.rfind(b"\n")
        begin = tail.rfind(b"\n", 0, max(end, 0))
        if end >= 0 and (begin >= 0 or start == 0):
            return tail[begin + 1 : end], start + end + 1
    return b"", 0
