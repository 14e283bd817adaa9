"""`jobs`: parts that are kept aside for a decision, and what was decided; `jobs abort` drops them.

A server is asked by its HTTP port for all, and over 0xD3 for one; a directory is read beside its server, and
decided of without one.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from delta_prop.client.jobs import decide
from delta_prop.commands import edge
from delta_prop.commands.look import shown
from delta_prop.commands.opened import open_disk
from delta_prop.commands.top import web_of
from delta_prop.commands.waiting import NO_PORT, Waiting
from delta_prop.server.job_files import JobFiles, job_told, stem_of
from delta_prop.server.job_rules import decided_before, none_here
from delta_prop.server.part_file import path_of
from delta_prop_broker.log.damage import LogBusy
from delta_prop_broker.log.files.names import LOCK_PATH
from delta_prop_wire.frames import Decision, JobState, JobStatus, RefusedRow
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop.commands.connecting import Link
    from delta_prop_broker.disk import Disk

OK, FAILED = 0, 1
_HEADS = ("job", "state", "deltas", "published", "duplicates", "refused", "bytes", "token")


async def list_of_server(link: Link, *, as_json: bool) -> int:
    """All jobs of a server, by its HTTP port. Raises UsageError, NotTold."""
    async with web_of(link) as web:
        told: list[dict[str, Any]] = await web.get("/api/jobs")
    return _listed(told, as_json=as_json)


def list_of_directory(data: str, *, as_json: bool) -> int:
    """All jobs of a directory; exit status 1 where a decision is damaged. Raises UsageError, OSError."""
    found, damaged = _jobs_in(open_disk(data))
    _listed(found, as_json=as_json)
    for one in damaged:
        edge.note(one)
    return FAILED if damaged else OK


def show(place: Link | str, job: str, *, as_json: bool) -> int:
    """One job, of a server over 0xD3 or of a directory. Raises Refused (UNKNOWN_JOB), UsageError, OSError."""
    if isinstance(place, str):
        found = next((one for one in _jobs_in(open_disk(place))[0] if one["job"] == job), None)
        if found is None:
            raise none_here(job)
    else:
        found = _told(job, _decided_by(place, job, Decision.QUERY))
    if as_json:
        edge.put(json.dumps(found))
    else:
        edge.put_all(f"{name:9}  {shown(value)}" for name, value in found.items() if name != "refused_rows")
        edge.put_all(f"{'':9}  {_row(one)}" for one in found["refused_rows"])
    return OK


def abort(place: Link | str, job: str) -> int:
    """Drop a job that is not committed. Raises Refused (UNKNOWN_JOB, JOB_DECIDED), LogBusy where a process
    has the directory, UsageError, OSError.
    """
    if isinstance(place, str):
        _abort_in(open_disk(place), job)
    else:
        _decided_by(place, job, Decision.ABORT)
    edge.confirm(f"aborted: job {job!r}; what was staged of it is gone")
    return OK


def _decided_by(link: Link, job: str, decision: Decision) -> JobStatus:
    """Return a server's answer; meanwhile print why none comes."""
    failures: list[Exception | None] = [None]

    def failed(cause: Exception) -> None:
        failures[0] = cause

    waiting = Waiting(NO_PORT)
    waiting.ask = lambda: failures[0]
    with waiting.told_beside():
        return decide(link.addresses, job, decision, token=link.token, tls=link.tls, failed=failed)


def _abort_in(disk: Disk, job: str) -> None:
    try:
        lock = disk.lock(LOCK_PATH)
    except BlockingIOError as error:
        raise LogBusy(f"{error.strerror}; or ask the server, with --to") from None
    try:
        files = JobFiles(disk)
        decided, damaged = files.read_decided()
        before = next((one for one in decided if one.job == job), None)
        if before is not None:
            raise decided_before(job, before.state)
        staged = files.read_staged(decided, damaged, read_only=True)
        heads = [one.head for one in staged if one.head.job == job]
        if not heads:
            raise none_here(job)
        files.drop(job, [path_of(stem_of(job), one.part, one.attempt) for one in heads])
    finally:
        lock.release()


def _jobs_in(disk: Disk) -> tuple[list[dict[str, Any]], list[str]]:
    files = JobFiles(disk)
    decided, damaged = files.read_decided()
    told = [job_told(one.job, one.owner, one.status(), one.bytes) for one in decided]
    staged: dict[str, dict[str, Any]] = {}
    for found in files.read_staged(decided, damaged, read_only=True):
        head, end = found
        one = staged.setdefault(head.job, job_told(head.job, head.owner, JobStatus(JobState.STAGING), 0))
        one["deltas"] += end.counter
        one["bytes"] += end.position
    return told + list(staged.values()), [str(one) for one in damaged.values()]


def _told(job: str, status: JobStatus) -> dict[str, Any]:
    told = job_told(job, "", status, 0)
    return {name: value for name, value in told.items() if name not in ("token", "bytes")}


def _row(told: dict[str, Any]) -> RefusedRow:
    return RefusedRow(**told | {"code": ErrorCode[told["code"]]})


def _listed(found: Sequence[dict[str, Any]], *, as_json: bool) -> int:
    if as_json:
        edge.put_all(map(json.dumps, found))
        return OK
    edge.put(_line(dict(zip(_HEADS, _HEADS, strict=True))))
    edge.put_all(_line(one) for one in found)
    return OK


def _line(one: dict[str, Any]) -> str:
    numbers = "  ".join(f"{_number(one[name]):>11}" for name in _HEADS[2:7])
    return f"{one['job']:24}  {one['state']:9}  {numbers}  {one['token']}".rstrip()


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
