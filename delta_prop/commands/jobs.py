"""`jobs`: lists the jobs that are staged or decided; `jobs abort` drops a staged one.

A server lists all jobs on its HTTP port, and shows or aborts a job over its protocol, 0xD3. A directory can
be listed while it is served; an abort in a directory requires that no server has it open.
"""

from __future__ import annotations

import json
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from delta_prop.client.jobs import decide
from delta_prop.commands.connect_options import ConnectOptions, source_of
from delta_prop.commands.status import format_value
from delta_prop.commands.tables import Table, are_of_several, name_of
from delta_prop.commands.top import fetch_rows
from delta_prop.commands.wait_reporter import NO_PORT, WaitReporter
from delta_prop.directory.stored_partitions import (
    StoredPartition,
    find_partition,
    have_column,
    list_partitions,
)
from delta_prop.platform import system
from delta_prop.server.job_files import JobFiles, job_to_json, stem_of
from delta_prop.server.job_rules import already_decided, unknown_job
from delta_prop.server.part_file import path_of
from delta_prop_broker.corruption import LogBusy
from delta_prop_broker.segments.paths import LOCK_PATH
from delta_prop_wire.frames import Decision, JobState, JobStatus, RefusedRow
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from argparse import Namespace

OK, FAILED = 0, 1
_COLUMNS = ("job", "state", "deltas", "published", "duplicates", "refused", "bytes", "token")


def list_jobs(options: Namespace) -> int | Coroutine[Any, Any, int]:
    """Print all jobs of a directory or a server; return exit status 1 if a decision is corrupted.

    Raises UsageError, OSError.
    """
    if options.data is None:
        return _list_server_jobs(options)
    partitions = list_partitions(options.data, options.stream, options.partition)
    found = [_read_jobs(partition) for partition in partitions]
    jobs, faults = [job for jobs, _ in found for job in jobs], [fault for _, each in found for fault in each]
    _print_jobs(jobs, Table(has_partitions=have_column(partitions)), as_json=options.json)
    for fault in faults:
        system.note(fault)
    return FAILED if faults else OK


async def _list_server_jobs(options: Namespace) -> int:
    jobs = await fetch_rows(options, "/api/jobs")
    _print_jobs(jobs, Table(has_partitions=are_of_several(jobs)), as_json=options.json)
    return OK


def show(options: Namespace) -> int:
    """Print one job, of a server over 0xD3 or of a directory.

    Raises Refused (UNKNOWN_JOB), UsageError, OSError.
    """
    source, job = source_of(options), options.job
    if isinstance(source, str):
        partition = find_partition(source, name_of(options))
        jobs, _ = _read_jobs(partition)
        fields = next((fields for fields in jobs if fields["job"] == job), None)
        if fields is None:
            raise unknown_job(job)
    else:
        fields = job_to_json(job, "", _ask_server(source, options, Decision.QUERY), 0)
        fields = {name: value for name, value in fields.items() if name not in ("token", "bytes")}
    if options.json:
        system.put(json.dumps(fields))
    else:
        system.put_all(
            f"{name:9}  {format_value(value)}" for name, value in fields.items() if name != "refused_rows"
        )
        for row in fields["refused_rows"]:
            system.put(f"{'':9}  {RefusedRow(**row | {'code': ErrorCode[row['code']]})}")
    return OK


def abort(options: Namespace) -> int:
    """Drop a job that is not committed.

    Raises Refused (UNKNOWN_JOB, JOB_DECIDED), LogBusy while a process has the directory, UsageError, OSError.
    """
    source, job = source_of(options), options.job
    if isinstance(source, str):
        _abort_in_directory(find_partition(source, name_of(options)), job)
    else:
        _ask_server(source, options, Decision.ABORT)
    system.confirm(f"aborted: job {job!r}; its staged parts are removed")
    return OK


def _ask_server(connect_options: ConnectOptions, options: Namespace, decision: Decision) -> JobStatus:
    """Send a server a query or a decision about a job, and return its answer; report a wait and its cause."""
    last_failure: Exception | None = None

    def note_failure(cause: Exception) -> None:
        nonlocal last_failure
        last_failure = cause

    wait_reporter = WaitReporter(NO_PORT)
    wait_reporter.get_cause = lambda: last_failure
    with wait_reporter.report_in_thread():
        addresses, token, tls = connect_options
        return decide(
            addresses,
            options.job,
            decision,
            stream=options.stream,
            partition=options.partition,
            token=token,
            tls=tls,
            failed=note_failure,
        )


def _abort_in_directory(partition: StoredPartition, job: str) -> None:
    try:
        lock = partition.root.lock(LOCK_PATH)
    except BlockingIOError as error:
        raise LogBusy(f"{error.strerror}; or ask the server, with --to") from None
    try:
        files = JobFiles(partition.disk)
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


def _read_jobs(partition: StoredPartition) -> tuple[list[dict[str, Any]], list[str]]:
    files = JobFiles(partition.disk)
    decided, corrupted = files.read_decisions()
    jobs = [job_to_json(job.job, job.owner, job.status(), job.bytes) for job in decided]
    staged: dict[str, dict[str, Any]] = {}
    for head, end in files.read_staged(decided, corrupted, read_only=True):
        fields = staged.setdefault(
            head.job, job_to_json(head.job, head.owner, JobStatus(JobState.STAGING), 0)
        )
        fields["deltas"] += end.counter
        fields["bytes"] += end.byte_offset
    found = [job | partition.fields for job in (*jobs, *staged.values())]
    return found, [str(fault) for fault in corrupted.values()]


def _print_jobs(jobs: Sequence[Mapping[str, Any]], table: Table, *, as_json: bool) -> None:
    if as_json:
        system.put_all(map(json.dumps, jobs))
        return
    table.put_head(_format_line(dict(zip(_COLUMNS, _COLUMNS, strict=True))))
    for job in jobs:
        table.put(job, _format_line(job))


def _format_line(job: Mapping[str, Any]) -> str:
    numbers = "  ".join(f"{format_value(job[name]):>11}" for name in _COLUMNS[2:7])
    return f"{job['job']:24}  {job['state']:9}  {numbers}  {job['token']}".rstrip()


VERBS = {"list": list_jobs, "show": show, "abort": abort}
