"""The rows of a storage sink's SQLite file as states, read beside whoever writes it, whatever they look like.

One transaction gives them all as they stood at one moment, with the cursor. What cannot be right is kept as
it is, so that an audit tells it, never as an error.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import numpy as np
import pyarrow as pa

from delta_prop.spark.states.changes import CHANGES, STATE
from delta_prop_sinks.storage_file import APPLICATION_ID, REBUILDING_VERSION, SCHEMA_VERSION
from delta_prop_wire.delta import Kind
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

UNREADABLE, UNTOLD = b"\xc1", b"\xc1\x00"
"""In place of metadata that are no JSON object, and of such that nobody tells: no msgpack begins so."""
_ROWS = 8_192
_NO_INDICES = pa.array([], pa.uint32())
_KINDS = {0: Kind.DELETE, 1: Kind.CREATE, 2: Kind.OPAQUE}
_CURSOR = "SELECT log_id, next_offset, lamport_before FROM cursor JOIN logs ON log = number"
_SELECT = """
SELECT namespace, vector_id, form, value, metadata, ignored, lamport, origin, counter, offset
FROM vectors
"""


class Come(NamedTuple):
    """How far a sink has come: of which log, behind which offset."""

    log_id: bytes
    next_offset: int


class StoredFile:
    """One file as it stands when it is opened. Use it in a `with`; nothing in it is changed."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> StoredFile:
        """Raises UsageError where it is not there, is another program's, or void."""
        path = Path(self._path)
        if not path.is_file():
            raise UsageError(f"no storage file at {self._path!r}: name the one that the storage sink writes")
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
                f"{self._path} holds vectors of an earlier log, of which this one does not tell: rebuild it"
            )
        self.come = None if found is None else Come(*found[:2])
        """None: it has taken nothing yet."""
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def states(self) -> Iterator[pa.Table]:
        """All rows. Raises UsageError where the file is damaged."""
        with self._told():
            rows = self._connection.execute(_SELECT)
            while page := rows.fetchmany(_ROWS):
                yield _table(page)

    def _check(self) -> None:
        ask = self._connection.execute
        application = ask("PRAGMA application_id").fetchone()[0]
        version = ask("PRAGMA user_version").fetchone()[0]
        if application != APPLICATION_ID:
            raise UsageError(f"{self._path} is no storage sink's file: name another one")
        if version == REBUILDING_VERSION:
            raise UsageError(f"{self._path} is being rebuilt, what it holds is void: wait until that is done")
        if version != SCHEMA_VERSION:
            raise UsageError(f"{self._path} has format {version}, this program reads {SCHEMA_VERSION}")

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise UsageError(
                f"{self._path} cannot be read ({error}): put a copy in its place, or rebuild it from the log"
            ) from error


def _table(page: list[tuple[Any, ...]]) -> pa.Table:
    columns: list[tuple[Any, ...]] = list(zip(*page, strict=True))
    namespaces, ids, forms, values, metadata, ignored, lamports, origins, counters, offsets = columns
    kinds = np.array([_kind(form, value) for form, value in zip(forms, values, strict=True)], np.uint8)
    vectors = [value if kind == Kind.CREATE else b"" for kind, value in zip(kinds, values, strict=True)]
    pairs = zip(kinds, values, strict=True)
    data = [bytes(value or b"") if kind == Kind.OPAQUE else b"" for kind, value in pairs]
    sizes = np.array([len(one) // 4 for one in vectors])
    bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    numbers = np.frombuffer(b"".join(vectors), "<f4").astype(np.float32)
    count = len(page)
    found = {
        "key": [f"{namespace}\0{one}" for namespace, one in zip(namespaces, ids, strict=True)],
        "kind": kinds | np.uint8(STATE),
        "values": pa.ListArray.from_arrays(pa.array(bounds), pa.array(numbers)),
        "indices": pa.ListArray.from_arrays(pa.array(np.zeros(count + 1, np.int32)), _NO_INDICES),
        "data": pa.array(data, pa.binary()),
        "patch": pa.array(list(map(packed, metadata)), pa.binary()),
        "id": pa.nulls(count, pa.binary()),
        "known": np.zeros(count, np.uint8),
        "offset": np.array(offsets, np.int64),
        "lamport": np.array(lamports, np.int64).view(np.uint64),
        "origin": np.array(origins, np.int64).view(np.uint64),
        "counter": np.array(counters, np.int64).view(np.uint64),
        "ignored": np.array(ignored, np.int64),
    }
    return pa.table([found[name] for name in CHANGES.names], schema=CHANGES)


def _kind(form: object, value: object) -> int:
    """What a row is; bytes where it says that it is a vector and cannot be one."""
    kind = _KINDS.get(form, Kind.OPAQUE) if isinstance(form, int) else Kind.OPAQUE
    if kind == Kind.CREATE and not (isinstance(value, bytes) and value and len(value) % 4 == 0):
        return Kind.OPAQUE
    return kind


def packed(text: object) -> bytes | None:
    if text is None:
        return None
    try:
        told = json.loads(text)  # type: ignore[arg-type]
        return bytes(msgpack.packb(told)) if isinstance(told, dict) else UNREADABLE
    except (ValueError, TypeError, OverflowError):
        return UNREADABLE
