"""What operators ask of a service through its data directory: a file a request, beside the log.

A request is durable when the command that makes it ends. The process that has the directory looks for
requests once a second, the next one at its start; each file goes when what it asks for is done, so a
request may be carried out twice, never not at all. All of them say how things
should be, so twice is as good as once.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from delta_prop_broker.log.files.identity import read_small, replace_file
from delta_prop_wire.crc import crc32c
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk

DIRECTORY = "requests"
COUNT_MAX = 1000
"""Requests that may wait in one directory."""
OFFSETS_MAX = 10_000
"""Offsets that one request may name."""

Verb: TypeAlias = Literal["replay", "drop", "pause", "resume", "reset", "reset-group", "rebuild"]

_RESETS = ("reset", "reset-group")
_SUFFIX = ".json"
_REFUSED = ".refused"
"""Added to the name of a request that was refused; the file says why, to the command that made it."""


@dataclass(frozen=True, slots=True)
class OperatorRequest:
    """`sink`: its name, or the group's. `offsets`: what to replay or drop, all where none is named; of a
    reset the one to go on from.

    `log_id` says of which log they are, in hexadecimal.
    """

    verb: Verb
    sink: str
    log_id: str
    offsets: tuple[int, ...] = ()

    def names(self, offset: int) -> bool:
        """Whether what was rejected there is to be replayed or dropped."""
        return self.verb in ("replay", "drop") and (not self.offsets or offset in self.offsets)


def put_request(disk: Disk, request: OperatorRequest, at_us: int) -> str:
    """Leave a request; its path. Durable when it returns. Raises UsageError where too many wait, OSError.

    `at_us`, in microseconds since 1970, says which of several comes first.
    """
    if len(request.offsets) > OFFSETS_MAX:
        raise UsageError(f"{len(request.offsets)} offsets: name {OFFSETS_MAX} at most, or give --all")
    disk.make_directory(DIRECTORY)
    disk.sync_directory("")
    there = disk.list(DIRECTORY)
    if len(there) >= COUNT_MAX:
        raise UsageError(
            f"{len(there)} requests wait in {DIRECTORY}/ already (bound {COUNT_MAX}): start the service, "
            "which carries them out, or remove files there"
        )
    while f"{at_us:020}{_SUFFIX}" in there:
        at_us += 1
    path = f"{DIRECTORY}/{at_us:020}{_SUFFIX}"
    body = json.dumps(asdict(request)).encode()
    replace_file(disk, DIRECTORY, path, [b"%08x\n" % crc32c(body), body])
    return path


def read_requests(disk: Disk) -> dict[str, OperatorRequest | None]:
    """What is asked for, by path, the oldest first; None for a file that cannot be understood."""
    paths = [f"{DIRECTORY}/{name}" for name in disk.list(DIRECTORY) if name.endswith(_SUFFIX)]
    return {path: request for path in paths if (request := _read(disk, path)) is not False}


def _read(disk: Disk, path: str) -> OperatorRequest | Literal[False] | None:
    """False: it has gone meanwhile."""
    raw = read_small(disk, path)
    if raw is None:
        return False
    checksum, _, body = raw.partition(b"\n")
    try:
        told = json.loads(body)
        request = OperatorRequest(
            told["verb"], str(told["sink"]), str(told["log_id"]), tuple(map(int, told["offsets"]))
        )
    except (KeyError, TypeError, ValueError):
        return None
    sound = checksum == b"%08x" % crc32c(body) and request.verb in get_args(Verb)
    return request if sound and (request.verb not in _RESETS or len(request.offsets) == 1) else None


def refuse_request(disk: Disk, path: str, why: str) -> None:
    """Say why it is not done, to a command that waits for it, and remove it. Raises OSError."""
    replace_file(disk, DIRECTORY, path + _REFUSED, [why.encode(errors="backslashreplace")])
    remove_request(disk, path)


def take_refusal(disk: Disk, path: str) -> str | None:
    """Return why a request that is gone was refused, once; None where it was not. Raises OSError."""
    raw = read_small(disk, path + _REFUSED)
    if raw is None:
        return None
    remove_request(disk, path + _REFUSED)
    return raw.decode(errors="replace")


def remove_refusals(disk: Disk) -> None:
    """Remove what nobody waits for any more. Raises OSError."""
    for name in disk.list(DIRECTORY):
        if name.endswith(_REFUSED):
            remove_request(disk, f"{DIRECTORY}/{name}")


def remove_request(disk: Disk, path: str) -> None:
    """It is done. Durable when it returns. Raises OSError."""
    try:
        disk.remove(path)
    except FileNotFoundError:
        return
    disk.sync_directory(DIRECTORY)


def forget_requests(disk: Disk, sink: str) -> None:
    """Remove what was asked for a sink that is forgotten. Raises OSError."""
    for path, request in read_requests(disk).items():
        if request is not None and request.sink == sink:
            remove_request(disk, path)
