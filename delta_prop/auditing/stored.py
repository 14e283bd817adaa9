"""Rows of a sink in a SQLite file: a storage sink's own, or one that is made of what another sink holds.

One transaction gives them all as they stood at one moment, with the cursor, beside whoever writes the file.
What cannot be right is kept as it is, so that an audit tells it, never as an error.
"""

from __future__ import annotations

import json
import sqlite3
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from delta_prop.auditing.differences import Held
from delta_prop_broker.local_disk import LocalDisk
from delta_prop_sinks.storage_file import APPLICATION_ID, REBUILDING_VERSION, SCHEMA_VERSION
from delta_prop_wire.delta import Kind
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from delta_prop_broker.disk import Disk

Row = tuple[Any, ...]
"""namespace, vector id, form, value, metadata, ignored, Lamport number, origin, counter, offset."""

_ROWS = 8_192
_KINDS = {0: Kind.DELETE, 1: Kind.CREATE, 2: Kind.OPAQUE}
FORMS = {kind: form for form, kind in _KINDS.items()}
"""How a row says what it is."""
_CURSOR = "SELECT log_id, next_offset, lamport_before FROM cursor JOIN logs ON log = number"
_COLUMNS = "namespace, vector_id, form, value, metadata, ignored, lamport, origin, counter, offset"
_SELECT = f"SELECT {_COLUMNS} FROM vectors"
_IN_ORDER = f"{_SELECT} ORDER BY namespace, vector_id"
_OFFSET = "SELECT offset FROM vectors WHERE namespace = ? AND vector_id = ?"
_HIGHEST = "SELECT max(offset) FROM vectors"
_CREATE = f"CREATE TABLE vectors ({_COLUMNS}, PRIMARY KEY (namespace, vector_id)) WITHOUT ROWID"
_INSERT = f"INSERT INTO vectors VALUES ({', '.join('?' * 10)})"
_WORD, _SIGN = 1 << 64, 1 << 63


class Come(NamedTuple):
    """A sink's progress: of which log, behind which offset."""

    log_id: bytes
    next_offset: int


class Rows:
    """The rows of one file, open for reading."""

    def __init__(self, connection: sqlite3.Connection, path: str, *, tell_metadata: bool = True) -> None:
        self.path = path
        self.tell_metadata = tell_metadata
        """False where no row says anything of metadata, which are not compared then."""
        self._connection = connection

    def pages(self, *, in_order: bool = False) -> Iterator[list[Row]]:
        """All rows. Raises UsageError where the file is damaged."""
        with self._told():
            rows = self._connection.execute(_IN_ORDER if in_order else _SELECT)
            while page := rows.fetchmany(_ROWS if not in_order else 256):
                yield page

    def held(self) -> Iterator[tuple[str, Held]]:
        """Each row by its key, in the order of keys. Raises UsageError where the file is damaged."""
        last = ""
        for page in self.pages(in_order=True):
            for row in page:
                key = f"{row[0]}\0{row[1]}"
                if key <= last:
                    raise self._unreadable(f"row {key!r:.60} is out of order")
                last = key
                yield key, _held(row, tell_metadata=self.tell_metadata)

    def highest_offset(self) -> int:
        """The highest offset that a row tells; -1 where none does."""
        with self._told():
            found = self._connection.execute(_HIGHEST).fetchone()[0]
        return found if isinstance(found, int) else -1

    def offset_of(self, namespace: str, vector_id: str) -> int:
        """The offset that a vector's row tells; -1 where there is none."""
        with self._told():
            found = self._connection.execute(_OFFSET, (namespace, vector_id)).fetchone()
        return found[0] if found is not None and isinstance(found[0], int) else -1

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB:
                raise self._not_ours("; if this was it, rebuild it from the log") from error
            raise self._unreadable(str(error)) from error

    def _not_ours(self, more: str = "") -> UsageError:
        return UsageError(
            f"{self.path} is no storage sink's file: name the one that the storage sink writes{more}"
        )

    def _unreadable(self, why: str) -> UsageError:
        return UsageError(
            f"{self.path} cannot be read ({why}): put a copy in its place, or rebuild it from the log"
        )


class StoredFile(Rows):
    """A storage sink's file as it stands when it is opened. Use it in a `with`; nothing in it is changed."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.tell_metadata = True

    def __enter__(self) -> StoredFile:
        """Raises UsageError where it is not there, is another program's, or void."""
        path = Path(self.path)
        if not path.is_file():
            raise UsageError(f"no storage file at {self.path!r}: name the one that the storage sink writes")
        uri = f"{path.resolve().as_uri()}?mode=ro"
        with self._told():
            self._connection = sqlite3.connect(uri, uri=True, isolation_level=None)
        try:
            with self._told():
                self._check()
                self._connection.execute("BEGIN")
                found = self._connection.execute(_CURSOR).fetchone()
        except BaseException:
            self._connection.close()
            raise
        if found is not None and found[2]:
            self._connection.close()
            raise UsageError(
                f"{self.path} holds vectors of an earlier log, of which this one does not tell: rebuild it"
            )
        self.come = None if found is None else Come(*found[:2])
        """None: it has taken nothing yet."""
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def _check(self) -> None:
        ask = self._connection.execute
        application = ask("PRAGMA application_id").fetchone()[0]
        version = ask("PRAGMA user_version").fetchone()[0]
        if application != APPLICATION_ID:
            raise self._not_ours()
        if version == REBUILDING_VERSION:
            raise UsageError(f"{self.path} is being rebuilt, what it holds is void: wait until that is done")
        if version != SCHEMA_VERSION:
            raise UsageError(f"{self.path} has format {version}, this program reads {SCHEMA_VERSION}")


class Scratch:
    """A folder for what does not fit in memory, gone when this ends. Use it in a `with`."""

    def __enter__(self) -> Scratch:
        self._folder = tempfile.TemporaryDirectory(prefix="delta-prop-audit-")
        self.path = Path(self._folder.name)
        self.disk: Disk = LocalDisk(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    @contextmanager
    def sorted_rows(self, rows: Iterable[Row], told: str) -> Iterator[Rows]:
        """Rows in whatever order, as a file that gives them sorted; `told`: what they are called for people.

        Where several are of one vector the last one counts. Raises UsageError.
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
            yield Rows(connection, told)
        finally:
            connection.close()

    @contextmanager
    def spool(self) -> Iterator[BinaryIO]:
        """A file for lines, which can be read again from its beginning."""
        with (self.path / "lines").open("w+b") as file:
            yield file


def lines_of(path: str) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, or of the files in a folder but hidden ones, each with its number in its file.

    Raises UsageError where there is none.
    """
    place = Path(path)
    files = sorted(one for one in place.iterdir() if one.name[0] not in "._") if place.is_dir() else [place]
    for one in files:
        try:
            with one.open("rb") as file:
                yield from enumerate(file, start=1)
        except OSError as error:
            raise UsageError(f"{str(one)!r:.300} cannot be read ({error.strerror}): name another") from None


def signed(number: int) -> int:
    """An unsigned number of 64 bits as SQLite holds it."""
    return number - _WORD if number >= _SIGN else number


def kind_of(form: object, value: object) -> Kind:
    """Read a row's contents; bytes where it says that it is a vector and cannot be one."""
    kind = _KINDS.get(form, Kind.OPAQUE) if isinstance(form, int) else Kind.OPAQUE
    if kind == Kind.CREATE and not (isinstance(value, bytes) and value and len(value) % 4 == 0):
        return Kind.OPAQUE
    return kind


def _held(row: Row, *, tell_metadata: bool) -> Held:
    _, _, form, value, metadata, _, lamport, origin, counter, offset = row
    kind = kind_of(form, value)
    vector = np.frombuffer(value, "<f4").astype(np.float32, copy=False) if kind is Kind.CREATE else None
    data = bytes(value or b"") if kind is Kind.OPAQUE else b""
    key = (lamport % _WORD, origin % _WORD, counter % _WORD) if lamport else None
    told = _read(metadata) if tell_metadata else {}
    return Held(kind, vector, data, told, key, offset, tell_metadata)


def _read(text: object) -> dict[str, Any] | None:
    """Metadata as a row holds them; None where they cannot be read."""
    if text is None:
        return {}
    try:
        told = json.loads(text)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return None
    return told if isinstance(told, dict) else None
