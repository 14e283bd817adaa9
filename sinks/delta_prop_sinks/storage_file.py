"""The SQLite file of the storage sink. Every call blocks; one thread at a time may call.

One connection writes and checkpoints, and a second one only reads, because SQLite before 3.51.3 can corrupt a
file if two connections checkpoint. One process at a time may open the file: it locks another file beside it.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal, TypeAlias

from delta_prop_sinks.storage_image import Block
from delta_prop_sinks.storage_rows import COLUMNS, DirtyRows, Record, StoredRow, blocks_of, records_of
from delta_prop_sinks.vector_table import ABSENT
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.errors import UsageError
from delta_prop_wire.state_rows import StateRow

_MAGIC = b"SQLite format 3\0"
APPLICATION_ID = 0x64507270
"""`dPrp`: identifies the file as a storage sink's."""

SCHEMA_VERSION = 2
REBUILDING_VERSION = 3
"""During a rebuild: `vectors` and the cursor are invalid, `vectors_next` is incomplete."""

_CLOSE_S_MAX = 30.0

_COMMITS = """
CREATE TABLE commits (
    only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
    last INTEGER NOT NULL,
    image BLOB,
    image_after INTEGER,
    reach INTEGER NOT NULL DEFAULT 0
);
INSERT INTO commits VALUES (1, 0, NULL, NULL, 0);
"""
_COLUMN_TYPES = """
    namespace TEXT NOT NULL,
    vector_id TEXT NOT NULL,
    form INTEGER NOT NULL,
    dimension INTEGER,
    written INTEGER NOT NULL,
    value BLOB,
    metadata TEXT,
    ignored INTEGER NOT NULL,
    lamport INTEGER NOT NULL,
    origin INTEGER NOT NULL,
    counter INTEGER NOT NULL,
    log INTEGER NOT NULL,
    offset INTEGER NOT NULL,
    PRIMARY KEY (namespace, vector_id)
"""
_SCHEMA = f"""
{_COMMITS}
CREATE TABLE logs (
    number INTEGER PRIMARY KEY,
    log_id BLOB NOT NULL UNIQUE,
    lamport_before INTEGER NOT NULL
);
CREATE TABLE cursor (
    only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
    log INTEGER NOT NULL REFERENCES logs (number),
    epoch INTEGER NOT NULL,
    next_offset INTEGER NOT NULL,
    lamport INTEGER NOT NULL
);
CREATE TABLE vectors ({_COLUMN_TYPES}) WITHOUT ROWID;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""
_NO_IMAGE = "UPDATE commits SET image = NULL, image_after = NULL"
_ADD_REACH = "ALTER TABLE commits ADD COLUMN reach INTEGER NOT NULL DEFAULT 0"
_FROM_FORMAT_1 = f"""
ALTER TABLE vectors ADD COLUMN written INTEGER NOT NULL DEFAULT 0;
{_COMMITS}
PRAGMA user_version = {SCHEMA_VERSION};
"""
_ROW = f"({', '.join('?' * len(COLUMNS))})"
_CHANGES = ", ".join(f"{name} = excluded.{name}" for name in COLUMNS[2:])
_UPSERT = f"""
INSERT INTO {{table}} ({", ".join(COLUMNS)}) VALUES {{rows}}
ON CONFLICT (namespace, vector_id) DO UPDATE SET {_CHANGES}
"""
WAL_ROWS = 32_768
"""From this many rows on, the write-ahead log is checkpointed; each checkpoint costs one more sync."""

# Many rows per statement: next to a busy event loop, the GIL changes hands once per statement, not per row.
# 64 rows are 832 parameters, below the 999 that every build of SQLite accepts.
_ROWS_PER_STATEMENT = 64
_ROWS = ", ".join([_ROW] * _ROWS_PER_STATEMENT)
_UPSERTS = {
    table: (_UPSERT.format(table=table, rows=_ROW), _UPSERT.format(table=table, rows=_ROWS))
    for table in ("vectors", "vectors_next")
}
StoredTable: TypeAlias = Literal["vectors", "vectors_next"]
_SELECT = f"SELECT {', '.join(COLUMNS)} FROM vectors"


class StorageFileError(Exception):
    """The file could not be read or written; the transaction was rolled back. The message is SQLite's."""


class StorageFileLost(StorageFileError):
    """The file is corrupted or deleted, which needs an operator. The message names the fix."""


@dataclass(frozen=True, slots=True)
class ImageName:
    """An image by its unique name. Rows written by a commit later than `after` override the image's rows."""

    image: bytes
    after: int


@dataclass(frozen=True, slots=True)
class StorageFileState:
    """The state that the file stores beside its rows.

    `lamport`: the highest Lamport number. `lamport_before`: the highest Lamport number when this log was
    first opened. `last_commit`: the number of the last commit. `image`: the matching image. `reach`: rows may
    include deltas up to this offset of the cursor's log, though the cursor is lower. `rebuilding`: the other
    fields are invalid, because a rebuild was begun and not finished.
    """

    cursor: Cursor | None
    lamport: int
    lamport_before: int
    rebuilding: bool = False
    last_commit: int = 0
    image: ImageName | None = None
    reach: int = 0


class _LogNumber:
    """The number that stands for the present log in rows.

    `stored`: the number, if rows with offsets of the log are stored. `lamport_before`: the highest Lamport
    number of rows from before the log.
    """

    def __init__(self, log_id: bytes) -> None:
        self.stored: int | None = None
        self.lamport_before = 0
        self._log_id = log_id
        self._assigned: int | None = None

    def read(self, numbers: Mapping[bytes, tuple[int, int]], cursor: Cursor | None, lamport: int) -> None:
        """Read the number and `lamport_before`. `numbers`: both, of each log of which rows are stored."""
        if self._log_id in numbers:
            self.stored = numbers[self._log_id][0]
        if cursor is not None and cursor.log_id == self._log_id:
            self._assigned, self.lamport_before = numbers[self._log_id]
        elif cursor is not None:
            self.lamport_before = lamport

    def assign(self, writer: sqlite3.Connection) -> int:
        if self._assigned is None:
            row = writer.execute(
                "INSERT INTO logs (log_id, lamport_before) VALUES (?, ?) "
                "ON CONFLICT (log_id) DO UPDATE SET lamport_before = excluded.lamport_before "
                "RETURNING number",
                (self._log_id, self.lamport_before),
            ).fetchone()
            self._assigned = self.stored = int(row[0])
        return self._assigned

    def forget_assigned(self) -> None:
        """Assign the number again at the next commit, because this one was rolled back."""
        self._assigned = None

    def restart(self) -> None:
        self.lamport_before, self._assigned = 0, None


class _UseCount:
    """The calls that use the file now."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    @contextmanager
    def use(self) -> Iterator[None]:
        with self._changed:
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    @contextmanager
    def unused(self, timeout_s: float) -> Iterator[bool]:
        """Wait until there is no use, and prevent another one; yield False after the timeout."""
        with self._changed:
            yield self._changed.wait_for(lambda: not self._count, timeout_s)


class StorageFile:
    """One file, from `connect` to `close`."""

    def __init__(self, path: str | Path, *, wal_bytes_max: int) -> None:
        self.path = Path(path)
        self.wal_bytes_max = wal_bytes_max
        self._log_number = _LogNumber(b"")
        self.last_commit = 0
        self._rows_in_wal = 0
        self._inode = 0
        self.rebuilding = False
        self._is_clean = False  # True if nothing was written since the whole file was
        self._connections: list[sqlite3.Connection] = []
        self._use_count = _UseCount()

    def use(self) -> AbstractContextManager[None]:
        """Delay `close`: closing a connection while a call uses it crashes the process."""
        return self._use_count.use()

    def check_header(self) -> None:
        """Raise UsageError if an existing file is not a SQLite file, before any is created beside it."""
        if not self.path.is_file():
            return
        try:
            with open(self.path, "rb") as file:
                start = file.read(len(_MAGIC))
        except OSError:  # connect() reports the reason
            return
        if not _MAGIC.startswith(start):
            raise UsageError(f"{self.path} is not a SQLite file: name another file")

    def connect(self, log_id: bytes) -> StorageFileState:
        """Open or create the file. Raises UsageError if it is in use, or not a storage sink's file."""
        self.check_header()
        self._is_clean = False
        try:
            self._lock()
            self._writer = self._new_connection(f"{self.path.resolve().as_uri()}?mode=rwc")
            self._check_format()
            self._writer.execute("PRAGMA journal_mode = WAL")
            self._writer.execute("PRAGMA synchronous = FULL")
            self._reader = self._new_connection(f"{self.path.resolve().as_uri()}?mode=ro")
            self._inode = self.path.stat().st_ino
            return self._read_state(log_id)
        except sqlite3.Error as error:
            self._disconnect()
            raise UsageError(
                f"{self.path} cannot be opened ({error}): repair it, or name another file"
            ) from error
        except BaseException:
            self._disconnect()
            raise

    def close(self) -> None:
        """Close the file once no call uses it; leave it open if a call still uses it after 30 s."""
        with self._use_count.unused(_CLOSE_S_MAX) as is_unused:
            if is_unused:
                self._disconnect()

    def _disconnect(self) -> None:
        """Close all connections; the writer last, since the last one to close checkpoints."""
        while self._connections:  # up to three, in this order: lock, writer, reader
            connection = self._connections.pop(0 if len(self._connections) < 3 else 2)
            with suppress(sqlite3.Error):  # close the other connections even then, also that of the lock
                connection.close()

    def commit(
        self,
        parts: Sequence[DirtyRows],
        cursor: Cursor,
        lamport: int,
        *,
        reach: int,
        image: ImageName | None = None,
    ) -> int:
        """Write rows, the cursor, `reach` and, if given, the name of the image that matches from now on, in
        one synced transaction; return the number of rows. Raises StorageFileError.
        """
        with self._translate_errors("written"):
            written = self._transact(parts, cursor, lamport, reach, image)
        self._check_not_deleted()
        return written

    def _transact(
        self, parts: Sequence[DirtyRows], cursor: Cursor, lamport: int, reach: int, image: ImageName | None
    ) -> int:
        with self._transaction() as writer:
            number = self._log_number.assign(writer)
            # In the file's order: neighbours share pages.
            commit = self.last_commit + 1
            records = sorted(chain.from_iterable(part.records(number, commit) for part in parts))
            self._upsert(records)
            writer.execute("UPDATE commits SET last = ?, reach = ?", (commit, reach))
            if image is not None:
                writer.execute("UPDATE commits SET image = ?, image_after = ?", (image.image, image.after))
            writer.execute(
                "INSERT OR REPLACE INTO cursor VALUES (1, ?, ?, ?, ?)",
                (number, cursor.epoch, cursor.next_offset, lamport),
            )
        self.last_commit = commit
        return len(records)

    def _upsert(self, records: Sequence[Record], table: str = "vectors") -> None:
        self._rows_in_wal += len(records)
        upsert_one, upsert_many = _UPSERTS[table]
        full_end = len(records) // _ROWS_PER_STATEMENT * _ROWS_PER_STATEMENT
        for start in range(0, full_end, _ROWS_PER_STATEMENT):
            part = records[start : start + _ROWS_PER_STATEMENT]
            self._writer.execute(upsert_many, tuple(chain.from_iterable(part)))
        self._writer.executemany(upsert_one, records[full_end:])

    def begin_rebuild(self) -> None:
        """Invalidate rows and cursor durably, and create a table for new rows. Raises StorageFileError."""
        with self._translate_errors("written"), self._transaction() as writer:
            writer.execute("DROP TABLE IF EXISTS vectors_next")
            writer.execute(f"CREATE TABLE vectors_next ({_COLUMN_TYPES}) WITHOUT ROWID")
            writer.execute(_NO_IMAGE)
            writer.execute(f"PRAGMA user_version = {REBUILDING_VERSION}")
        self._check_not_deleted()
        self.rebuilding = True

    def load_states(self, rows: Sequence[StateRow]) -> None:
        """Write rows to the new table, beside the invalidated ones. Raises StorageFileError."""
        with self._translate_errors("written"), self._transaction() as writer:
            number = self._log_number.assign(writer)
            self._upsert(records_of(rows, number, self.last_commit + 1), "vectors_next")

    def end_rebuild(self, cursor: Cursor, lamport: int) -> None:
        """Replace the invalid rows by the new ones, in one synced transaction. Raises StorageFileError."""
        self._log_number.restart()
        with self._translate_errors("written"), self._transaction() as writer:
            number = self._log_number.assign(writer)
            writer.execute("DROP TABLE vectors")
            writer.execute("ALTER TABLE vectors_next RENAME TO vectors")
            writer.execute(
                "UPDATE commits SET last = ?, reach = ?", (self.last_commit + 1, cursor.next_offset)
            )
            writer.execute(
                "INSERT OR REPLACE INTO cursor VALUES (1, ?, ?, ?, ?)",
                (number, cursor.epoch, cursor.next_offset, lamport),
            )
            writer.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        self.last_commit += 1
        self._check_not_deleted()
        self.rebuilding = False

    def find_tombstones(
        self, table: StoredTable, after: tuple[str, str] | None, before: int, rows_max: int
    ) -> tuple[list[tuple[str, str]], tuple[str, str] | None]:
        """Return the tombstones among the next `rows_max` rows whose last delta has an offset below `before`,
        or an unknown one; and the `after` of the next call, None after the last row. Raises StorageFileError.
        """
        where, values = "TRUE" if after is None else "(namespace, vector_id) > (?, ?)", list(after or ())
        select = f"SELECT namespace, vector_id FROM {table} WHERE {where}"
        with self._translate_errors("read"):
            page_end = f"{select} ORDER BY namespace, vector_id LIMIT 1 OFFSET ?"
            last = self._reader.execute(page_end, (*values, rows_max - 1)).fetchone()
            if last is not None:
                select, values = f"{select} AND (namespace, vector_id) <= (?, ?)", [*values, *last]
            tombstones = f"{select} AND form = {ABSENT} AND (log IS NOT ? OR offset < ?)"
            refs = self._reader.execute(tombstones, (*values, self._log_number.stored, before)).fetchall()
        return refs, last

    def remove_rows(
        self, table: StoredTable, refs: Sequence[tuple[str, str]], *, is_deleted: bool = False
    ) -> None:
        """Remove tombstones in one synced transaction, and no longer name an image, which may have them.

        With `is_deleted`, also remove rows that are alive in the file. Raises StorageFileError.
        """
        where = "namespace = ? AND vector_id = ?" + ("" if is_deleted else f" AND form = {ABSENT}")
        was_clean = self._is_clean
        with self._translate_errors("written"), self._transaction() as writer:
            removed = max(writer.executemany(f"DELETE FROM {table} WHERE {where}", refs).rowcount, 0)
            writer.execute(_NO_IMAGE)
        self._rows_in_wal += removed
        self._is_clean = was_clean and not removed
        self._check_not_deleted()
        self.checkpoint()

    def rewrite(self) -> None:
        """Write the file anew, durably: then it has no byte of a row that was removed or overwritten.

        SQLite leaves such bytes in free space. `PRAGMA secure_delete` clears most of them, but not the copies
        that stay behind when rows move between pages: after thousands of random writes, a few removed rows in
        a thousand were still readable. VACUUM copies the present rows only; the checkpoint empties the
        write-ahead log. Does nothing if nothing was written since the last time. Raises StorageFileError.
        """
        if self._is_clean:
            return
        with self._translate_errors("written"):
            self._writer.execute("VACUUM")
            is_busy = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        self._check_not_deleted()
        self._rows_in_wal, self._is_clean = 0, not is_busy
        if is_busy:
            raise StorageFileError(
                f"{self.path} cannot be erased: another program reads it: stop that one, or wait for its end"
            )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        writer = self._writer
        self._is_clean = False
        writer.execute("BEGIN IMMEDIATE")
        try:
            yield writer
            writer.execute("COMMIT")
        except BaseException:
            if writer.in_transaction:
                writer.execute("ROLLBACK")
            self._log_number.forget_assigned()
            raise

    def checkpoint(self, *, idle: bool = False) -> None:
        """Checkpoint the log if idle or long; truncate it if idle or too large. Raises StorageFileError."""
        is_large = self.wal_bytes > self.wal_bytes_max
        if not (idle or is_large or self._rows_in_wal >= WAL_ROWS):
            return
        self._rows_in_wal = 0
        with self._translate_errors("written"):
            self._writer.execute(f"PRAGMA wal_checkpoint({'TRUNCATE' if idle or is_large else 'PASSIVE'})")

    @property
    def wal_bytes(self) -> int:
        """The size of the write-ahead log."""
        try:
            return self.path.with_name(self.path.name + "-wal").stat().st_size
        except FileNotFoundError:
            return 0

    def read(self, refs: Iterable[tuple[str, str]]) -> list[StoredRow]:
        """Return the rows of vectors (namespace, id) that the file has. Raises StorageFileError."""
        query = f"{_SELECT} WHERE namespace = ? AND vector_id = ?"
        with self._translate_errors("read"):
            records = (self._reader.execute(query, ref).fetchone() for ref in refs)
            return [StoredRow.of(record, self._log_number.stored) for record in records if record is not None]

    def page(self, after: tuple[str, str] | None, rows_max: int) -> list[StoredRow]:
        """Return the next rows, ordered by namespace and vector id. Raises StorageFileError."""
        with self._translate_errors("read"):
            return [
                StoredRow.of(record, self._log_number.stored)
                for record in self._select_page(after, rows_max, None)
            ]

    def page_of_blocks(
        self, after: tuple[str, str] | None, rows_max: int, *, written_after: int | None = None
    ) -> tuple[list[Block], tuple[str, str] | None]:
        """Return the next rows as blocks, in the order of `page`, and the `after` of the next call.

        The latter is None after the last row. Returns all rows, or only those written by a commit later than
        `written_after`. Raises StorageFileError.
        """
        with self._translate_errors("read"):
            records = self._select_page(after, rows_max, written_after).fetchall()
        last = (records[-1][0], records[-1][1]) if len(records) == rows_max else None
        return list(blocks_of(records, self._log_number.stored)), last

    def _select_page(
        self, after: tuple[str, str] | None, rows_max: int, written_after: int | None
    ) -> sqlite3.Cursor:
        where = "TRUE" if after is None else "(namespace, vector_id) > (?, ?)"
        values: list[str | int] = list(after or ())
        if written_after is not None:
            where, values = f"{where} AND written > ?", [*values, written_after]
        query = f"{_SELECT} WHERE {where} ORDER BY namespace, vector_id LIMIT ?"
        return self._reader.execute(query, (*values, rows_max))

    @contextmanager
    def _translate_errors(self, participle: str) -> Iterator[None]:
        """Translate SQLite's errors into StorageFileError: the file cannot be `participle`."""
        try:
            yield
        except sqlite3.Error as error:
            if _is_corruption(error):
                raise self._new_lost_error(f"is corrupted ({error})") from error
            raise StorageFileError(f"{self.path} cannot be {participle}: {error}") from error

    def _check_not_deleted(self) -> None:
        """Raise StorageFileLost if the file was deleted: writes to it would succeed and be lost."""
        try:
            inode = self.path.stat().st_ino
        except OSError as error:
            raise self._new_lost_error(f"was deleted ({error.strerror})") from error
        if inode != self._inode:
            raise self._new_lost_error("was replaced while in use")

    def _new_lost_error(self, problem: str) -> StorageFileLost:
        return StorageFileLost(
            f"{self.path} {problem}: detach the sink, replace the file by a copy or delete it and its "
            f"-wal file, and attach the sink again, which then continues from the file's cursor"
        )

    def _lock(self) -> None:
        lock = self._new_connection(f"{self.path.resolve().as_uri()}-lock?mode=rwc")
        try:
            lock.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            raise UsageError(
                f"{self.path} is in use by another process or sink: stop that one, or name another file"
            ) from None

    def _new_connection(self, uri: str) -> sqlite3.Connection:
        try:
            # Statements are short and only our own reader competes, so a wait of 5 s shows a defect.
            timeout = 0.0 if "-lock?" in uri else 5.0
            connection = sqlite3.connect(
                uri, uri=True, isolation_level=None, check_same_thread=False, timeout=timeout
            )
        except sqlite3.OperationalError as error:
            raise UsageError(f"{self.path} cannot be opened ({error}): {self._repair_hint()}") from None
        self._connections.append(connection)
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        return connection

    def _repair_hint(self) -> str:
        path, folder = self.path, self.path.resolve().parent
        if path.is_dir():
            return "it is a directory: name a file"
        if not folder.exists():
            return f"its folder {folder} does not exist: create it, or name another file"
        if not folder.is_dir():
            return f"{folder} is not a directory: name another file"
        if not path.exists():
            return f"no file can be created in {folder}: let this user write there, or name another file"
        return f"let this user read and write it and create files in {folder}, or name another file"

    def _check_format(self) -> None:
        """Create the tables of a new file, upgrade an older format, refuse any other file."""
        writer = self._writer
        try:
            application = writer.execute("PRAGMA application_id").fetchone()[0]
            version = writer.execute("PRAGMA user_version").fetchone()[0]
            is_empty = writer.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_NOTADB:
                raise
            raise UsageError(f"{self.path} is not a SQLite file ({error}): name another file") from None
        self.rebuilding = version == REBUILDING_VERSION
        if is_empty and application == 0:
            writer.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
        elif application != APPLICATION_ID:
            raise UsageError(f"{self.path} is a SQLite file of another program: name another file")
        elif version == 1:
            writer.executescript(f"BEGIN IMMEDIATE; {_FROM_FORMAT_1} COMMIT;")
        elif version not in (SCHEMA_VERSION, REBUILDING_VERSION):
            raise UsageError(
                f"{self.path} has format {version}, and this program reads format {SCHEMA_VERSION}: "
                "use the version that wrote it, or a new file"
            )
        elif "reach" not in [name for _, name, *_ in writer.execute("PRAGMA table_info(commits)")]:
            writer.execute(_ADD_REACH)

    def _read_state(self, log_id: bytes) -> StorageFileState:
        numbers = {
            stored_log_id: (number, lamport_before)
            for number, stored_log_id, lamport_before in self._writer.execute(
                "SELECT number, log_id, lamport_before FROM logs"
            )
        }
        stored = self._writer.execute(
            "SELECT log_id, epoch, next_offset, lamport FROM cursor JOIN logs ON log = number"
        ).fetchone()
        last, image, after, reach = self._writer.execute(
            "SELECT last, image, image_after, reach FROM commits"
        ).fetchone()
        self.last_commit = last
        # A new object, since an earlier connection may have been for another log.
        log_number = self._log_number = _LogNumber(log_id)
        if stored is None:
            log_number.read(numbers, None, 0)
            return StorageFileState(None, 0, 0, self.rebuilding, last)
        cursor, lamport = Cursor(*stored[:3]), stored[3]
        log_number.read(numbers, cursor, lamport)
        name = None if image is None else ImageName(image, after)
        return StorageFileState(
            cursor, lamport, log_number.lamport_before, self.rebuilding, last, name, reach
        )


def _is_corruption(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
