"""`log export --to`, `log restore`: a data directory copied whole, while it is served."""

from __future__ import annotations

from delta_prop.commands import edge
from delta_prop.commands.opened import open_disk
from delta_prop.cursors import PATH as CURSORS
from delta_prop.group_places import DIRECTORY as GROUPS
from delta_prop.local_places import THE_ONE_WRITTEN
from delta_prop.quarantine_file import DIRECTORY as QUARANTINE
from delta_prop_broker.log.beside.copying import copy_log
from delta_prop_broker.log.files.names import DIRECTORY
from delta_prop_wire.errors import UsageError

OK = 0


def restore(source: str, data: str) -> int:
    """Make a data directory of a copy, durable when this returns. Raises as `copy` does."""
    return copy(source, data, cure="name the copy that `log export --to DIR` made")


def copy(data: str, to: str, *, cure: str = THE_ONE_WRITTEN) -> int:
    """Copy a data directory into a new one, durable when this returns; `cure`: where there is none.

    Raises UsageError, LogDamaged, FormatUnknown, CopyFailed, OSError; there is no new directory then.
    """
    source = open_disk(data, cure=cure)
    if edge.is_within(to, data):
        raise UsageError(f"{to!r} lies in the data directory {data!r}: name a new directory outside of it")
    with edge.new_directory(to) as target:
        copied = copy_log(
            source,
            target,
            DIRECTORY,
            files=(CURSORS,),
            directories=(GROUPS, QUARANTINE),
            draw=edge.draw,
            pause=edge.pause,
        )
    edge.confirm(
        f"{to}: offsets {copied.first_offset} to {copied.next_offset}, {copied.bytes:,} bytes in "
        f"{copied.segments} segments, {copied.files} files beside; epoch {copied.epoch} begins behind them"
    )
    return OK
