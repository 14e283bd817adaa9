"""`log export --to`, `log restore`: copy a whole data directory while a server may serve it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.delivery.cursors import PATH as CURSORS
from delta_prop.delivery.group_cursor import DIRECTORY as GROUPS
from delta_prop.delivery.quarantine_file import DIRECTORY as QUARANTINE
from delta_prop.directory.readonly_log import open_disk
from delta_prop.platform import system
from delta_prop.platform.path_checks import DATA_DIRECTORY_FIX
from delta_prop.platform.world import SystemRandomness
from delta_prop_broker.readonly.backup import copy_directory
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from delta_prop_broker.readonly.backup import BackupReport

OK = 0


def restore(options: Namespace) -> int:
    """Create a data directory from a copy, durable when this returns. Raises as `copy` does."""
    return copy(options.source, options.data, fix="name the copy that `log export --to DIR` made")


def copy(data: str, to: str, *, fix: str = DATA_DIRECTORY_FIX) -> int:
    """Copy a data directory into a new one, durable when this returns.

    `fix`: the fix that the error names if `data` is not a data directory. Raises UsageError, LogCorrupted,
    FormatUnknown, BackupFailed, OSError; then no new directory is left.
    """
    source = open_disk(data, fix=fix)
    if system.is_within(to, data):
        raise UsageError(f"{to!r} is inside the data directory {data!r}: name a new directory outside of it")
    with system.create_directory(to) as target:
        reports = copy_directory(
            source,
            target,
            files=(CURSORS,),
            directories=(GROUPS, QUARANTINE),
            randomness=SystemRandomness(),
            pause=system.pause,
        )
    system.confirm(f"{to}: {_format(list(reports.values()))}")
    return OK


def _format(reports: Sequence[BackupReport]) -> str:
    """Describe a copy: that of the default partition with its offsets, that of several with their number."""
    size = f"{sum(report.bytes for report in reports):,} bytes in "
    size += f"{sum(report.segments for report in reports)} segments, "
    size += f"{sum(report.files for report in reports)} other files"
    if len(reports) > 1:
        return f"{len(reports)} partitions, {size}; a new epoch of each begins after them"
    (report,) = reports
    return (
        f"offsets {report.start_offset} to {report.next_offset}, {size}; epoch {report.epoch} begins after "
        "them"
    )
