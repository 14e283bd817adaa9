"""`status`, `sinks`: prints the state of a log, its sinks and groups; forgets a sink or leaves a request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from shlex import quote
from typing import TYPE_CHECKING, Any

from delta_prop.commands.screen import format_lag
from delta_prop.delivery.cursors import cursors_corruption, read_cursors, write_cursors
from delta_prop.delivery.group_cursor import forget_group, read_groups
from delta_prop.delivery.operator_requests import forget_requests
from delta_prop.delivery.quarantine_file import quarantine_path, remove_stored
from delta_prop.delivery.status import SavedCursor
from delta_prop.directory.log_positions import offset_to_reset_to
from delta_prop.directory.readonly_log import open_disk, open_readonly_log, snapshot_to_json
from delta_prop.directory.request_client import open_directory, submit_request
from delta_prop.directory.stored_sinks import describe_quarantine, read_quarantines, read_sinks
from delta_prop.platform import system
from delta_prop.platform.dates import format_time
from delta_prop.server.job_files import JobFiles
from delta_prop.server.server_status import lags_of
from delta_prop_broker.corruption import LogBusy, LogCorrupted
from delta_prop_broker.disk import Disk
from delta_prop_broker.log.directory import read_times
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.recovery.recovery import RecoveryReport
from delta_prop_broker.segments.identity import read_identity
from delta_prop_broker.segments.paths import DIRECTORY, IDENTITY, LOCK_PATH
from delta_prop_broker.segments.small_file import read_file
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace

OK, FAILED = 0, 1


# --- status


def show_status(options: Namespace) -> int:
    """Print the log's state; return exit status 1 if a corruption is found.

    Not all frames are read: only `log verify` does that. Raises UsageError, FormatUnknown, OSError.
    """
    data: str = options.data
    disk = open_disk(data)
    writer = system.find_lock_holder(data, LOCK_PATH)
    fields: dict[str, Any] = {"data": data, "health": "intact", "writer": writer}
    try:
        with open_readonly_log(data) as (_, log, report):
            fields |= _status_to_json(disk, log, report)
    except LogCorrupted as corruption:
        fields |= {"health": "corrupted", "corruption": str(corruption)}
    if options.json:
        system.put(json.dumps(fields))
    else:
        lags = dict(flatten({"lags": fields.pop("lags", {})}))
        lines = fields | lags if "log_id" in fields else fields
        system.put_all(f"{name:13}  {format_value(value)}" for name, value in lines.items())
    return OK if fields["health"] == "intact" else FAILED


def _status_to_json(disk: Disk, log: DurableLog, report: RecoveryReport) -> dict[str, Any]:
    """Describe a log that opens. Raises LogCorrupted, OSError."""
    fields: dict[str, Any] = {"log_id": log.log_id.hex(), "epoch": log.epoch, "closed": report.clean}
    fields |= {"start_offset": log.start_offset, "next_offset": log.high_watermark}
    fields |= {"segments": report.segments, "bytes": report.bytes, "bytes_free": disk.free_bytes()}
    # free_bytes_min is that of the default settings: the server's are not known here
    fields["bytes_until_full"] = max(fields["bytes_free"] - log.settings.free_bytes_min, 0)
    sinks = read_sinks(disk, log)
    fields |= {"sinks": len(sinks), "snapshot": None}
    fields["lags"] = lags_of(sinks, "name")
    faults = [sink["corruption"] for sink in sinks if "corruption" in sink]
    faults += _corruption_of_cursors(disk)
    fields |= {"health": "corrupted", "corruption": "; ".join(faults)} if faults else {}
    try:
        fields["snapshot"] = snapshot_to_json(log)
    except LogCorrupted as corruption:
        fields |= {"health": "corrupted", "corruption": str(corruption)}
    quarantines = read_quarantines(disk, log.log_id, log.epoch_end).items()
    fields["quarantined"] = {name: len(quarantine) for name, quarantine in quarantines if len(quarantine)}
    fields["jobs"] = JobFiles(disk).count_by_state()
    jump = read_times(disk, DIRECTORY, report.notes).jump
    fields["clock_jump"] = jump and {name[:-3]: format_time(us) for name, us in jump._asdict().items()}
    return fields


def flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value with its path, e.g. `log.next_offset`; for a list, its length."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, len(value) if isinstance(value, list) else value


def format_value(value: object) -> str:
    """Return a JSON value as text for people."""
    if value is None or value == {}:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {format_value(count)}" for name, count in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


# --- sinks


def show_sinks(options: Namespace) -> int:
    """Print every sink and group with a cursor beside the log; return exit status 1 if a cursor is corrupted.

    Raises UsageError, LogCorrupted, OSError.
    """
    with open_readonly_log(options.data) as (disk, log, _):
        sinks, faults = read_sinks(disk, log), _corruption_of_cursors(disk)
    if options.json:
        system.put_all(map(json.dumps, sinks))
    else:
        _put_sinks(sinks)
    for fault in faults:
        system.note(fault)
    return FAILED if faults or any("corruption" in sink for sink in sinks) else OK


def _corruption_of_cursors(disk: Disk) -> list[str]:
    """Describe the corruption of the cursors' file with its fix, if there is any."""
    corruption = cursors_corruption(disk)
    fix = "put a copy of the file from a backup in its place, or remove it: the sinks then register again"
    return [] if corruption is None else [f"{corruption.description}: {fix}"]


def _put_sinks(sinks: list[dict[str, Any]]) -> None:
    system.put(
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
        system.put(f"{sink['name']:24}  {sink['kind']:6}  {numbers}  {required:8}  {notes}".rstrip())


def forget(options: Namespace) -> int:
    """Remove the data stored for a sink or group: its cursor, its quarantine, its requests.

    Raises UsageError, LogBusy while a process has the directory, OSError.
    """
    disk, name = open_disk(options.data), options.name
    if forget_group(disk, name):
        system.put(f"done: group {name!r} is forgotten")
        return OK
    try:
        lock = disk.lock(LOCK_PATH)
    except BlockingIOError as error:
        raise LogBusy(error.strerror) from None
    try:
        identity = read_identity(disk, f"{DIRECTORY}/{IDENTITY}")
        cursors = {} if identity is None else read_cursors(disk, identity.log_id)
        if identity is None or (name not in cursors and read_file(disk, quarantine_path(name)) is None):
            known = ", ".join(sorted(cursors)) or "none"
            raise UsageError(
                f"{name!r}: there is no such sink or group: name an existing one (sinks: {known})"
            )
        quarantine = describe_quarantine(disk, identity, name)
        cursors.pop(name, None)
        write_cursors(disk, identity.log_id, cursors)
        remove_stored(disk, name)
        forget_requests(disk, name)
    finally:
        lock.release()
    system.put(f"done: sink {name!r} is forgotten; its quarantine {quarantine}")
    return OK


# --- requests for a sink


def control_sink(options: Namespace) -> int:
    """Request that a sink pauses, resumes, continues from another position, or is rebuilt from the log.

    Raises UsageError, RequestRefused, LogCorrupted, OSError.
    """
    data, name, verb = options.data, options.name, options.sinks_verb
    cursor = _find_cursor(data, name)
    subject, offsets, success = f"{verb} of sink {name!r}", tuple[int, ...](), None
    if verb == "rebuild":
        success = f"{subject} is requested; `delta-prop sinks --http HOST:PORT` shows its progress"
    if verb == "reset":
        if cursor.own:
            raise UsageError(
                f"sink {name!r}: it stores its cursor with its data, which a reset would not change: if it "
                f"can be rebuilt, run `delta-prop sinks rebuild {quote(name)} --data {quote(data)}`, else "
                "give it new data and a new name"
            )
        with open_readonly_log(data) as (_, log, _):
            offsets = (offset_to_reset_to(options.to, log, system.wall_us()),)
        subject += f" to offset {offsets[0]}"
    submit_request(data, verb, name, offsets, subject, success=success)
    return OK


def _find_cursor(data: str, name: str) -> SavedCursor:
    disk, log = open_directory(data)
    cursors = read_cursors(disk, log.log_id)
    if name in cursors:
        return cursors[name]
    if name in read_groups(disk, log.log_id):
        raise UsageError(f"{name!r} is a group, not a sink: move it with `groups reset {name} --to POSITION`")
    known = ", ".join(sorted(cursors)) or "none"
    raise UsageError(f"sink {name!r}: there is no such sink: name an existing one ({known})")
