"""A sink that appends each delta to a file as one JSON line, with its offset.

It writes each delta once: each line holds the cursor after its delta, so a restart reads the last complete
line, truncates a torn one, and skips rows that have a line. It never rewrites a complete line. Let only one
process write a file.

Lines are in delivery order. That is log order, except for deltas released from quarantine: their lines are
marked `"redelivered": true` and follow lines with higher offsets; the lines of each vector are still in log
order.
"""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import anyio
from numpy.typing import NDArray

from delta_prop_sinks.argument_checks import check_path, check_sink_name
from delta_prop_sinks.sink import Delivery, ResumePoint, SinkContext, StopSink, TryAgain
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Delta, Dot, Kind, Priority
from delta_prop_wire.errors import UsageError

_SPARSE_KINDS = frozenset({Kind.SPARSE, Kind.SPARSE_ADD})
_VECTOR_KINDS = frozenset({Kind.CREATE, Kind.DENSE})
_NUMBER_NAMES = {Kind.SCALE: "factor", Kind.OFFSET: "amount"}
_LINE_START = b'{"offset":'
"""The first bytes of every line."""
_TAIL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class JsonLinesStatistics:
    """The offset that the file has reached, and counts since it was opened.

    `duplicates`: redelivered deltas that the file already had.
    """

    applied_offset: int
    lines: int
    bytes: int
    duplicates: int


class JsonLinesSink:
    """Appends to the file at `path`.

    An applied line survives kill -9; with `fsync=True` (off by default, some milliseconds per apply) it also
    survives a power failure.
    """

    def __init__(self, path: str | Path, *, name: str = "jsonlines", fsync: bool = False) -> None:
        self.name = check_sink_name(name)
        check_path(path)
        self.path = Path(path)
        self.fsync = fsync
        self._context: SinkContext | None = None
        self._file: BinaryIO | None = None
        self._intact_bytes = 0  # the file's length up to its last complete line
        self._is_torn = False  # True if bytes after the last complete line must be truncated
        self._last_line = _LastLine(None, 0, frozenset())
        self._next_offset = 0
        self._lines = self._bytes = self._duplicates = 0

    def check_file(self) -> None:
        """Check that the file can be this sink's; changes nothing. Raises UsageError."""
        if not self.path.is_file():
            return
        try:
            with self.path.open("rb") as file:
                self._check_line_start(file.read(len(_LINE_START)))
        except OSError:  # open() reports the reason
            return

    async def open(self, context: SinkContext) -> ResumePoint:
        """Open or create the file, truncate a torn line, read its cursor. Raises UsageError, StopSink."""
        try:
            self._last_line = last_line = await context.threads.run(self._recover)
        except BaseException as error:
            self._release()
            if isinstance(error, OSError):
                raise StopSink(
                    f"{self.path} cannot be read ({error}): repair it, or name another file"
                ) from error
            raise
        self._context = context
        cursor = last_line.cursor or Cursor(context.log_id, context.epoch, 0)
        self._next_offset = cursor.next_offset if cursor.log_id == context.log_id else 0
        if cursor.log_id != context.log_id:
            self._last_line = last_line._replace(ahead=frozenset())
        return ResumePoint(cursor, last_line.lamport)

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Append a line per delta. Raises TryAgain, with no partial line left, or StopSink if deleted."""
        context = self._context
        if context is None:
            raise UsageError(f"sink {self.name!r} is not open: attach it first")
        try:
            with anyio.CancelScope(shield=True):
                await context.threads.run(partial(self._append, deliveries, context.log_id, context.epoch))
        except OSError as error:
            raise TryAgain(f"{self.path} cannot be written: {error.strerror}") from error
        cursor = self._last_line.cursor
        if cursor is not None and cursor.log_id == context.log_id:
            context.committed(cursor.next_offset)  # as durable as `fsync` makes it, so the log may drop it

    async def aclose(self) -> None:
        """Sync and close the file. Raises TryAgain if it could not be synced; it is closed even then."""
        context, self._context = self._context, None
        if context is None:
            return
        try:
            with anyio.CancelScope(shield=True):
                await context.threads.run(self._sync)
        except OSError as error:
            raise TryAgain(f"{self.path} was closed and could not be synced: {error.strerror}") from error
        finally:
            self._release()

    def statistics(self) -> JsonLinesStatistics:
        """Return a snapshot of the sink's numbers."""
        return JsonLinesStatistics(self._next_offset, self._lines, self._bytes, self._duplicates)

    def _recover(self) -> _LastLine:
        try:
            self._file = file = self.path.open("a+b", buffering=0)
        except OSError as error:
            raise UsageError(f"{self.path} cannot be opened for appending: {error.strerror}") from None
        length = file.seek(0, os.SEEK_END)
        line, self._intact_bytes = _read_last_line(file, length)
        file.seek(0)
        self._check_line_start(file.read(len(_LINE_START)))
        try:
            last_line = _LastLine.of(line)
        except (ValueError, KeyError, TypeError, UsageError):
            raise self._new_foreign_error() from None
        file.truncate(self._intact_bytes)  # after the checks: a foreign file stays untouched
        return last_line

    def _check_line_start(self, start: bytes) -> None:
        if not _LINE_START.startswith(start):  # a torn first line may be shorter
            raise self._new_foreign_error()

    def _new_foreign_error(self) -> UsageError:
        return UsageError(f"{self.path} holds lines that this sink did not write: name another file")

    def _append(self, deliveries: Sequence[Delivery], log_id: bytes, epoch: int) -> None:
        lines: list[str] = []
        next_offset, last_line = self._next_offset, self._last_line
        written_offsets = last_line.ahead | self._find_written_offsets(deliveries, log_id)
        for delivery in deliveries:
            logged = delivery.logged
            if delivery.batch.is_control:
                continue
            for row in range(logged.count) if delivery.rows is None else delivery.rows.tolist():
                offset = logged.offset + row
                if offset in written_offsets or (offset < self._next_offset and not delivery.redelivered):
                    self._duplicates += 1
                    continue
                # A redelivered row proves nothing about rows below it, so the cursor stays.
                cursor = Cursor(log_id, epoch, next_offset if delivery.redelivered else offset + 1)
                ahead = {other for other in last_line.ahead if other >= cursor.next_offset}
                if delivery.redelivered:
                    written_offsets |= {offset}
                    ahead |= {offset} if offset >= next_offset else set()
                last_line = _LastLine(cursor, max(last_line.lamport, logged.lamport + row), frozenset(ahead))
                lines.append(_line(logged, row, last_line, redelivered=delivery.redelivered))
            if not delivery.redelivered:
                next_offset = max(next_offset, delivery.next_offset)
        data = "".join(lines).encode()
        self._write(data)
        self._next_offset, self._last_line = next_offset, last_line
        self._lines += len(lines)
        self._bytes += len(data)

    def _find_written_offsets(self, deliveries: Sequence[Delivery], log_id: bytes) -> frozenset[int]:
        """Return the offsets of redelivered rows that have a line. Reads the full file, which is rare."""
        offsets = {
            delivery.first_offset + row
            for delivery in deliveries
            if delivery.redelivered and delivery.rows is not None
            for row in delivery.rows.tolist()
        }
        if not offsets:
            return frozenset()
        written: set[int] = set()
        with self.path.open("rb") as file:
            for line in file:
                offset = line[len(_LINE_START) : line.find(b",")]
                if offset.isdigit() and int(offset) in offsets and line.endswith(b"\n"):
                    cursor = _LastLine.of(line).cursor
                    if cursor is not None and cursor.log_id == log_id:
                        written.add(int(offset))
        return frozenset(written)

    def _write(self, data: bytes) -> None:
        file = self._file
        assert file is not None
        if os.fstat(file.fileno()).st_nlink == 0:
            raise StopSink(
                f"{self.path} was deleted while in use: detach the sink and attach it again, "
                "which begins a new file"
            )
        try:
            if self._is_torn:
                file.truncate(self._intact_bytes)
            self._is_torn = True
            unwritten = memoryview(data)
            while unwritten:
                unwritten = unwritten[file.write(unwritten) or 0 :]
            if self.fsync:
                os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):  # if this fails, the next write truncates the file
                file.truncate(self._intact_bytes)
                self._is_torn = False
            raise
        self._is_torn = False
        self._intact_bytes += len(data)

    def _sync(self) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())

    def _release(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()  # unbuffered: nothing is pending


class _LastLine(NamedTuple):
    """Facts about the whole file, read from its last line: the cursor, the highest Lamport number, and
    `ahead`, the offsets of redelivered rows that are written although they are not below the cursor.
    """

    cursor: Cursor | None
    lamport: int
    ahead: frozenset[int]

    @classmethod
    def of(cls, line: bytes) -> _LastLine:
        """Parse a line. Raises ValueError, KeyError, TypeError or UsageError if it is a foreign line."""
        if not line:
            return cls(None, 0, frozenset())
        fields = json.loads(line)
        return cls(
            Cursor.parse(fields["cursor"]),
            int(fields.get("lamport_max", fields["lamport"])),
            frozenset(map(int, fields.get("ahead", ()))),
        )


def to_json(delta: Delta) -> dict[str, Any]:
    """Return a delta as the JSON object that the command `publish` reads, without fields at their default."""
    operation = delta.operation
    kind, values = operation.kind, operation.values
    is_known = kind in Kind._value2member_map_
    fields: dict[str, Any] = {
        "vector_id": delta.vector_id,
        "namespace": delta.namespace,
        "op": Kind(kind).name.lower() if is_known else kind,
    }
    if kind in _SPARSE_KINDS and operation.indices is not None:
        fields["indices"] = operation.indices.tolist()
    if values is not None and kind in _NUMBER_NAMES:
        fields[_NUMBER_NAMES[Kind(kind)]] = _numbers(values)[0]
    elif values is not None:
        fields["vector" if kind in _VECTOR_KINDS else "values"] = _numbers(values)
    if kind == Kind.TRANSFORM:
        fields["name"] = operation.data.decode(errors="replace")
    elif operation.data or kind == Kind.OPAQUE:
        fields["data"] = b64encode(operation.data).decode()
    fields.update(_extras(delta))
    return fields


def _extras(delta: Delta) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    if delta.id is not None:
        extras["id"] = delta.id.hex()
    if delta.parents:
        extras["parents"] = [
            str(parent) if isinstance(parent, Dot) else parent.hex() for parent in delta.parents
        ]
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
    # The shortest decimals that convert back to the same float32; tolist() would print float64's 17 digits.
    return [float(text) for text in values.astype("U32").tolist()]


def _line(logged: LoggedBatch, row: int, last_line: _LastLine, *, redelivered: bool) -> str:
    fields = {"offset": logged.offset + row, **to_json(logged.batch.delta(row, logged.source))}
    fields["dot"] = str(logged.batch.dot(row))
    fields["lamport"] = logged.lamport + row
    if redelivered:
        fields["redelivered"] = True
    if last_line.lamport != fields["lamport"]:  # a forwarded or redelivered row may have a lower number
        fields["lamport_max"] = last_line.lamport
    if last_line.ahead:
        fields["ahead"] = sorted(last_line.ahead)
    fields["cursor"] = str(last_line.cursor)
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")) + "\n"


def _read_last_line(file: BinaryIO, length: int) -> tuple[bytes, int]:
    """Return the last complete line, and the offset of its end; the bytes after it are a torn line."""
    tail, start = b"", length
    while start:
        step = min(_TAIL_BYTES, start)
        start -= step
        file.seek(start)
        tail = file.read(step) + tail
        end = tail.rfind(b"\n")
        previous_newline = tail.rfind(b"\n", 0, max(end, 0))
        if end >= 0 and (previous_newline >= 0 or start == 0):
            return tail[previous_newline + 1 : end], start + end + 1
    return b"", 0
