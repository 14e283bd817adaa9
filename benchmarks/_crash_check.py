"""Checks that a log, and a table fed from it, hold each acknowledged delta once, at its offset.

Deltas that were sent and not acknowledged may be in the log, too; anything else is a violation.

The log is read frame by frame from its files, without opening or recovering it, and the table directly from
SQLite; both are compared with the acknowledgements and with the deltas that the producers are known to send.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks._crash_writer import DIMENSION, make_delta, origin_of
from benchmarks._measure import table
from delta_prop_broker.corruption import LogCorrupted
from delta_prop_broker.local_disk import LocalDisk
from delta_prop_broker.readonly.inspect import inspect
from delta_prop_broker.retention.snapshot import open_snapshot, snapshot_offsets
from delta_prop_broker.segments.paths import DIRECTORY
from delta_prop_wire.delta import Delta, Kind, Operation
from delta_prop_wire.state_rows import state_of

KINDS = {
    "lost": "acknowledged, but not in the log",
    "other offset": "acknowledged at a different offset than it has in the log",
    "answers differ": "acknowledged at two offsets, as new more than once, or without an offset",
    "stored twice": "more than once in the log",
    "out of order": "an offset, or a line of a producer, is not the next one",
    "missing line": "not in the log, although a later line of its producer is",
    "corrupt": "the log is corrupted, or holds something that was not sent",
    "wrong watermark": "the service's watermark of a producer is not that of the log",
    "refused": "a delta was not accepted",
    "wrong table": "the SQLite file differs from the log",
    "bad start or end": "the service did not start, or did not end cleanly",
}
"""Kinds of violations: the name under which each is counted, and its description."""
SHOWN_MAX = 5
"""Violations of one kind that are described; all are counted."""


@dataclass(slots=True)
class Verdict:
    """The violations: a count for each kind, and descriptions of the first ones of each kind."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def add(self, kind: str, text: str) -> None:
        """Add one violation."""
        self.counts[kind] += 1
        if self.counts[kind] <= SHOWN_MAX:
            self.examples.append(f"{kind}: {text}")

    def merge(self, other: Verdict) -> None:
        """Add the violations of another verdict."""
        self.counts += other.counts
        self.examples += other.examples

    @property
    def total(self) -> int:
        """The number of violations."""
        return sum(self.counts.values())

    def to_json(self) -> dict[str, object]:
        """Return the violations as JSON values."""
        return {"counts": dict(self.counts), "examples": self.examples}


class Judged(Protocol):
    """Sums over several rounds, with their violations."""

    rounds: int
    verdict: Verdict


def print_totals(
    title: str,
    columns: Mapping[str, Judged],
    labels: Mapping[str, Callable[[Any], object]],
    kinds: Iterable[str],
) -> int:
    """Print a column of each program with these rows and each kind of violations; return the violations."""
    rows = [(label, *map(get, columns.values())) for label, get in labels.items()]
    rows += [(kind, *(one.verdict.counts[kind] for one in columns.values())) for kind in kinds]
    print(table(title, ("", *columns), rows))
    return sum(one.verdict.total for one in columns.values())


@dataclass(slots=True)
class History:
    """The acknowledgements so far. `acked`: the offset by (producer, line); `last`: each producer's highest
    acknowledged line; `acks`: the number of acknowledgements; `duplicates`: how many said "duplicate".
    """

    acked: dict[tuple[str, int], int] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    acks: int = 0
    duplicates: int = 0
    _new: set[tuple[str, int]] = field(default_factory=set)

    def note(self, lines: Iterable[str], verdict: Verdict, name: str = "") -> None:
        """Read printed acknowledgements, of `name` if they name no producer; skip incomplete lines."""
        for text in lines:
            try:
                ack = json.loads(text)
            except ValueError:
                continue
            if "offset" in ack:
                self._note(ack.get("producer", name), ack["line"], ack["offset"], ack["duplicate"], verdict)
            elif "error" in ack:
                verdict.add("refused", text.strip())

    def _note(self, name: str, line: int, offset: int | None, duplicate: bool, verdict: Verdict) -> None:
        self.acks += 1
        self.duplicates += duplicate
        key = name, line
        if offset is None:
            verdict.add("answers differ", f"{name} line {line} was acknowledged without its offset")
            return
        if (known := self.acked.get(key, offset)) != offset:
            verdict.add("answers differ", f"{name} line {line} was acknowledged at {known}, then at {offset}")
        if not duplicate and key in self._new:
            text = f"{name} line {line} was acknowledged as new a second time, at {offset}"
            verdict.add("answers differ", text)
        if not duplicate:
            self._new.add(key)
        self.acked.setdefault(key, offset)
        self.last[name] = max(self.last.get(name, 0), line)


@dataclass(frozen=True, slots=True)
class Row:
    """One delta as the log holds it."""

    offset: int
    origin: int
    line: int
    delta: Delta


@dataclass(slots=True)
class LogSnapshot:
    """A snapshot. `lines`: by origin, the last line below `offset`; `vectors`: the state that they make."""

    offset: int
    lines: dict[int, int] = field(default_factory=dict)
    vectors: dict[str, NDArray[np.float32] | None] = field(default_factory=dict)


@dataclass(slots=True)
class Log:
    """The content of the files of a log."""

    rows: list[Row] = field(default_factory=list)
    corruption: list[str] = field(default_factory=list)
    segments: int = 0
    snapshot: LogSnapshot | None = None

    @property
    def next_offset(self) -> int:
        """The offset after the last row."""
        return self.rows[-1].offset + 1 if self.rows else 0 if self.snapshot is None else self.snapshot.offset

    def ends(self, names: Iterable[str]) -> dict[str, int]:
        """Return the last line of each producer."""
        ends = {origin_of(name): 0 for name in names}
        ends |= {} if self.snapshot is None else self.snapshot.lines
        for row in self.rows:
            ends[row.origin] = max(ends.get(row.origin, 0), row.line)
        return {name: ends[origin_of(name)] for name in names}


def read_log(directory: Path) -> Log:
    """Read every row from the files of a data directory that no process writes to."""
    log = Log()
    for entry in inspect(LocalDisk(directory)):
        if isinstance(entry, LogCorrupted):
            log.corruption.append(str(entry))
            continue
        offset, batch = entry.logged.offset, entry.logged.batch
        log.rows += [
            Row(offset + row, batch.origin, batch.base + row, batch.delta(row)) for row in range(batch.count)
        ]
    log.segments = len(list((directory / "streams/default/0").glob("*.log")))
    try:
        log.snapshot = _read_snapshot(directory)
    except LogCorrupted as corruption:
        log.corruption.append(str(corruption))
    return log


def _read_snapshot(directory: Path) -> LogSnapshot | None:
    disk = LocalDisk(directory)
    offsets = snapshot_offsets(disk.list(DIRECTORY))
    if not offsets:
        return None
    snapshot = open_snapshot(disk, DIRECTORY, offsets[-1])
    snapshot.verify()
    content = LogSnapshot(
        snapshot.offset, {origin: mark.counter for origin, mark in snapshot.watermarks.items()}
    )
    for logged in snapshot.frames():
        for row, key in enumerate(logged.batch.keys):
            content.vectors[key] = state_of(logged.batch, row).vector
    snapshot.close()
    return content


def check_log(log: Log, history: History, names: Sequence[str]) -> Verdict:
    """Compare a recovered log with the acknowledgements. Every row in it must have been sent."""
    verdict = Verdict()
    for text in log.corruption:
        verdict.add("corrupt", text)
    name_of_origin = {origin_of(name): name for name in names}
    offsets: dict[tuple[str, int], int] = {}
    last_lines = dict.fromkeys(names, 0)
    start, snapshot = log.rows[0].offset if log.rows else 0, log.snapshot
    if start and (snapshot is None or snapshot.offset < start):
        verdict.add("lost", f"the log starts at {start}, and no snapshot covers the rows before that")
    if snapshot is not None:
        check_snapshot(snapshot, names, verdict)
    if start and snapshot is not None:
        # The log's rows below the snapshot are in both: a producer's last line before the log is the
        # snapshot's last one minus their number.
        rows_below = Counter(row.origin for row in log.rows if row.offset < snapshot.offset)
        last_lines |= {
            name: snapshot.lines.get(origin, 0) - rows_below[origin]
            for origin, name in name_of_origin.items()
        }
    for expected, row in enumerate(log.rows, start=start):
        name = name_of_origin.get(row.origin)
        if name is None:
            verdict.add("corrupt", f"offset {row.offset} is of origin {row.origin:#x}, which sent nothing")
            continue
        if row.offset != expected:
            verdict.add("out of order", f"offset {row.offset} is in place of {expected}")
        if (name, row.line) in offsets:
            first = offsets[name, row.line]
            verdict.add("stored twice", f"{name} line {row.line} is at {first} and at {row.offset}")
        elif row.line <= last_lines[name]:
            verdict.add("out of order", f"{name} line {row.line} is after its line {last_lines[name]}")
        elif row.line > last_lines[name] + 1:
            verdict.add("missing line", f"{name} line {row.line} follows its line {last_lines[name]}")
        sent = make_delta(name, row.line)
        if (row.delta.vector_id, row.delta.operation) != (sent.vector_id, sent.operation):
            verdict.add("corrupt", f"offset {row.offset} is not what {name} sent as line {row.line}")
        offsets.setdefault((name, row.line), row.offset)
        last_lines[name] = max(last_lines[name], row.line)
    for (name, line), offset in history.acked.items():
        logged_offset, acked = offsets.get((name, line)), f"{name} line {line} was acknowledged at {offset}"
        if logged_offset is not None:
            if logged_offset != offset:
                verdict.add("other offset", f"{acked} and is at {logged_offset}")
        elif offset >= start or snapshot is None or line > last_in_snapshot(snapshot, name):
            verdict.add("lost", f"{acked} and is not in the log")
    return verdict


def last_in_snapshot(snapshot: LogSnapshot, name: str) -> int:
    """Return the last line of a producer that a snapshot covers."""
    return snapshot.lines.get(origin_of(name), 0)


def check_snapshot(snapshot: LogSnapshot, names: Sequence[str], verdict: Verdict) -> None:
    """Check that each vector of a snapshot is the fold of its producer's lines that the snapshot covers."""
    expected_keys = set()
    for name in names:
        values: dict[str, NDArray[np.float32]] = {}
        for line in range(1, last_in_snapshot(snapshot, name) + 1):
            delta = make_delta(name, line)
            before = values.get(delta.vector_id, np.zeros(DIMENSION, np.float32))
            values[delta.vector_id] = _step(before, delta.operation)
        for key, value in values.items():
            expected_keys.add(key)
            stored = snapshot.vectors.get(key)
            if stored is None or not np.array_equal(stored, value):
                text = f"{key} in the snapshot at {snapshot.offset} is not the fold of its deltas"
                verdict.add("corrupt", text)
    for key in snapshot.vectors.keys() - expected_keys:
        verdict.add("corrupt", f"{key} is in the snapshot at {snapshot.offset}, but no producer sent it")


def check_service(ready: Mapping[str, object], log: Log, names: Sequence[str]) -> Verdict:
    """Compare the watermarks and the next offset of a started service with the log that it started from."""
    verdict = Verdict()
    watermarks = ready["watermarks"]
    assert isinstance(watermarks, dict)
    for name, line in log.ends(names).items():
        if watermarks.get(name) != line:
            text = f"the service's watermark of {name} is line {watermarks.get(name)}, the log has {line}"
            verdict.add("wrong watermark", text)
    if ready["next_offset"] != log.next_offset:
        text = f"the service continues at {ready['next_offset']}, the log ends at {log.next_offset}"
        verdict.add("out of order", text)
    return verdict


# --- the table


@dataclass(frozen=True, slots=True)
class Table:
    """The content of a storage sink's SQLite file: its cursor, and each vector with its last offset."""

    cursor: int
    vectors: Mapping[str, tuple[int, NDArray[np.float32]]]


def read_table(path: Path) -> Table | None:
    """Read a copy of the file, as SQLite recovers it; return None if it has no tables yet."""
    connection = sqlite3.connect(path)
    try:
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'vectors'").fetchone()
        if not tables:
            return None
        cursor_row = connection.execute("SELECT next_offset FROM cursor").fetchone()
        rows = connection.execute("SELECT vector_id, offset, value FROM vectors").fetchall()
    finally:
        connection.close()
    vectors = {key: (offset, np.frombuffer(value, "<f4")) for key, offset, value in rows}
    return Table(0 if cursor_row is None else cursor_row[0], vectors)


def check_table(content: Table, log: Log, *, finished: bool = False) -> Verdict:
    """Check that each vector is the fold of its deltas up to its offset, and includes those below the cursor.

    `finished`: the service has ended cleanly, so the table must cover the full log.
    """
    verdict = Verdict()
    if content.cursor > len(log.rows) or (finished and content.cursor != len(log.rows)):
        verdict.add("wrong table", f"its cursor is {content.cursor}, the log ends at {len(log.rows)}")
    rows_by_key: defaultdict[str, list[Row]] = defaultdict(list)
    for row in log.rows:
        rows_by_key[row.delta.vector_id].append(row)
    for key, rows in rows_by_key.items():
        offset, value = content.vectors.get(key, (-1, None))
        due_offset = max((row.offset for row in rows if row.offset < content.cursor), default=-1)
        if offset < due_offset:
            text = f"{key} is as of offset {offset}, the cursor {content.cursor} covers {due_offset}"
            verdict.add("wrong table", text)
        elif value is not None and not np.array_equal(value, fold(rows, offset)):
            verdict.add("wrong table", f"{key} is not the fold of its deltas up to offset {offset}")
    for key in content.vectors.keys() - rows_by_key.keys():
        verdict.add("wrong table", f"{key} is in the table and not in the log")
    return verdict


def fold(rows: Iterable[Row], offset: int) -> NDArray[np.float32]:
    """Return the vector that results from these deltas, up to and including an offset."""
    value = np.zeros(DIMENSION, np.float32)
    for row in rows:
        if row.offset > offset:
            break
        value = _step(value, row.delta.operation)
    return value


def _step(value: NDArray[np.float32], operation: Operation) -> NDArray[np.float32]:
    values, kind = operation.values, operation.kind
    assert values is not None
    if kind == Kind.CREATE:
        return values
    changed = value.copy()
    if kind == Kind.SCALE:
        changed *= values[0]
    elif kind == Kind.OFFSET:
        changed += values[0]
    else:
        assert kind == Kind.SPARSE_ADD
        assert operation.indices is not None
        changed[operation.indices] += values
    return changed
