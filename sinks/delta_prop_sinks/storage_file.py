"""The SQLite file behind the storage sink. Every call blocks; one thread at a time may be inside.

One connection writes and checkpoints, the other only reads: SQLite before 3.51.3 can corrupt a file when
two connections checkpoint. One process at a time: a second file beside it is locked while it is open.
"""

from __future__ import annotations

import sqlite3
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from delta_prop_sinks.storage_rows import COLUMNS, Stored, blocks_of, records_of
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from delta_prop_sinks.storage_image import Block
    from delta_prop_sinks.storage_rows import Gathered, Record
    from delta_prop_wire.states import StateRow


_MAGIC = b"SQLite format 3\0"
APPLICATION_ID = 0x64507270
"""`dPrp`: marks the file as ours."""

SCHEMA_VERSION = 2
REBUILDING_VERSION = 3
"""While a rebuild is under way: `vectors` and the cursor are void, `vectors_next` is not whole."""

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
"""From so many rows on the write-ahead log is copied into the file: each copy syncs the file once more."""

# Many rows a statement: beside a busy loop the GIL changes hands once a statement instead of once a row.
# 64 rows are 832 parameters, below the 999 that every build of SQLite takes.
_ROWS_A_STATEMENT = 64
_MANY = ", ".join([_ROW] * _ROWS_A_STATEMENT)
_UPSERTS = {
    table: (_UPSERT.format(table=table, rows=_ROW), _UPSERT.format(table=table, rows=_MANY))
    for table in ("vectors", "vectors_next")
}
_SELECT = f"SELECT {', '.join(COLUMNS)} FROM vectors"


class FileFailed(Exception):
    """The file could not be read or written; nothing of the transaction is in it. The message is SQLite's."""


class FileLost(FileFailed):
    """The file is damaged or gone, which does not pass by itself. The message holds the cure."""


@dataclass(frozen=True, slots=True)
class ImageName:
    """An image of the rows by what tells it from others; what a commit after that one wrote overrules it."""

    image: bytes
    after: int


@dataclass(frozen=True, slots=True)
class Opened:
    """What the file says of itself: its cursor, the highest Lamport number, and the one before this log; the
    number of its last commit, and the image that fits it.

    `reach`: rows may hold deltas below this offset of the cursor's log, though the cursor is lower.
    `rebuilding`: none of that counts, as a rebuild was begun and did not come to its end.
    """

    cursor: Cursor | None
    lamport: int
    lamport_before: int
    rebuilding: bool = False
    last_commit: int = 0
    image: ImageName | None = None
    reach: int = 0


class StorageFile:
    """One file, from `connect` to `close`."""

    def __init__(self, path: str | Path, *, wal_bytes_max: int) -> None:
        self.path = Path(path)
        self.wal_bytes_max = wal_bytes_max
        self._log_id = b""
        self._log_number: int | None = None
        self._offsets_of: int | None = None
        self._lamport_before = 0
        self.last_commit = 0
        self._rows_in_wal = 0
        self._inode = 0
        self.rebuilding = False
        self._connections: list[sqlite3.Connection] = []
        self._users = 0
        self._unused = threading.Condition()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Hold off `close`: closing a connection while a call uses it crashes the process."""
        with self._unused:
            self._users += 1
        try:
            yield
        finally:
            with self._unused:
                self._users -= 1
                self._unused.notify_all()

    def check_header(self) -> None:
        """Check that a file that is there is one of SQLite's, before anything is made beside it.

        Raises UsageError.
        """
        if not self.path.is_file():
            return
        try:
            with open(self.path, "rb") as file:
                begin = file.read(len(_MAGIC))
        except OSError:  # opening it tells why
            return
        if not _MAGIC.startswith(begin):
            raise UsageError(f"{self.path} is not a SQLite file: name another file")

    def connect(self, log_id: bytes) -> Opened:
        """Open or create. Raises UsageError where the file is in use, or is not ours."""
        self.check_header()
        try:
            self._lock()
            self._writer = self._new_connection(f"{self.path.resolve().as_uri()}?mode=rwc")
            self._check()
            self._writer.execute("PRAGMA journal_mode = WAL")
            self._writer.execute("PRAGMA synchronous = FULL")
            self._reader = self._new_connection(f"{self.path.resolve().as_uri()}?mode=ro")
            self._inode = self.path.stat().st_ino
            return self._enter(log_id)
        except sqlite3.Error as error:
            self._disconnect()
            raise UsageError(
                f"{self.path} cannot be opened ({error}): mend it, or name another file"
            ) from error
        except BaseException:
            self._disconnect()
            raise

    def close(self) -> None:
        """Close the file once no call uses it; leave it open if one still does after 30 s."""
        with self._unused:
            if self._unused.wait_for(lambda: not self._users, _CLOSE_S_MAX):
                self._disconnect()

    def _disconnect(self) -> None:
        """Close all connections; the writing one last, since the last one to close checkpoints."""
        while self._connections:
            connection = self._connections.pop(0 if len(self._connections) < 3 else 2)
            with suppress(sqlite3.Error):  # the others, the lock's too, are let go of all the same
                connection.close()

    # --- writing

    def commit(
        self,
        parts: Sequence[Gathered],
        cursor: Cursor,
        lamport: int,
        *,
        reach: int,
        image: ImageName | None = None,
    ) -> int:
        """Write rows, the cursor, how far rows reach, and where it is given the image that fits from now on,
        in one synced transaction; return how many rows. Raises FileFailed.
        """
        with self._told("written"):
            written = self._transact(parts, cursor, lamport, reach, image)
        self._check_still_there()
        return written

    def _transact(
        self,
        parts: Sequence[Gathered],
        cursor: Cursor,
        lamport: int,
        reach: int,
        image: ImageName | None,
    ) -> int:
        with self._transaction() as writer:
            number = self._number()
            # In the order of the file: neighbours share pages.
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
        one, many = _UPSERTS[table]
        whole = len(records) // _ROWS_A_STATEMENT * _ROWS_A_STATEMENT
        for at in range(0, whole, _ROWS_A_STATEMENT):
            part = records[at : at + _ROWS_A_STATEMENT]
            self._writer.execute(many, tuple(chain.from_iterable(part)))
        self._writer.executemany(one, records[whole:])

    def begin_rebuild(self) -> None:
        """From here on rows and cursor are void, synced; room for new rows is made. Raises FileFailed."""
        with self._told("written"), self._transaction() as writer:
            writer.execute("DROP TABLE IF EXISTS vectors_next")
            writer.execute(f"CREATE TABLE vectors_next ({_COLUMN_TYPES}) WITHOUT ROWID")
            writer.execute("UPDATE commits SET image = NULL, image_after = NULL")
            writer.execute(f"PRAGMA user_version = {REBUILDING_VERSION}")
        self._check_still_there()
        self.rebuilding = True

    def take_states(self, rows: Sequence[StateRow]) -> None:
        """Put these beside the void rows. Raises FileFailed."""
        with self._told("written"), self._transaction():
            self._upsert(records_of(rows, self._number(), self.last_commit + 1), "vectors_next")

    def end_rebuild(self, cursor: Cursor, lamport: int) -> None:
        """The new rows take the place of the void ones, with their cursor, in one synced transaction.

        Raises FileFailed.
        """
        self._lamport_before, self._log_number = 0, None  # all that it holds is of this log
        with self._told("written"), self._transaction() as writer:
            number = self._number()
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
        self._check_still_there()
        self.rebuilding = False

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        writer = self._writer
        writer.execute("BEGIN IMMEDIATE")
        try:
            yield writer
            writer.execute("COMMIT")
        except BaseException:
            if writer.in_transaction:
                writer.execute("ROLLBACK")
            self._log_number = None
            raise

    def checkpoint(self, *, idle: bool = False) -> None:
        """Copy the write-ahead log into the file, when idle or many rows have been written; cut it off when
        idle or above its bound. Raises FileFailed.
        """
        large = self.wal_bytes > self.wal_bytes_max
        if not (idle or large or self._rows_in_wal >= WAL_ROWS):
            return
        self._rows_in_wal = 0
        with self._told("written"):
            self._writer.execute(f"PRAGMA wal_checkpoint({'TRUNCATE' if idle or large else 'PASSIVE'})")

    @property
    def wal_bytes(self) -> int:
        """How large the write-ahead log is."""
        try:
            return self.path.with_name(self.path.name + "-wal").stat().st_size
        except FileNotFoundError:
            return 0

    # --- reading

    def read(self, refs: Iterable[tuple[str, str]]) -> list[Stored]:
        """Some rows by namespace and vector id; those that are not there are left out. Raises FileFailed."""
        query = f"{_SELECT} WHERE namespace = ? AND vector_id = ?"
        with self._told("read"):
            found = (self._reader.execute(query, ref).fetchone() for ref in refs)
            return [Stored.of(record, self._offsets_of) for record in found if record is not None]

    def page(self, after: tuple[str, str] | None, rows_max: int) -> list[Stored]:
        """The next rows in order of namespace and vector id. Raises FileFailed."""
        with self._told("read"):
            return [Stored.of(record, self._offsets_of) for record in self._page(after, rows_max, None)]

    def page_of_blocks(
        self, after: tuple[str, str] | None, rows_max: int, *, written_after: int | None = None
    ) -> tuple[list[Block], tuple[str, str] | None]:
        """The next rows in that order as columns, and what comes behind them; None at the end.

        All rows, or those that a commit after that one wrote. Raises FileFailed.
        """
        with self._told("read"):
            records = self._page(after, rows_max, written_after).fetchall()
        last = (records[-1][0], records[-1][1]) if len(records) == rows_max else None
        return list(blocks_of(records, self._offsets_of)), last

    def _page(
        self, after: tuple[str, str] | None, rows_max: int, written_after: int | None
    ) -> sqlite3.Cursor:
        where = "TRUE" if after is None else "(namespace, vector_id) > (?, ?)"
        values: list[str | int] = list(after or ())
        if written_after is not None:
            where, values = f"{where} AND written > ?", [*values, written_after]
        query = f"{_SELECT} WHERE {where} ORDER BY namespace, vector_id LIMIT ?"
        return self._reader.execute(query, (*values, rows_max))

    # --- helpers

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Turn SQLite's errors into ours."""
        try:
            yield
        except sqlite3.Error as error:
            if _is_damage(error):
                raise self._lost(f"is damaged ({error})") from error
            raise FileFailed(f"{self.path} cannot be {what}: {error}") from error

    def _check_still_there(self) -> None:
        """A deleted file takes writes without an error, and they are gone when it is closed."""
        try:
            inode = self.path.stat().st_ino
        except OSError as error:
            raise self._lost(f"is gone ({error.strerror})") from error
        if inode != self._inode:
            raise self._lost("was replaced while in use")

    def _lost(self, how: str) -> FileLost:
        return FileLost(
            f"{self.path} {how}: detach the sink, put a copy of the file in its place or delete it and its "
            f"-wal file, and attach the sink again, which goes on from what is there"
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
            # Statements are short, and the other side is a reader of ours: 5 s of waiting is a defect.
            timeout = 0.0 if "-lock?" in uri else 5.0
            connection = sqlite3.connect(
                uri, uri=True, isolation_level=None, check_same_thread=False, timeout=timeout
            )
        except sqlite3.OperationalError as error:
            raise UsageError(f"{self.path} cannot be opened ({error}): {self._cure()}") from None
        self._connections.append(connection)
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        return connection

    def _cure(self) -> str:
        """Return the cure where the file cannot be opened."""
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

    def _check(self) -> None:
        writer = self._writer
        try:
            application = writer.execute("PRAGMA application_id").fetchone()[0]
            version = writer.execute("PRAGMA user_version").fetchone()[0]
            empty = writer.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_NOTADB:
                raise
            raise UsageError(f"{self.path} is not a SQLite file ({error}): name another file") from None
        self.rebuilding = version == REBUILDING_VERSION
        if empty and application == 0:
            writer.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
        elif application != APPLICATION_ID:
            raise UsageError(f"{self.path} is a SQLite file of another program: name another file")
        elif version == 1:
            writer.executescript(f"BEGIN IMMEDIATE; {_FROM_FORMAT_1} COMMIT;")
        elif version not in (SCHEMA_VERSION, REBUILDING_VERSION):
            raise UsageError(
                f"{self.path} has format {version}, this program reads {SCHEMA_VERSION}: "
                "use the version that wrote it, or a new file"
            )
        elif "reach" not in [name for _, name, *_ in writer.execute("PRAGMA table_info(commits)")]:
            writer.execute(_ADD_REACH)

    def _enter(self, log_id: bytes) -> Opened:
        self._log_id = log_id
        numbers = {
            known: (number, before)
            for number, known, before in self._writer.execute(
                "SELECT number, log_id, lamport_before FROM logs"
            )
        }
        held = self._writer.execute(
            "SELECT log_id, epoch, next_offset, lamport FROM cursor JOIN logs ON log = number"
        ).fetchone()
        last, image, after, reach = self._writer.execute(
            "SELECT last, image, image_after, reach FROM commits"
        ).fetchone()
        self.last_commit = last
        self._offsets_of = numbers[log_id][0] if log_id in numbers else None
        if held is None:
            return Opened(None, 0, 0, self.rebuilding, last)
        cursor, lamport = Cursor(*held[:3]), held[3]
        if cursor.log_id == log_id:
            self._log_number, self._lamport_before = numbers[log_id]
        else:
            self._lamport_before = lamport
        name = None if image is None else ImageName(image, after)
        return Opened(cursor, lamport, self._lamport_before, self.rebuilding, last, name, reach)

    def _number(self) -> int:
        """The number that stands for the present log in rows, given with the first commit beside it."""
        if self._log_number is None:
            row = self._writer.execute(
                "INSERT INTO logs (log_id, lamport_before) VALUES (?, ?) "
                "ON CONFLICT (log_id) DO UPDATE SET lamport_before = excluded.lamport_before "
                "RETURNING number",
                (self._log_id, self._lamport_before),
            ).fetchone()
            self._log_number = self._offsets_of = int(row[0])
        return self._log_number


def _is_damage(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
