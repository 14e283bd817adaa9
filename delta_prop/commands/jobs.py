"""`jobs`: lists the jobs that are staged or decided; `jobs abort` drops a staged one.

A server lists all jobs on its HTTP port, and shows or aborts a job over its protocol, 0xD3. A directory can
be listed while it is served; an abort in a directory requires that no server has it open.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from delta_prop.client.jobs import decide
from delta_prop.commands.status import format_value
from delta_prop.commands.top import open_http_client
from delta_prop.commands.wait_reporter import NO_PORT, WaitReporter
from delta_prop.directory.readonly_log import open_disk
from delta_prop.platform import system
from delta_prop.server.job_files import JobFiles, job_to_json, stem_of
from delta_prop.server.job_rules import already_decided, unknown_job
from delta_prop.server.part_file import path_of
from delta_prop_broker.corruption import LogBusy
from delta_prop_broker.segments.paths import LOCK_PATH
from delta_prop_wire.frames import Decision, JobState, JobStatus, RefusedRow
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop.commands.connect_options import ConnectOptions
    from delta_prop_broker.disk import Disk

OK, FAILED = 0, 1
_COLUMNS = ("job", "state", "deltas", "published", "duplicates", "refused", "bytes", "token")


async def list_server_jobs(connect_options: ConnectOptions, *, as_json: bool) -> int:
    """Print all jobs of a server, by its HTTP port. Raises UsageError, NoAnswer."""
    async with open_http_client(connect_options) as http_client:
        jobs: list[dict[str, Any]] = await http_client.get("/api/jobs")
    return _print_jobs(jobs, as_json=as_json)


def list_directory_jobs(data: str, *, as_json: bool) -> int:
    """Print all jobs of a directory; return exit status 1 if a decision is corrupted.

    Raises UsageError, OSError.
    """
    jobs, faults = _read_jobs(open_disk(data))
    _print_jobs(jobs, as_json=as_json)
    for fault in faults:
        system.note(fault)
    return FAILED if faults else OK


def show(source: ConnectOptions | str, job: str, *, as_json: bool) -> int:
    """Print one job, of a server over 0xD3 or of a directory.

    Raises Refused (UNKNOWN_JOB), UsageError, OSError.
    """
    if isinstance(source, str):
        jobs, _ = _read_jobs(open_disk(source))
        fields = next((fields for fields in jobs if fields["job"] == job), None)
        if fields is None:
            raise unknown_job(job)
    else:
        fields = _to_json(job, _ask_server(source, job, Decision.QUERY))
    if as_json:
        system.put(json.dumps(fields))
    else:
        system.put_all(
            f"{name:9}  {format_value(value)}" for name, value in fields.items() if name != "refused_rows"
        )
        system.put_all(f"{'':9}  {_refused_row_of(row)}" for row in fields["refused_rows"])
    return OK


def abort(source: ConnectOptions | str, job: str) -> int:
    """Drop a job that is not committed.

    Raises Refused (UNKNOWN_JOB, JOB_DECIDED), LogBusy while a process has the directory, UsageError, OSError.
    """
    if isinstance(source, str):
        _abort_in_directory(open_disk(source), job)
    else:
        _ask_server(source, job, Decision.ABORT)
    system.confirm(f"aborted: job {job!r}; its staged parts are removed")
    return OK


def _ask_server(connect_options: ConnectOptions, job: str, decision: Decision) -> JobStatus:
    """Send a server a query or a decision about a job, and return its answer; report a wait and its cause."""
    last_failure: Exception | None = None

    def note_failure(cause: Exception) -> None:
        nonlocal last_failure
        last_failure = cause

    wait_reporter = WaitReporter(NO_PORT)
    wait_reporter.get_cause = lambda: last_failure
    with wait_reporter.report_in_thread():
        return decide(
            connect_options.addresses,
            job,
            decision,
            token=connect_options.token,
            tls=connect_options.tls,
            failed=note_failure,
        )


def _abort_in_directory(disk: Disk, job: str) -> None:
    try:
        lock = disk.lock(LOCK_PATH)
    except BlockingIOError as error:
        raise LogBusy(f"{error.strerror}; or ask the server, with --to") from None
    try:
        files = JobFiles(disk)
        decided, corrupted = files.read_decisions()
        decision = next((decision for decision in decided if decision.job == job), None)
        if decision is not None:
            raise already_decided(job, decision.state)
        staged = files.read_staged(decided, corrupted, read_only=True)
        heads = [part.head for part in staged if part.head.job == job]
        if not heads:
            raise unknown_job(job)
        files.drop(job, [path_of(stem_of(job), head.part, head.attempt) for head in heads])
    finally:
        lock.release()


def _read_jobs(disk: Disk) -> tuple[list[dict[str, Any]], list[str]]:
    files = JobFiles(disk)
    decided, corrupted = files.read_decisions()
    jobs = [job_to_json(job.job, job.owner, job.status(), job.bytes) for job in decided]
    staged: dict[str, dict[str, Any]] = {}
    for head, end in files.read_staged(decided, corrupted, read_only=True):
        fields = staged.setdefault(
            head.job, job_to_json(head.job, head.owner, JobStatus(JobState.STAGING), 0)
        )
        fields["deltas"] += end.counter
        fields["bytes"] += end.byte_offset
    return jobs + list(staged.values()), [str(fault) for fault in corrupted.values()]


def _to_json(job: str, status: JobStatus) -> dict[str, Any]:
    fields = job_to_json(job, "", status, 0)
    return {name: value for name, value in fields.items() if name not in ("token", "bytes")}


def _refused_row_of(row: dict[str, Any]) -> RefusedRow:
    return RefusedRow(**row | {"code": ErrorCode[row["code"]]})


def _print_jobs(jobs: Sequence[dict[str, Any]], *, as_json: bool) -> int:
    if as_json:
        system.put_all(map(json.dumps, jobs))
        return OK
    system.put(_format_line(dict(zip(_COLUMNS, _COLUMNS, strict=True))))
    system.put_all(_format_line(job) for job in jobs)
    return OK


def _format_line(job: dict[str, Any]) -> str:
    numbers = "  ".join(f"{_format_number(job[name]):>11}" for name in _COLUMNS[2:7])
    return f"{job['job']:24}  {job['state']:9}  {numbers}  {job['token']}".rstrip()


def _format_number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
