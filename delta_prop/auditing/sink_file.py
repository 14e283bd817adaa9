"""Reads the rows of a sink from an SQLite file: a storage sink's own, or one built from other sinks' rows.

One transaction reads all rows and the cursor as of one moment, while the file's owner may write.
Invalid contents are read as they are, so that the audit reports them as differences, not as errors.
"""

from __future__ import annotations

import json
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from delta_prop.auditing.differences import SinkRow
from delta_prop_broker.disk import Disk
from delta_prop_broker.local_disk import LocalDisk
from delta_prop_sinks.storage_file import APPLICATION_ID, REBUILDING_VERSION, SCHEMA_VERSION
from delta_prop_wire.delta import Kind
from delta_prop_wire.errors import UsageError

Row = tuple[Any, ...]
"""namespace, vector id, form, value, metadata, ignored, Lamport number, origin, counter, offset."""

_PAGE_ROWS, _SORTED_PAGE_ROWS = 8_192, 256
_KINDS = {0: Kind.DELETE, 1: Kind.CREATE, 2: Kind.OPAQUE}
FORMS = {kind: form for form, kind in _KINDS.items()}
"""Code of each kind in the column `form`."""
_CURSOR = "SELECT log_id, next_offset, lamport_before FROM cursor JOIN logs ON log = number"
_COLUMNS = "namespace, vector_id, form, value, metadata, ignored, lamport, origin, counter, offset"
_SELECT = f"SELECT {_COLUMNS} FROM vectors"
_IN_ORDER = f"{_SELECT} ORDER BY namespace, vector_id"
_OFFSET = "SELECT offset FROM vectors WHERE namespace = ? AND vector_id = ?"
_HIGHEST = "SELECT max(offset) FROM vectors"
_CREATE = f"CREATE TABLE vectors ({_COLUMNS}, PRIMARY KEY (namespace, vector_id)) WITHOUT ROWID"
_INSERT = f"INSERT INTO vectors VALUES ({', '.join('?' * 10)})"
_WORD, _SIGN = 1 << 64, 1 << 63


class SinkCursor(NamedTuple):
    """A sink's progress: the log and the next offset."""

    log_id: bytes
    next_offset: int


class SinkRows:
    """The rows of one file, open for reading."""

    def __init__(self, connection: sqlite3.Connection, path: str, *, has_metadata: bool = True) -> None:
        self.path = path
        self.has_metadata = has_metadata
        """False if no row has metadata; they are not compared then."""
        self._connection = connection

    def read_pages(self, *, in_order: bool = False) -> Iterator[list[Row]]:
        """Yield all rows in pages; `in_order`: sorted by key. Raises UsageError if the file is corrupted."""
        with self._translate_errors():
            rows = self._connection.execute(_IN_ORDER if in_order else _SELECT)
            while page := rows.fetchmany(_SORTED_PAGE_ROWS if in_order else _PAGE_ROWS):
                yield page

    def read_sorted(self) -> Iterator[tuple[str, SinkRow]]:
        """Yield each row with its key, ordered by key. Raises UsageError if the file is corrupted."""
        last = ""
        for page in self.read_pages(in_order=True):
            for row in page:
                key = f"{row[0]}\0{row[1]}"
                if key <= last:
                    raise self._unreadable_error(f"row {key!r:.60} is out of order")
                last = key
                yield key, _to_sink_row(row, has_metadata=self.has_metadata)

    def highest_offset(self) -> int:
        """Return the highest offset of a row; -1 if none has one."""
        with self._translate_errors():
            highest = self._connection.execute(_HIGHEST).fetchone()[0]
        return highest if isinstance(highest, int) else -1

    def offset_of(self, namespace: str, vector_id: str) -> int:
        """Return the offset of a vector's row; -1 if there is none."""
        with self._translate_errors():
            row = self._connection.execute(_OFFSET, (namespace, vector_id)).fetchone()
        return row[0] if row is not None and isinstance(row[0], int) else -1

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB:
                raise self._foreign_file_error("; if it was one, rebuild it from the log") from error
            raise self._unreadable_error(str(error)) from error

    def _foreign_file_error(self, more: str = "") -> UsageError:
        return UsageError(
            f"{self.path} is not a storage sink's file: name the one that the storage sink writes{more}"
        )

    def _unreadable_error(self, why: str) -> UsageError:
        return UsageError(
            f"{self.path} cannot be read ({why}): put a copy in its place, or rebuild it from the log"
        )


class StorageSinkFile(SinkRows):
    """A storage sink's file as of its opening. Use it in a `with`; it is not changed."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.has_metadata = True

    def __enter__(self) -> StorageSinkFile:
        """Open it. Raises UsageError if it is missing, another program's, or being rebuilt."""
        path = Path(self.path)
        if not path.is_file():
            raise UsageError(f"no storage file at {self.path!r}: name the one that the storage sink writes")
        uri = f"{path.resolve().as_uri()}?mode=ro"
        with self._translate_errors():
            self._connection = sqlite3.connect(uri, uri=True, isolation_level=None)
        try:
            with self._translate_errors():
                self._check()
                self._connection.execute("BEGIN")
                cursor_row = self._connection.execute(_CURSOR).fetchone()
        except BaseException:
            self._connection.close()
            raise
        if cursor_row is not None and cursor_row[2]:  # the Lamport number before this log's first
            self._connection.close()
            raise UsageError(
                f"{self.path} holds vectors of an earlier log, which this log does not have: rebuild it"
            )
        self.cursor = None if cursor_row is None else SinkCursor(*cursor_row[:2])
        """None: the sink has applied nothing yet."""
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def _check(self) -> None:
        execute = self._connection.execute
        application = execute("PRAGMA application_id").fetchone()[0]
        version = execute("PRAGMA user_version").fetchone()[0]
        if application != APPLICATION_ID:
            raise self._foreign_file_error()
        if version == REBUILDING_VERSION:
            raise UsageError(f"{self.path} is being rebuilt: wait until the rebuild is complete")
        if version != SCHEMA_VERSION:
            raise UsageError(
                f"{self.path}: format {version}, but this program reads format {SCHEMA_VERSION}: use the "
                "program that wrote the file"
            )


class Scratch:
    """A temporary folder for data that exceed the memory, removed at the end. Use it in a `with`."""

    def __enter__(self) -> Scratch:
        self._folder = tempfile.TemporaryDirectory(prefix="delta-prop-audit-")
        self.path = Path(self._folder.name)
        self.disk: Disk = LocalDisk(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    @contextmanager
    def open_sorted(self, rows: Iterable[Row], name: str) -> Iterator[SinkRows]:
        """Store rows in a file, and read them sorted. `name`: the name of the rows in messages.

        If a vector has several rows, the last one counts. Raises UsageError.
        """
        with suppress(FileNotFoundError):
            (self.path / "rows.db").unlink()
        connection = sqlite3.connect(self.path / "rows.db", isolation_level=None)
        try:
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("PRAGMA journal_mode = OFF")
            connection.execute(_CREATE)
            connection.execute("BEGIN")
            connection.executemany(_INSERT.replace("INSERT", "INSERT OR REPLACE"), rows)
            connection.execute("COMMIT")
            yield SinkRows(connection, name)
        finally:
            connection.close()

    @contextmanager
    def open_spool(self) -> Iterator[BinaryIO]:
        """Open a file for lines, which can be read more than once."""
        with (self.path / "lines").open("w+b") as file:
            yield file


def read_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line) of a file, or of each file in a folder, except hidden ones.

    Raises UsageError if a file cannot be read.
    """
    root = Path(path)
    files = sorted(file for file in root.iterdir() if file.name[0] not in "._") if root.is_dir() else [root]
    for file in files:
        try:
            with file.open("rb") as lines:
                yield from enumerate(lines, start=1)
        except OSError as error:
            raise UsageError(f"{str(file)!r:.300} cannot be read ({error.strerror}): name another") from None


def to_signed(number: int) -> int:
    """Convert an unsigned 64-bit number to SQLite's signed one."""
    return number - _WORD if number >= _SIGN else number


def kind_of(form: object, value: object) -> Kind:
    """Return the kind of a row; OPAQUE if its form is unknown, or says vector but its value is none."""
    kind = _KINDS.get(form, Kind.OPAQUE) if isinstance(form, int) else Kind.OPAQUE
    if kind == Kind.CREATE and not (isinstance(value, bytes) and value and len(value) % 4 == 0):
        return Kind.OPAQUE
    return kind


def _to_sink_row(row: Row, *, has_metadata: bool) -> SinkRow:
    _, _, form, value, metadata, _, lamport, origin, counter, offset = row
    kind = kind_of(form, value)
    vector = np.frombuffer(value, "<f4").astype(np.float32, copy=False) if kind is Kind.CREATE else None
    data = bytes(value or b"") if kind is Kind.OPAQUE else b""
    key = (lamport % _WORD, origin % _WORD, counter % _WORD) if lamport else None
    metadata_fields = _read_metadata(metadata) if has_metadata else {}
    return SinkRow(kind, vector, data, metadata_fields, key, offset, has_metadata)


def _read_metadata(text: object) -> dict[str, Any] | None:
    """Parse a row's metadata; return None if they cannot be read."""
    if text is None:
        return {}
    try:
        fields = json.loads(text)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return None
    return fields if isinstance(fields, dict) else None
