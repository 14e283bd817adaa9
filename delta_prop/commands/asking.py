"""How a command asks for something: it leaves a request beside the log, and waits a while for its end.

The process that has the directory open carries it out; where there is none, the next one does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.commands import edge
from delta_prop.commands.opened import open_disk
from delta_prop.operator_requests import OperatorRequest, put_request, read_requests, take_refusal
from delta_prop_broker.log.files.identity import read_identity
from delta_prop_broker.log.files.names import DIRECTORY, IDENTITY, LOCK_PATH
from delta_prop_wire.errors import DeltaPropError, UsageError

if TYPE_CHECKING:
    from delta_prop.operator_requests import Verb
    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.files.identity import Identity

WAIT_S = 10.0
"""How long a command waits for the process that has the directory."""
_LOOK_S = 0.05


class NotDone(DeltaPropError):
    """The service refused what an operator asked for; the message says why."""


def open_directory(data: str) -> tuple[Disk, Identity]:
    """The disk of a data directory, and who its log is. Raises UsageError, LogDamaged, OSError."""
    disk = open_disk(data)
    identity = read_identity(disk, f"{DIRECTORY}/{IDENTITY}")
    if identity is None:
        raise UsageError(f"{data!r} holds no log yet: publish something, or name another directory")
    return disk, identity


def waiting_requests(disk: Disk, log_id: bytes) -> list[OperatorRequest]:
    """What was asked for and is not done yet, the oldest first. Raises OSError."""
    return [one for one in read_requests(disk).values() if one is not None and one.log_id == log_id.hex()]


def ask(
    data: str, verb: Verb, sink: str, offsets: tuple[int, ...], what: str, *, done: str | None = None
) -> None:
    """Leave a request, wait for it, tell what became of it; `what` names it for people, `done` its end.

    Raises UsageError where too many wait, NotDone where the service refuses it, OSError.
    """
    disk, identity = open_directory(data)
    path = put_request(disk, OperatorRequest(verb, sink, identity.log_id.hex(), offsets), edge.wall_us())
    writer = edge.lock_holder(data, LOCK_PATH)
    if writer is None:
        edge.confirm(f"recorded: {what}; it is done when a service next opens {data!r}")
        return
    until = edge.now() + WAIT_S
    while path in read_requests(disk):
        if edge.now() > until:
            edge.confirm(
                f"recorded: {what}; process {writer} has not done it within {WAIT_S:g} s (is the sink "
                "attached, does it stand?) and does it when it can"
            )
            return
        edge.pause(_LOOK_S)
    refusal = take_refusal(disk, path)
    if refusal is not None:
        raise NotDone(f"{what} was not done: {refusal}")
    edge.confirm(f"done: {done or what}")
