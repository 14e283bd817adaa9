"""`log migrate`: a data directory of an earlier version brought to the format of this one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from delta_prop.commands import edge
from delta_prop_broker.log import migration

if TYPE_CHECKING:
    from delta_prop_broker.log.migration import Migrated, Plan

OK = 0


def migrate(data: str, *, as_json: bool) -> int:
    """Migrate it; report what was done on standard output, what is about to be done on standard error.

    Raises UsageError, LogBusy, LogDamaged, CodecMissing, FormatUnknown, RoomMissing, OSError.
    """
    progress = edge.Progress()
    plans: list[Plan] = []

    def announce(plan: Plan) -> None:
        plans.append(plan)
        edge.note(_announcement(data, plan))

    def tell(done: int, total: int) -> None:
        progress.tell(f"{done:,} of {total:,} bytes")

    try:
        watching = migration.Watching(announce, tell, edge.note)
        migrated = migration.migrate(edge.existing_disk(data), draw=edge.draw, watching=watching)
    finally:
        progress.end()
    if as_json:
        edge.confirm(json.dumps(_to_json(migrated, plans)))
    else:
        edge.confirm(f"{data}: {_outcome(migrated)}")
    return OK


def _announcement(data: str, plan: Plan) -> str:
    if plan.first_offset is None:
        return f"{data}: {plan.segments} segments hold no control rows, none is rewritten"
    return (
        f"{data}: {plan.segments_rewritten} of {plan.segments} segments are rewritten, from the first "
        f"control row at offset {plan.first_offset} on; up to {plan.bytes_needed:,} bytes of room are "
        f"needed, {plan.bytes_free:,} are free"
    )


def _outcome(migrated: Migrated) -> str:
    if migrated.completed:
        return f"format {migrated.to_format}; what an earlier migration had left to do is done"
    if migrated.from_format == migrated.to_format:
        return f"format {migrated.to_format} already; nothing was changed"
    return (
        f"format {migrated.from_format} to {migrated.to_format}: {migrated.segments_rewritten} segments "
        f"rewritten, {migrated.bytes_written:,} bytes, {migrated.control_batches:,} batches of control rows"
    )


def _to_json(migrated: Migrated, plans: list[Plan]) -> dict[str, Any]:
    told: dict[str, Any] = {"from_format": migrated.from_format, "format": migrated.to_format}
    told |= {"completed": migrated.completed, "segments_rewritten": migrated.segments_rewritten}
    told |= {"bytes_written": migrated.bytes_written, "control_batches": migrated.control_batches}
    return told | {"bytes_needed": plans[0].bytes_needed if plans else 0}
