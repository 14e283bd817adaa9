"""`log show`, `log verify`, `log export`: what a log on disk holds. They read alone, beside a writer too."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from delta_prop.commands import edge
from delta_prop.commands.opened import open_disk, opened_log, snapshot_told
from delta_prop.commands.places import EARLIEST, LATEST, offset_of, parse_at
from delta_prop.cursors import cursors_damage
from delta_prop.dates import shown_time
from delta_prop_broker.log.beside.inspect import (
    inspect,
    inspect_checkpoints,
    inspect_snapshots,
    start_offset,
)
from delta_prop_broker.log.damage import REPAIR, LogDamaged
from delta_prop_broker.log.files.names import DIRECTORY
from delta_prop_broker.log.files.snapshot import SnapshotFacts, snapshot_path
from delta_prop_wire.control_rows import ControlType, control_type, refused_code
from delta_prop_wire.jsonlines import to_line
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.topics import kind_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta_prop.commands.places import At
    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.files.frames import Place
    from delta_prop_wire.batch import Batch

OK, FAILED = 0, 1
_TOLD_MAX = 20
_HEADS = ("offset", "time", "lamport", "dot", "op", "vector")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a log: from `start` on, up to `count` rows (None: all)."""

    data: str
    start: str | None = None
    count: int | None = None


# --- show


def show(part: Part, *, as_json: bool) -> int:
    """One line a row, voids too. Raises UsageError, LogDamaged, OSError."""
    lines = (json.dumps(row, ensure_ascii=False) if as_json else _table_line(row) for row in _rows(part))
    if not as_json:
        with opened_log(part.data) as (_, log, _):
            held = snapshot_told(log)
        if held is not None:
            edge.put(f"snapshot at offset {held['offset']}: {held['rows']:,} rows, {held['bytes']:,} bytes")
        edge.put(_table_line(dict(zip(_HEADS, _HEADS, strict=True))))
    edge.put_all(lines)
    return OK


def _rows(part: Part) -> Iterator[dict[str, Any]]:
    with opened_log(part.data) as (disk, log, _):
        start = EARLIEST if part.start is None else parse_at("--start", part.start, edge.wall_us())
        begin, left = offset_of(start, log), part.count
        _note_let_go(disk, begin)
        for place in log.frames(begin):
            for row in _told(place):
                if row["offset"] < begin:
                    continue
                if left == 0:
                    return
                left = None if left is None else left - 1
                yield row


def _told(place: Place) -> Iterator[dict[str, Any]]:
    logged, batch = place.logged, place.logged.batch
    for row in range(batch.count):
        told: dict[str, Any] = {
            "offset": logged.offset + row,
            "time": shown_time(place.stamp.append_time),
            "lamport": logged.lamport + row,
            "dot": str(batch.dot(row)),
        }
        if batch.is_control:
            told |= _control_told(batch, row)
        else:
            told |= {"op": kind_name(batch.operation(row).kind)}
            told |= {"namespace": batch.namespaces[row], "vector_id": batch.keys[row]}
        yield told


def _control_told(batch: Batch, row: int) -> dict[str, Any]:
    kind = control_type(batch)
    if kind is not ControlType.REFUSED:
        return {"op": "control", "type": "unknown" if kind is None else kind.name.lower()}
    code = refused_code(batch, row)
    return {"op": "void", "error": ErrorCode(code).name if code in set(ErrorCode) else str(code)}


def _table_line(row: dict[str, Any]) -> str:
    if row["op"] in ("void", "control"):
        vector = row.get("error") or row["type"]
    else:
        vector = row.get("vector") or f"{row['namespace']} {row['vector_id']}"
    numbers = f"{row['offset']:>10}  {row['time']:24}  {row['lamport']:>10}"
    return f"{numbers}  {row['dot']:>28}  {row['op']:10}  {vector}"


# --- verify


def verify(data: str, *, as_json: bool) -> int:
    """Read and check everything; exit status 1 with the damage told, the first one first.

    A torn tail that was never synced is none: a writer may be at it, or was killed. Raises FormatUnknown,
    OSError.
    """
    disk = open_disk(data, damaged=True)
    found = _looked_over(disk)
    if found.damages:  # the writer may have removed a segment between two looks: what stays is damage
        found = _looked_over(disk)
    told: dict[str, Any] = {"sound": not found.damages, "frames": found.frames, "deltas": found.rows}
    told |= {"bytes": found.bytes, "first_offset": found.first, "next_offset": found.following}
    told |= {"torn_tail": found.torn is not None, "damages": len(found.damages)}
    told |= {"snapshots": len(found.snapshots), "snapshot_rows": sum(found.snapshots.values())}
    told |= {"snapshot_offset": max(found.snapshots, default=None), "checkpoints": found.checkpoints}
    if as_json:
        edge.put(json.dumps(told | {"first_damage": _damage(found.damages[0]) if found.damages else None}))
        return FAILED if found.damages else OK
    state = f"{len(found.damages)} damaged places" if found.damages else "sound"
    edge.put(
        f"{found.rows:,} deltas in {found.frames:,} frames of {found.bytes:,} bytes, "
        f"offsets {found.first} to {found.following}: {state}"
    )
    for offset, rows in found.snapshots.items():
        edge.put(f"a snapshot of {rows:,} rows at offset {offset}: sound")
    if 0 < found.first <= max(found.snapshots, default=0):
        edge.put(f"offsets below {found.first} are held by the snapshot alone")
    if found.checkpoints:
        edge.put(f"checkpoints: {found.checkpoints}, sound")
    if found.torn is not None:
        edge.put(f"behind them {found.torn.path}, byte {found.torn.position}: {found.torn.reason}")
    for damage in found.damages[:_TOLD_MAX]:
        edge.note(damage.description)
    if len(found.damages) > _TOLD_MAX:
        edge.note(f"and {len(found.damages) - _TOLD_MAX} more")
    if found.damages:
        edge.note(f"nothing was changed; {REPAIR}")
    return FAILED if found.damages else OK


@dataclass(slots=True)
class _Found:
    """What a look over a whole log counted."""

    frames: int = 0
    rows: int = 0
    bytes: int = 0
    first: int = 0
    following: int = 0
    torn: LogDamaged | None = None
    damages: list[LogDamaged] = field(default_factory=list)
    snapshots: dict[int, int] = field(default_factory=dict)  # offset to rows
    checkpoints: int = 0


def _looked_over(disk: Disk) -> _Found:
    # Snapshots and checkpoints first: a writer may go on meanwhile, and what they hold must be in the frames.
    saved = [*inspect_snapshots(disk), *inspect_checkpoints(disk)]
    start = start_offset(disk)
    told = _Found(first=start, following=start)
    for found in inspect(disk):
        if not isinstance(found, LogDamaged):
            told.first = told.first if told.frames else found.logged.offset
            told.frames, told.rows = told.frames + 1, told.rows + found.logged.count
            told.bytes, told.following = told.bytes + found.size, found.logged.next_offset
        elif _is_torn(found):
            told.torn = found
        else:
            told.damages.append(found)
    end = max([told.following, *(damage.end or 0 for damage in told.damages)])
    for one in (*saved, *filter(None, [cursors_damage(disk)])):
        if isinstance(one, LogDamaged):
            told.damages.append(one)
        elif one.offset > end:
            path = snapshot_path(DIRECTORY, one.offset) if isinstance(one, SnapshotFacts) else one.path
            told.damages.append(LogDamaged(path, f"the log ends at offset {end}, before this file"))
        elif isinstance(one, SnapshotFacts):
            told.snapshots[one.offset] = one.rows
        else:
            told.checkpoints += 1
    return told


def _is_torn(damage: LogDamaged) -> bool:
    """Whether it lies above everything that was synced: then nobody was promised that."""
    return damage.position is not None and damage.end is None


def _damage(damage: LogDamaged) -> dict[str, Any]:
    return {
        "file": damage.path,
        "position": damage.position,
        "first_offset": damage.offset,
        "next_offset": damage.end,
        "reason": damage.reason,
    }


# --- export


def export(part: Part, *, output: str | None, frames: bool, around: bool) -> int:
    """Write the log out: deltas as JSON lines, or the frames that it consists of.

    At damage it ends with LogDamaged; `around` it tells what is left out, and goes on behind. Raises
    UsageError, OSError.
    """
    start = EARLIEST if part.start is None else parse_at("--start", part.start, edge.wall_us())
    disk = open_disk(part.data, damaged=around)
    with ExitStack() as exits:
        if around:
            places = _around(disk)
        else:
            _, log, _ = exits.enter_context(opened_log(part.data))
            places = log.frames(log.first_offset)
        if start != LATEST and start.time_us is None:
            _note_let_go(disk, start.offset or 0)
        out = exits.enter_context(edge.output(output))
        for place, rows in _chosen(places, start, part.count):
            if frames:
                out.write(place.logged.head, place.logged.batch.body)
            else:
                for row in () if place.logged.batch.is_control else rows:
                    delta = place.logged.batch.delta(row, place.logged.source)
                    out.write(to_line(delta, place.logged.offset + row).encode() + b"\n")
        out.flush()
    return OK


def _around(disk: Disk) -> Iterator[Place]:
    """Every frame that can be read; what cannot is told."""
    for found in inspect(disk):
        if isinstance(found, LogDamaged):
            what = "" if found.offset is None else f" (offset {found.offset} to {found.end or 'the end'})"
            edge.note(f"left out: {found.path}{what}: {found.reason}")
        else:
            yield found


def _note_let_go(disk: Disk, begin: int) -> None:
    """Report the offsets from `begin` on that no frame holds any more."""
    start = start_offset(disk)
    if begin < start:
        edge.note(f"left out: offsets {begin} to {start}, which the log has let go")


def _chosen(places: Iterator[Place], start: At, left: int | None) -> Iterator[tuple[Place, range]]:
    """The frames that hold something from `start` on, each with the rows that belong to it; `left` rows."""
    for place in places:
        logged = place.logged
        if start == LATEST or (start.time_us is not None and place.stamp.append_time < start.time_us):
            continue
        start = start if start.time_us is None else EARLIEST
        first = max((start.offset or 0) - logged.offset, 0)
        rows = range(first, logged.count if left is None else min(logged.count, first + left))
        if rows:
            yield place, rows
        left = None if left is None else left - len(rows)
        if left == 0:
            return
