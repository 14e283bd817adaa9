"""The content of a data directory as JSON, to be stored and compared."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from delta_prop import LogSettings, Propagator
from delta_prop.delivery.cursors import read_cursors
from delta_prop.delivery.group_cursor import read_groups
from delta_prop.delivery.quarantine_file import read_all
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.segments.identity import read_identity
from delta_prop_broker.segments.paths import DIRECTORY, IDENTITY
from delta_prop_wire.control_rows import refused_code
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.jsonlines import delta_to_json
from delta_prop_wire.spec import ErrorCode
from tests.broker.durable import Clock, FixedRandomness
from tests.delta_prop.support import claim_origins
from tests.golden.directory_history import (
    ADDS,
    AUDIT,
    EDITOR,
    FRAMES,
    IDENTIFIED,
    IDS,
    IMPORTER,
    OTHER_SERVICE,
    REFUSED,
    RESENDER,
    resend_frame,
)

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk
    from delta_prop_wire.batch import LoggedBatch


def read_content(disk: Disk) -> dict[str, Any]:
    """Return the content of a directory, without changing a byte."""
    log, report = DurableLog.open(
        disk, settings=LogSettings(), randomness=FixedRandomness(), clock=Clock(), read_only=True
    )
    identity = read_identity(disk, f"{DIRECTORY}/{IDENTITY}")
    assert identity is not None
    codecs: Counter[int] = Counter(frame.codec for frame in log.frames())
    return {
        "log_id": log.log_id.hex(),
        "epochs": [list(epoch) for epoch in identity.epochs],
        "offsets": [log.start_offset, log.high_watermark],
        "segments": report.segments,
        "notes": report.notes,
        "frames_by_codec": {str(codec): count for codec, count in sorted(codecs.items())},
        "rows": [row for frame in log.frames() for row in rows_to_json(frame.logged)],
        "snapshot": read_snapshot(log),
        "cursors": {name: cursor._asdict() for name, cursor in read_cursors(disk, log.log_id).items()},
        "groups": read_group_offsets(disk, log.log_id),
        "quarantines": {
            quarantine.sink: {
                "held": {str(offset): list(held) for offset, held in sorted(quarantine.held.items())}
            }
            for quarantine in read_all(disk)
        },
        "states": sorted(name for name in disk.list(DIRECTORY) if name.endswith((".checkpoint", ".part"))),
    }


def rows_to_json(logged: LoggedBatch) -> list[dict[str, Any]]:
    batch = logged.batch
    formatted = []
    for row in range(batch.count):
        row_json: dict[str, Any] = {"offset": logged.row_offset(row), "lamport": logged.lamport + row}
        if batch.is_state:
            row_json = {"offset": logged.row_offset(row), "key": list(batch.state_keys[row])}
        if batch.is_control:
            row_json |= {"void": ErrorCode(refused_code(batch, row)).name, "dot": str(batch.dot(row))}
        else:
            row_json |= delta_to_json(batch.delta(row, logged.source))
            if len(row_json.get("vector", ())) > 8:
                row_json["vector"] = " ".join(
                    f"{value}*{len(list(run))}" for value, run in groupby(row_json["vector"])
                )
        if row == 0:
            row_json["sent_clock"] = [str(dot) for dot in batch.clock]
        formatted.append(row_json)
    return formatted


def read_group_offsets(disk: Disk, log_id: bytes) -> dict[str, int]:
    """Return each group's next offset. Raises UsageError if one is corrupted."""
    offsets: dict[str, int] = {}
    for name, offset in read_groups(disk, log_id).items():
        if isinstance(offset, UsageError):
            raise offset
        offsets[name] = offset
    return offsets


def read_snapshot(log: DurableLog) -> dict[str, Any] | None:
    snapshot = log.snapshot()
    if snapshot is None:
        return None
    try:
        snapshot.verify()
        return {
            "offset": snapshot.offset,
            "rows": [row for logged in snapshot.frames() for row in rows_to_json(logged)],
            "origins": {
                f"{origin:016x}": [watermark.epoch, watermark.counter, [str(dot) for dot in watermark.clock]]
                for origin, watermark in sorted(snapshot.watermarks.items())
            },
        }
    finally:
        snapshot.close()


async def query_service(p: Propagator) -> dict[str, Any]:
    """Return the answers of a restarted service. Deltas that are sent again change nothing."""
    assert p.recovery is not None
    answers: dict[str, Any] = {
        "notes": p.recovery.notes,
        "clean": p.recovery.clean,
        "cut": p.recovery.truncated_tail is not None,
    }
    answers["watermarks"] = {name: p.producer(name).watermark() for name in (IMPORTER, EDITOR)}
    second_results = [await p.publish(delta) for delta in IDENTIFIED]
    answers["repeats"] = {
        name: acknowledgement.duplicates[0] if acknowledgement.duplicate else None
        for name, acknowledgement in zip(IDS, second_results, strict=True)
    }
    answers |= (
        await _query_refusals(p) if p.internals().partition.pipeline.orderer.watermarks.get(RESENDER) else {}
    )
    names = [("docs", f"doc-{number}") for number in range(10)]
    names += [("ids", "one"), ("ids", "two"), ("adds", "sum"), ("行", "行-1")]
    heads = {f"{namespace} {name}": p.head(name, namespace) for namespace, name in names}
    answers["heads"] = {name: None if dot is None else str(dot) for name, dot in heads.items()}
    await anyio.lowlevel.checkpoint()
    answers["next_offset"] = p.statistics().log.next_offset
    answers["sinks"] = [AUDIT, ADDS]
    return answers


async def _query_refusals(p: Propagator) -> dict[str, Any]:
    """Return the outcomes of the frames that left control rows: looked up by their dots, and by resending."""
    dots = [(RESENDER, counter) for counter in range(1, 8)] + [(OTHER_SERVICE, 1), (OTHER_SERVICE, 2)]
    outcomes = {
        f"{origin:x}:{counter}": p.internals().partition.pipeline.outcome(origin, counter)
        for origin, counter in dots
    }
    answers: dict[str, Any] = {
        "dots": {
            dot: outcome.name if isinstance(outcome, ErrorCode) else outcome
            for dot, outcome in outcomes.items()
        }
    }
    claim_origins(p, 7, "teller")
    answers["outcomes"] = {name: await resend_frame(p, frame) for name, frame in FRAMES.items()}
    try:
        answers["refused"] = (await p.publish(REFUSED)).offset
    except Refused as refusal:
        answers["refused"] = refusal.code.name
    return answers
