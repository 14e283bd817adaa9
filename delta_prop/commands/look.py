"""`status`, `sinks`: the log's state, and who reads it. `sinks forget` alone writes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from delta_prop.commands import edge
from delta_prop.commands.asking import waiting_requests
from delta_prop.commands.opened import open_disk, opened_log, snapshot_told
from delta_prop.commands.quarantine import quarantined
from delta_prop.commands.screen import shown_lag
from delta_prop.cursors import cursors_damage, read_cursors, write_cursors
from delta_prop.dates import shown_time
from delta_prop.group_places import forget_group, read_groups
from delta_prop.operator_requests import forget_requests
from delta_prop.quarantine_file import path_of, remove_kept
from delta_prop.server.job_files import JobFiles
from delta_prop.server.lags import lags_of
from delta_prop_broker.log.damage import LogBusy, LogDamaged
from delta_prop_broker.log.files.identity import read_identity, read_small
from delta_prop_broker.log.files.names import DIRECTORY, IDENTITY, LOCK_PATH
from delta_prop_broker.log.files.times import read_times
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.log.parts.recovered import RecoveryReport

OK, FAILED = 0, 1


# --- status


def status(data: str, *, as_json: bool) -> int:
    """The log's state; exit status 1 where damage is seen; frames are read by `log verify`.

    Raises UsageError, FormatUnknown, OSError.
    """
    disk = open_disk(data)
    writer = edge.lock_holder(data, LOCK_PATH)
    told: dict[str, Any] = {"data": data, "health": "sound", "writer": writer}
    try:
        with opened_log(data) as (_, log, report):
            told |= _status_of(disk, log, report)
    except LogDamaged as damage:
        told |= {"health": "damaged", "damage": str(damage)}
    if as_json:
        edge.put(json.dumps(told))
    else:
        lags = dict(flat({"lags": told.pop("lags", {})}))
        lines = told | lags if "log_id" in told else told
        edge.put_all(f"{name:13}  {shown(value)}" for name, value in lines.items())
    return OK if told["health"] == "sound" else FAILED


def _status_of(disk: Disk, log: DurableLog, report: RecoveryReport) -> dict[str, Any]:
    """Describe a log that opens. Raises LogDamaged, OSError."""
    told: dict[str, Any] = {"log_id": log.log_id.hex(), "epoch": log.epoch, "closed": report.clean}
    told |= {"first_offset": log.first_offset, "next_offset": log.visible}
    told |= {"segments": report.segments, "bytes": report.bytes, "bytes_free": disk.free_bytes()}
    told["bytes_room"] = max(told["bytes_free"] - log.settings.free_bytes_min, 0)  # of the defaults
    known = all_sinks(disk, log)
    told |= {"sinks": len(known), "snapshot": None}
    told["lags"] = lags_of(known, "name")
    damaged = [one["damage"] for one in known if "damage" in one]
    damaged += _damage_of_cursors(disk)
    told |= {"health": "damaged", "damage": "; ".join(damaged)} if damaged else {}
    try:
        told["snapshot"] = snapshot_told(log)
    except LogDamaged as damage:
        told |= {"health": "damaged", "damage": str(damage)}
    counts = quarantined(disk, log.log_id, log.epoch_end)
    told["quarantined"] = {name: len(held) for name, held in counts.items() if len(held)}
    told["jobs"] = JobFiles(disk).count()
    jump = read_times(disk, DIRECTORY, report.notes).jump
    told["clock_jump"] = jump and {name[:-3]: shown_time(us) for name, us in jump._asdict().items()}
    return told


def flat(told: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """One value a name, `log.next_offset`; of lists how many there are."""
    for name, value in told.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{above}{name}.")
        else:
            yield above + name, len(value) if isinstance(value, list) else value


def shown(value: object) -> str:
    if value is None or value == {}:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(count)}" for name, count in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


# --- sinks


def sinks(data: str, *, as_json: bool) -> int:
    """Everybody whose place is kept beside the log; exit status 1 where some places are damaged.

    Raises UsageError, LogDamaged, OSError.
    """
    with opened_log(data) as (disk, log, _):
        found, damaged = all_sinks(disk, log), _damage_of_cursors(disk)
    _put_sinks(found, as_json=as_json)
    for damage in damaged:
        edge.note(damage)
    return FAILED if damaged or any("damage" in one for one in found) else OK


def _damage_of_cursors(disk: Disk) -> list[str]:
    """Describe the damage of the cursors' file with its cure, if there is one."""
    damage = cursors_damage(disk)
    cure = "put a copy of the file from a backup in its place, or remove it, and sinks are remembered anew"
    return [] if damage is None else [f"{damage.description}: {cure}"]


def _put_sinks(found: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        edge.put_all(map(json.dumps, found))
        return
    edge.put(
        f"{'name':24}  {'kind':6}  {'offset':>12}  {'lag':>12}  {'lag time':>8}  {'quarantined':>11}  "
        "log kept  notes"
    )
    for one in found:
        needed = "yes" if one["required"] else "no"
        offset, lag = ("?" if at is None else f"{at:,}" for at in (one["offset"], one["lag"]))
        numbers = f"{offset:>12}  {lag:>12}  {shown_lag(one['lag_s']):>8}  {one.get('quarantined', 0):>11,}"
        asked = [f"{verb} asked for" for verb in one.get("asked", ())]
        states = [state for state in ("rebuilding", "paused") if one.get(state)]
        notes = ", ".join(states + asked + ([one["damage"]] if "damage" in one else []))
        edge.put(f"{one['name']:24}  {one['kind']:6}  {numbers}  {needed:8}  {notes}".rstrip())


def all_sinks(disk: Disk, log: DurableLog) -> list[dict[str, Any]]:
    """Everybody whose place is kept beside the log, and how far behind each is. Raises OSError."""
    held, requests = quarantined(disk, log.log_id, log.epoch_end), waiting_requests(disk, log.log_id)
    found: list[dict[str, Any]] = []
    for name, cursor in sorted(read_cursors(disk, log.log_id).items()):
        at = cursor.dealt_with
        found.append({"name": name, "kind": "sink", "offset": at, "required": cursor.required})
        found[-1] |= {
            "rebuilding": cursor.rebuilding,
            "paused": cursor.paused,
            "quarantined": len(held.get(name, ())),
        }
        asked = [one.verb for one in requests if one.sink == name]
        asked += ["rebuild"] if cursor.rebuild_asked else []
        found[-1] |= {"asked": list(dict.fromkeys(asked))} if asked else {}
    for name, place in read_groups(disk, log.log_id).items():
        found.append({"name": name, "kind": "group", "offset": None, "required": False})
        found[-1] |= {"damage": str(place)} if isinstance(place, UsageError) else {"offset": place}
    return [one | _lag(log, one["offset"]) for one in found]


def _lag(log: DurableLog, offset: int | None) -> dict[str, Any]:
    """Return a lag: how many deltas, and how old the oldest of them is, by the clock of this machine."""
    if offset is None:
        return {"lag": None, "lag_s": None}
    if offset >= log.visible:
        return {"lag": 0, "lag_s": 0.0}
    time = log.append_time(offset)
    age_s = None if time is None else round(max(edge.wall_us() - time, 0) / 1e6, 3)
    return {"lag": log.visible - offset, "lag_s": age_s}


def forget(data: str, name: str) -> int:
    """Remember nothing of a sink, or of a group: its cursor, its quarantine, what the log keeps for it.

    Raises UsageError, LogBusy where a process has the directory, OSError.
    """
    disk = open_disk(data)
    if forget_group(disk, name):
        return OK
    try:
        lock = disk.lock(LOCK_PATH)
    except BlockingIOError as error:
        raise LogBusy(error.strerror) from None
    try:
        identity = read_identity(disk, f"{DIRECTORY}/{IDENTITY}")
        cursors = {} if identity is None else read_cursors(disk, identity.log_id)
        if identity is None or (name not in cursors and read_small(disk, path_of(name)) is None):
            known = ", ".join(sorted(cursors)) or "none"
            raise UsageError(f"no sink or group named {name!r} is remembered; sinks that are: {known}")
        cursors.pop(name, None)
        write_cursors(disk, identity.log_id, cursors)
        remove_kept(disk, name)
        forget_requests(disk, name)
    finally:
        lock.release()
    return OK
