"""Whether a service can be reached as the options say, and how it is asked.

Looked at on the driver before a task starts, and by each task for what its own machine has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.client.addresses import Address
from delta_prop.spark import edge
from delta_prop.spark.options import TLS_FILES
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from delta_prop.client.jobs import JobStatus
    from delta_prop.client.ranges import Asker
    from delta_prop.ports import Tls
    from delta_prop.spark.options import Remote

NAMES = {option: f"option {option}" for option in ("url", *TLS_FILES)}


def check_on_driver(remote: Remote, names: Mapping[str, str] = NAMES) -> None:
    """Raise UsageError where no address has a known host, or a file of TLS is not what it should be.

    `names`: what users call the options.
    """
    hosts = [Address.parse(one).host for one in remote.addresses]
    faults = [edge.host_fault(host) for host in hosts]
    if all(fault is not None for fault in faults):
        raise UsageError(
            f"{names['url']} {','.join(remote.addresses)!r:.80}: no host {hosts[0]!r:.60} is known here "
            f"({faults[0]}): correct its name, or give its number"
        )
    if remote.tls is None:
        return
    for option, path, fault in _file_faults(remote.tls):
        raise UsageError(
            f"{names[option]} {path!r:.300}: {fault}: name a file that is there on the driver and, under the "
            "same name, on every worker"
        )
    from delta_prop.tls_contexts import client_context

    try:
        client_context(remote.tls)
    except UsageError as error:
        given = ", ".join(names[option] for option in _given(remote.tls))
        raise UsageError(f"{given}: {error}") from None


def check_publishes(remote: Remote, *, stages: bool = False) -> None:
    """Raise what keeps a service from taking deltas, or a job that is staged, at once: UsageError, Refused,
    Unreachable.
    """
    asker_of(remote).check_publishes(stages=stages)


def job_of(remote: Remote, job: str) -> JobStatus | None:
    """What a service says of a job; None: it knows of none. Raises Refused, Unreachable, UsageError."""
    from delta_prop.client.jobs import Decision, decide

    try:
        return decide(remote.addresses, job, Decision.QUERY, token=remote.token, tls=remote.tls)
    except Refused as refused:
        if refused.code is not ErrorCode.UNKNOWN_JOB:
            raise
        return None


def asker_of(remote: Remote) -> Asker:
    """Who asks a service, in a task too. Raises UsageError."""
    from delta_prop.client.ranges import Asker

    check_on_worker(remote)
    return Asker(remote.addresses, token=remote.token, tls=remote.tls, settings=remote.settings)


def check_on_worker(remote: Remote) -> None:
    """Raise UsageError where a file of TLS is missing that the driver has."""
    if remote.tls is None:
        return
    for option, path, fault in _file_faults(remote.tls):
        raise UsageError(
            f"{NAMES[option]} {path!r:.300}: {fault} on the worker {edge.HOST}, while the driver has it: put "
            "it on every worker under the same name"
        )


def _given(tls: Tls) -> dict[str, str]:
    """Options that name files, and the files."""
    paths = zip(TLS_FILES, (tls.authorities, tls.certificate, tls.key), strict=True)
    return {option: path for option, path in paths if path is not None}


def _file_faults(tls: Tls) -> Iterator[tuple[str, str, str]]:
    for option, path in _given(tls).items():
        fault = edge.file_fault(path)
        if fault is not None:
            yield option, path, fault
