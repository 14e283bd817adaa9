"""The content of a data directory, in plain words to keep and compare."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from delta_prop import LogSettings, Propagator
from delta_prop.cursors import read_cursors
from delta_prop.group_cursor import read_groups
from delta_prop.quarantine_file import read_all
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.log.files.identity import read_identity
from delta_prop_broker.log.files.paths import DIRECTORY, IDENTITY
from delta_prop_wire.control_rows import refused_code
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.jsonlines import delta_to_json
from delta_prop_wire.spec import ErrorCode
from tests.broker.durable import Clock
from tests.golden.story import (
    ADDS,
    AUDIT,
    EDITOR,
    FAR,
    FRAMES,
    IDENTIFIED,
    IDS,
    IMPORTER,
    REFUSED,
    TELLER,
    outcome,
)

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk
    from delta_prop_wire.batch import LoggedBatch


def kept(disk: Disk) -> dict[str, Any]:
    """All that lies in it, read without changing a byte."""
    log, report = DurableLog.open(
        disk, settings=LogSettings(), draw=lambda size: b"", clock=Clock(), read_only=True
    )
    identity = read_identity(disk, f"{DIRECTORY}/{IDENTITY}")
    assert identity is not None
    codecs: Counter[int] = Counter(place.codec for place in log.frames())
    return {
        "log_id": log.log_id.hex(),
        "epochs": [list(one) for one in identity.epochs],
        "offsets": [log.start_offset, log.high_watermark],
        "segments": report.segments,
        "notes": report.notes,
        "frames_by_codec": {str(codec): count for codec, count in sorted(codecs.items())},
        "rows": [row for place in log.frames() for row in rows(place.logged)],
        "snapshot": snapshot(log),
        "cursors": {name: one._asdict() for name, one in read_cursors(disk, log.log_id).items()},
        "groups": groups(disk, log.log_id),
        "quarantines": {
            one.sink: {"held": {str(at): list(held) for at, held in sorted(one.held.items())}}
            for one in read_all(disk)
        },
        "states": sorted(name for name in disk.list(DIRECTORY) if name.endswith((".checkpoint", ".part"))),
    }


def rows(logged: LoggedBatch) -> list[dict[str, Any]]:
    batch = logged.batch
    found = []
    for row in range(batch.count):
        told: dict[str, Any] = {"offset": logged.row_offset(row), "lamport": logged.lamport + row}
        if batch.is_state:
            told = {"offset": logged.row_offset(row), "key": list(batch.state_keys[row])}
        if batch.is_control:
            told |= {"void": ErrorCode(refused_code(batch, row)).name, "dot": str(batch.dot(row))}
        else:
            told |= delta_to_json(batch.delta(row, logged.source))
            if len(told.get("vector", ())) > 8:
                told["vector"] = " ".join(
                    f"{value}*{len(list(run))}" for value, run in groupby(told["vector"])
                )
        if row == 0:
            told["sent_clock"] = [str(one) for one in batch.clock]
        found.append(told)
    return found


def groups(disk: Disk, log_id: bytes) -> dict[str, int]:
    """Return each group's next offset. Raises UsageError where one is damaged."""
    found: dict[str, int] = {}
    for name, place in read_groups(disk, log_id).items():
        if isinstance(place, UsageError):
            raise place
        found[name] = place
    return found


def snapshot(log: DurableLog) -> dict[str, Any] | None:
    found = log.snapshot()
    if found is None:
        return None
    try:
        found.verify()
        return {
            "offset": found.offset,
            "rows": [row for logged in found.frames() for row in rows(logged)],
            "origins": {
                f"{origin:016x}": [mark.epoch, mark.counter, [str(dot) for dot in mark.clock]]
                for origin, mark in sorted(found.watermarks.items())
            },
        }
    finally:
        found.close()


async def served(p: Propagator) -> dict[str, Any]:
    """Return a restarted service's answers; repeats change nothing."""
    assert p.recovery is not None
    told: dict[str, Any] = {
        "notes": p.recovery.notes,
        "clean": p.recovery.clean,
        "cut": p.recovery.truncated_tail is not None,
    }
    told["watermarks"] = {name: p.producer(name).watermark() for name in (IMPORTER, EDITOR)}
    repeats = [await p.publish(delta) for delta in IDENTIFIED]
    told["repeats"] = {
        name: one.duplicates[0] if one.duplicate else None for name, one in zip(IDS, repeats, strict=True)
    }
    told |= await _refusals(p) if p._pipeline.orderer.watermarks.get(TELLER) else {}
    names = [("docs", f"doc-{number}") for number in range(10)]
    names += [("ids", "one"), ("ids", "two"), ("adds", "sum"), ("行", "行-1")]
    heads = {f"{namespace} {name}": p.head(name, namespace) for namespace, name in names}
    told["heads"] = {name: None if dot is None else str(dot) for name, dot in heads.items()}
    await anyio.lowlevel.checkpoint()
    told["next_offset"] = p.statistics().log.next_offset
    told["sinks"] = [AUDIT, ADDS]
    return told


async def _refusals(p: Propagator) -> dict[str, Any]:
    """Return outcomes of frames that left control rows, by their dots and by a repeat."""
    dots = [(TELLER, counter) for counter in range(1, 8)] + [(FAR, 1), (FAR, 2)]
    found = {f"{origin:x}:{counter}": p._pipeline.outcome(origin, counter) for origin, counter in dots}
    told: dict[str, Any] = {
        "dots": {dot: one.name if isinstance(one, ErrorCode) else one for dot, one in found.items()}
    }
    p._pipeline.hello(7, "teller", p._now())
    told["outcomes"] = {name: await outcome(p, frame) for name, frame in FRAMES.items()}
    try:
        told["refused"] = (await p.publish(REFUSED)).offset
    except Refused as refusal:
        told["refused"] = refusal.code.name
    return told
