"""Sends a command's request to the service: leaves it beside the log, and waits briefly for its outcome.

The process that has the directory open carries it out; if there is none, the next one does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.delivery.operator_requests import (
    OperatorRequest,
    Verb,
    put_request,
    read_requests,
    take_refusal,
)
from delta_prop.platform import system
from delta_prop_broker.disk import Disk
from delta_prop_broker.segments.paths import LOCK_PATH
from delta_prop_wire.errors import DeltaPropError

if TYPE_CHECKING:
    from delta_prop.directory.stored_partitions import StoredPartition

WAIT_S = 10.0
"""Maximum seconds to wait until the process that has the directory open has carried a request out."""
_POLL_S = 0.05


class RequestRefused(DeltaPropError):
    """The service refused an operator's request; the message gives the reason."""


def read_pending_requests(root: Disk, log_id: bytes) -> list[OperatorRequest]:
    """Return the requests for a log that are not carried out yet, oldest first. Raises OSError.

    `root`: the data directory.
    """
    requests = read_requests(root).values()
    return [request for request in requests if request is not None and request.log_id == log_id.hex()]


def submit_request(
    partition: StoredPartition,
    verb: Verb,
    sink: str,
    offsets: tuple[int, ...],
    *,
    subject: str,
    success: str | None = None,
) -> None:
    """Leave a request for a partition, wait until it is carried out, and report its outcome.

    `subject` names the request in reports; `success`, if given, takes its place in the report of success.

    Raises UsageError if too many requests wait, RequestRefused if the service refuses it, OSError.
    """
    data, disk = partition.data, partition.root
    log_id = partition.read_identity().log_id.hex()
    request = OperatorRequest(verb, sink, log_id, offsets, partition.stream, partition.partition)
    path = put_request(disk, request, system.wall_us())
    writer = system.find_lock_holder(data, LOCK_PATH)
    if writer is None:
        system.confirm(f"recorded: {subject}; the next service that opens {data!r} does it")
        return
    deadline = system.now() + WAIT_S
    while path in read_requests(disk):
        if system.now() > deadline:
            system.confirm(
                f"recorded: {subject}; process {writer} has not done it within {WAIT_S:g} s; it will do it "
                "when the sink is attached and not stopped"
            )
            return
        system.pause(_POLL_S)
    refusal = take_refusal(disk, path)
    if refusal is not None:
        raise RequestRefused(f"{subject} was not done: {refusal}")
    system.confirm(f"done: {success or subject}")
