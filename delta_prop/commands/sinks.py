"""`sinks`: lists the sinks and groups of a directory, forgets one, or leaves a request for one."""

from __future__ import annotations

import json
from shlex import quote
from typing import TYPE_CHECKING, Any

from delta_prop.commands.screen import format_lag
from delta_prop.commands.tables import Table, name_of
from delta_prop.delivery.cursors import cursors_corruption, read_cursors, write_cursors
from delta_prop.delivery.group_cursor import forget_group, read_groups
from delta_prop.delivery.operator_requests import forget_requests
from delta_prop.delivery.quarantine_file import quarantine_path, remove_stored
from delta_prop.directory.log_positions import offset_to_reset_to
from delta_prop.directory.request_client import submit_request
from delta_prop.directory.stored_partitions import (
    StoredPartition,
    find_partition,
    have_column,
    list_partitions,
)
from delta_prop.directory.stored_sinks import describe_quarantine, read_sinks
from delta_prop.platform import system
from delta_prop_broker.corruption import LogBusy
from delta_prop_broker.segments.paths import LOCK_PATH
from delta_prop_broker.segments.small_file import read_file
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace

    from delta_prop.delivery.status import SavedCursor
    from delta_prop_broker.disk import Disk

OK, FAILED = 0, 1


def show_sinks(options: Namespace) -> int:
    """Print every sink and group with a cursor beside its log; return exit status 1 if one is corrupted.

    Raises UsageError, LogCorrupted, OSError.
    """
    partitions = list_partitions(options.data, options.stream, options.partition)
    sinks: list[dict[str, Any]] = []
    faults: list[str] = []
    for partition in partitions:
        with partition.open_log() as (disk, log, _):
            sinks += read_sinks(partition, log)
            faults += corruption_of_cursors(disk)
    if options.json:
        system.put_all(map(json.dumps, sinks))
    else:
        _put_sinks(sinks, Table(has_partitions=have_column(partitions)))
    for fault in faults:
        system.note(fault)
    return FAILED if faults or any("corruption" in sink for sink in sinks) else OK


def corruption_of_cursors(disk: Disk) -> list[str]:
    """Describe the corruption of the cursors' file with its fix, if there is any."""
    corruption = cursors_corruption(disk)
    fix = "put a copy of the file from a backup in its place, or remove it: the sinks then register again"
    return [] if corruption is None else [f"{corruption.description}: {fix}"]


def _put_sinks(sinks: list[dict[str, Any]], table: Table) -> None:
    table.put_head(
        f"{'name':24}  {'kind':6}  {'offset':>12}  {'lag':>12}  {'lag time':>8}  {'quarantined':>11}  "
        "required  notes"
    )
    for sink in sinks:
        required = "yes" if sink["required"] else "no"
        offset, lag = ("?" if value is None else f"{value:,}" for value in (sink["offset"], sink["lag"]))
        lag_time, quarantined = format_lag(sink["lag_s"]), sink.get("quarantined", 0)
        numbers = f"{offset:>12}  {lag:>12}  {lag_time:>8}  {quarantined:>11,}"
        requested = [f"{verb} requested" for verb in sink.get("requested", ())]
        states = [state for state in ("rebuilding", "paused") if sink.get(state)]
        notes = ", ".join(states + requested + ([sink["corruption"]] if "corruption" in sink else []))
        table.put(sink, f"{sink['name']:24}  {sink['kind']:6}  {numbers}  {required:8}  {notes}")


def forget(options: Namespace) -> int:
    """Remove the data stored for a sink or group: its cursor, its quarantine, its requests.

    Raises UsageError, LogBusy while a process has the directory, OSError.
    """
    partition, name = find_partition(options.data, name_of(options)), options.name
    if forget_group(partition.disk, name):
        system.put(f"done: group {name!r}{partition.suffix} is forgotten")
        return OK
    try:
        lock = partition.root.lock(LOCK_PATH)
    except BlockingIOError as error:
        raise LogBusy(error.strerror) from None
    try:
        quarantine = _forget_sink(partition, name)
    finally:
        lock.release()
    system.put(f"done: sink {name!r}{partition.suffix} is forgotten; its quarantine {quarantine}")
    return OK


def _forget_sink(partition: StoredPartition, name: str) -> str:
    """Remove what is stored for a sink; return what its quarantine was like."""
    disk = partition.disk
    identity = partition.find_identity()
    cursors = {} if identity is None else read_cursors(disk, identity.log_id)
    if identity is None or (name not in cursors and read_file(disk, quarantine_path(name)) is None):
        known = ", ".join(sorted(cursors)) or "none"
        raise UsageError(
            f"{name!r}: there is no such sink or group{partition.suffix}: name an existing one (sinks: "
            f"{known})"
        )
    quarantine = describe_quarantine(disk, identity, name)
    cursors.pop(name, None)
    write_cursors(disk, identity.log_id, cursors)
    remove_stored(disk, name)
    forget_requests(partition.root, name, identity.log_id)
    return quarantine


# --- requests for a sink


def control_sink(options: Namespace) -> int:
    """Request that a sink pauses, resumes, continues from another position, or is rebuilt from the log.

    Raises UsageError, RequestRefused, LogCorrupted, OSError.
    """
    name, verb = options.name, options.sinks_verb
    partition = find_partition(options.data, name_of(options))
    cursor = _find_cursor(partition, name)
    subject, offsets, success = f"{verb} of sink {name!r}{partition.suffix}", tuple[int, ...](), None
    if verb == "rebuild":
        success = f"{subject} is requested; `delta-prop sinks --http HOST:PORT` shows its progress"
    if verb == "reset":
        if cursor.own:
            command = f"delta-prop sinks rebuild {quote(name)} {partition.arguments}"
            raise UsageError(
                f"sink {name!r}: it stores its cursor with its data, which a reset would not change: if it "
                f"can be rebuilt, run `{command}`, else give it new data and a new name"
            )
        with partition.open_log() as (_, log, _):
            offsets = (offset_to_reset_to(options.to, log, system.wall_us()),)
        subject += f" to offset {offsets[0]}"
    submit_request(partition, verb, name, offsets, subject=subject, success=success)
    return OK


def _find_cursor(partition: StoredPartition, name: str) -> SavedCursor:
    log_id = partition.read_identity().log_id
    cursors = read_cursors(partition.disk, log_id)
    if name in cursors:
        return cursors[name]
    if name in read_groups(partition.disk, log_id):
        raise UsageError(f"{name!r} is a group, not a sink: move it with `groups reset {name} --to POSITION`")
    known = ", ".join(sorted(cursors)) or "none"
    raise UsageError(
        f"sink {name!r}: there is no such sink{partition.suffix}: name an existing one ({known})"
    )
