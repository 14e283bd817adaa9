"""`log migrate`: converts a data directory of an earlier version to this version's format."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from delta_prop.platform import system
from delta_prop.platform.world import SystemRandomness
from delta_prop_broker.recovery import migration
from delta_prop_broker.recovery.migration import MigrationPlan, MigrationReport

if TYPE_CHECKING:
    from argparse import Namespace

OK = 0


def migrate(options: Namespace) -> int:
    """Migrate a data directory; print the plan on standard error and the result on standard output.

    Raises UsageError, LogBusy, LogCorrupted, CodecMissing, FormatUnknown, InsufficientDiskSpace, OSError.
    """
    data, progress, bytes_needed = options.data, system.Progress(), 0

    def announce(plan: MigrationPlan) -> None:
        nonlocal bytes_needed
        bytes_needed = plan.bytes_needed
        system.note(_format_plan(data, plan))

    def report_progress(done: int, total: int) -> None:
        progress.report(f"{done:,} of {total:,} bytes")

    try:
        callbacks = migration.MigrationCallbacks(announce, report_progress, system.note)
        report = migration.migrate(
            system.open_existing_disk(data), randomness=SystemRandomness(), callbacks=callbacks
        )
    finally:
        progress.end()
    if options.json:
        fields: dict[str, Any] = {"from_format": report.from_format, "format": report.to_format}
        fields |= {"completed": report.completed, "segments_rewritten": report.segments_rewritten}
        fields |= {"bytes_written": report.bytes_written, "control_batches": report.control_batches}
        system.confirm(json.dumps(fields | {"bytes_needed": bytes_needed}))
    else:
        system.confirm(f"{data}: {_format_result(report)}")
    return OK


def _format_plan(data: str, plan: MigrationPlan) -> str:
    if plan.start_offset is None:
        return f"{data}: {plan.segments} segments hold no control rows, so none is rewritten"
    return (
        f"{data}: {plan.segments_rewritten} of {plan.segments} segments are rewritten, from the first "
        f"control row at offset {plan.start_offset} on; up to {plan.bytes_needed:,} bytes are "
        f"needed, {plan.bytes_free:,} are free"
    )


def _format_result(report: MigrationReport) -> str:
    if report.completed:
        return f"format {report.to_format}; the rest of an interrupted migration is done"
    if report.from_format == report.to_format:
        return f"format {report.to_format} already; nothing was changed"
    return (
        f"format {report.from_format} to {report.to_format}: {report.segments_rewritten} segments "
        f"rewritten, {report.bytes_written:,} bytes, {report.control_batches:,} batches of control rows"
    )
