"""Checks that a service can be reached with the given options, and queries it.

The driver checks before a task starts, and each task checks what its own machine has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from delta_prop.client.addresses import Address
from delta_prop.client.partition_choice import DEFAULT_STREAM
from delta_prop.platform.ports import Tls
from delta_prop.spark import system
from delta_prop.spark.options import TLS_FILES, Remote
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.stamp import DEFAULT_LOG, LogName

if TYPE_CHECKING:
    from delta_prop.client.jobs import JobStatus
    from delta_prop.client.ranges import RangeReader

OPTION_NAMES = {option: f"option {option}" for option in ("url", *TLS_FILES)}


def check_on_driver(remote: Remote, names: Mapping[str, str] = OPTION_NAMES) -> None:
    """Raise UsageError if no address has a known host, or a TLS file is not valid.

    `names`: per option, the name under which the user knows it.
    """
    hosts = [Address.parse(one).host for one in remote.addresses]
    faults = [system.find_host_fault(host) for host in hosts]
    if all(fault is not None for fault in faults):
        raise UsageError(
            f"{names['url']} {','.join(remote.addresses)!r:.80}: host {hosts[0]!r:.60} is unknown here "
            f"({faults[0]}): correct its name, or give its IP address"
        )
    if remote.tls is None:
        return
    for option, path, fault in _file_faults(remote.tls):
        raise UsageError(
            f"{names[option]} {path!r:.300}: {fault}: name a file that exists on the driver and, under the "
            "same name, on every worker"
        )
    from delta_prop.platform.tls_contexts import client_context

    try:
        client_context(remote.tls)
    except UsageError as error:
        given = ", ".join(names[option] for option in _tls_files(remote.tls))
        raise UsageError(f"{given}: {error}") from None


def check_publishes(remote: Remote, log: LogName = DEFAULT_LOG, *, stages: bool = False) -> None:
    """Check that a partition accepts deltas, or (`stages`) a job. Raises UsageError, Refused, Unreachable."""
    range_reader_of(remote, log).check_can_publish(staging=stages)


def query_job(remote: Remote, job: str, stream: str = DEFAULT_STREAM) -> JobStatus | None:
    """Return a job's status in a stream, None for an unknown job. Raises Refused, Unreachable, UsageError."""
    from delta_prop.spark.job_statuses import join_statuses
    from delta_prop.spark.served_streams import find_served_stream

    found = find_served_stream(remote, stream)
    statuses = {number: _query_part(remote, job, found.log_name(number)) for number in found.choose(None)}
    known = {number: status for number, status in statuses.items() if status is not None}
    return join_statuses(known) if known else None


def _query_part(remote: Remote, job: str, log: LogName) -> JobStatus | None:
    from delta_prop.client.jobs import Decision, decide

    try:
        return decide(
            remote.addresses,
            job,
            Decision.QUERY,
            stream=log.stream,
            partition=log.partition,
            token=remote.token,
            tls=remote.tls,
        )
    except Refused as refused:
        if refused.code is not ErrorCode.UNKNOWN_JOB:
            raise
        return None


def range_reader_of(remote: Remote, log: LogName = DEFAULT_LOG) -> RangeReader:
    """Return a range reader of a partition; tasks call this, too. Raises UsageError."""
    from delta_prop.spark.served_streams import partition_reader

    check_on_worker(remote)
    return partition_reader(remote, log)


def check_on_worker(remote: Remote) -> None:
    """Raise UsageError if a TLS file is missing on this worker that the driver has."""
    if remote.tls is None:
        return
    for option, path, fault in _file_faults(remote.tls):
        raise UsageError(
            f"{OPTION_NAMES[option]} {path!r:.300}: {fault} on the worker {system.HOST}, while the driver "
            "has it: put it on every worker under the same name"
        )


def _tls_files(tls: Tls) -> dict[str, str]:
    paths = zip(TLS_FILES, (tls.authorities, tls.certificate, tls.key), strict=True)
    return {option: path for option, path in paths if path is not None}


def _file_faults(tls: Tls) -> Iterator[tuple[str, str, str]]:
    for option, path in _tls_files(tls).items():
        fault = system.find_file_fault(path)
        if fault is not None:
            yield option, path, fault
