"""Requests of operators to a service through its data directory: one file per request, at its root.

A request names the partition that it is for; one that names none is for the default partition.

A request is durable when the command that makes it ends. The process that has the directory open polls for
requests once a second; without such a process, the next one reads them at its start. Each file is removed
after its request is carried out, so a request may be carried out twice, but is never lost. All requests are
idempotent.

A `pause` goes from `commands/sinks.py` by `directory/request_client.py` into a file; `OperatorWorker`
takes it and has the `RequestExecutor` of the partition call `SinkManager.pause`, which asks the control of
the feed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

from delta_prop_broker.catalogue.stream import DEFAULT_STREAM
from delta_prop_broker.corruption import LogCorrupted
from delta_prop_broker.disk import Disk
from delta_prop_broker.segments.small_file import (
    Checksum,
    read_checked,
    read_file,
    replace_checked,
    replace_file,
)
from delta_prop_wire.errors import UsageError

DIRECTORY = "requests"
COUNT_MAX = 1000
"""Maximum requests that wait in one directory."""
OFFSETS_MAX = 10_000
"""Maximum offsets that one request names."""

Verb: TypeAlias = Literal["replay", "drop", "pause", "resume", "reset", "reset-group", "rebuild"]

_RESETS = ("reset", "reset-group")
_SUFFIX = ".json"
_REFUSED = ".refused"
"""Suffix of a refused request's file; it holds the reason, for the command that made the request."""


class RequestPlace(NamedTuple):
    """The partition that a request is for: the name of its stream, and its number."""

    stream: str = DEFAULT_STREAM
    partition: int = 0

    def __str__(self) -> str:
        return f"{self.stream}/{self.partition}"


DEFAULT_PLACE = RequestPlace()


@dataclass(frozen=True, slots=True)
class OperatorRequest:
    """A request for one sink. `sink`: its name, or the group's. `offsets`: the deltas to replay or drop, all
    if empty; of a reset, the one offset to continue from.

    `log_id`: id of the log that the offsets belong to, in hexadecimal; it tells the partition of a stream
    from that of a later one with the same name.
    """

    verb: Verb
    sink: str
    log_id: str
    offsets: tuple[int, ...] = ()
    stream: str = DEFAULT_STREAM
    partition: int = 0

    @property
    def place(self) -> RequestPlace:
        """The partition that it is for."""
        return RequestPlace(self.stream, self.partition)

    def matches(self, offset: int) -> bool:
        """True if the delta rejected at `offset` is to be replayed or dropped."""
        return self.verb in ("replay", "drop") and (not self.offsets or offset in self.offsets)


def put_request(disk: Disk, request: OperatorRequest, at_us: int) -> str:
    """Write a request; return its path. Durable when it returns. Raises UsageError if too many wait, OSError.

    `at_us`, in microseconds since 1970, gives the order of several requests.
    """
    if len(request.offsets) > OFFSETS_MAX:
        raise UsageError(f"{len(request.offsets)} offsets: give up to {OFFSETS_MAX}, or --all")
    disk.make_directory(DIRECTORY)
    disk.sync_directory("")
    names = disk.list(DIRECTORY)
    if len(names) >= COUNT_MAX:
        raise UsageError(
            f"{len(names)} requests wait in {DIRECTORY}/ already (bound {COUNT_MAX}): start the service, "
            "which carries them out, or remove files there"
        )
    while f"{at_us:020}{_SUFFIX}" in names:
        at_us += 1
    path = f"{DIRECTORY}/{at_us:020}{_SUFFIX}"
    replace_checked(disk, path, json.dumps(asdict(request)).encode(), Checksum.FIRST_LINE)
    return path


def read_requests(disk: Disk) -> dict[str, OperatorRequest | None]:
    """Return the requests by path, oldest first; None for a file that cannot be parsed."""
    paths = [f"{DIRECTORY}/{name}" for name in disk.list(DIRECTORY) if name.endswith(_SUFFIX)]
    return {path: request for path in paths if (request := _read(disk, path)) is not False}


def _read(disk: Disk, path: str) -> OperatorRequest | Literal[False] | None:
    """Return the request, None if it cannot be parsed, False if it was removed meanwhile."""
    try:
        body = read_checked(disk, path, Checksum.FIRST_LINE)
        if body is None:
            return False
        fields = json.loads(body)
        request = OperatorRequest(
            fields["verb"],
            str(fields["sink"]),
            str(fields["log_id"]),
            tuple(map(int, fields["offsets"])),
            str(fields.get("stream", DEFAULT_STREAM)),
            int(fields.get("partition", 0)),
        )
    except (LogCorrupted, KeyError, TypeError, ValueError):
        return None
    is_valid = request.verb in get_args(Verb)
    return request if is_valid and (request.verb not in _RESETS or len(request.offsets) == 1) else None


def refuse_request(disk: Disk, path: str, reason: str) -> None:
    """Report the reason to the command that waits for the request, and remove the request. Raises OSError."""
    replace_file(disk, path + _REFUSED, [reason.encode(errors="backslashreplace")])
    remove_request(disk, path)


def take_refusal(disk: Disk, path: str) -> str | None:
    """Return and delete the reason for which a request was refused; None if it was not. Raises OSError."""
    raw = read_file(disk, path + _REFUSED)
    if raw is None:
        return None
    remove_request(disk, path + _REFUSED)
    return raw.decode(errors="replace")


def remove_refusals(disk: Disk) -> None:
    """Remove the reports that no command waits for any more. Raises OSError."""
    for name in disk.list(DIRECTORY):
        if name.endswith(_REFUSED):
            remove_request(disk, f"{DIRECTORY}/{name}")


def remove_request(disk: Disk, path: str) -> None:
    """Remove a request that was carried out. Durable when it returns. Raises OSError."""
    try:
        disk.remove(path)
    except FileNotFoundError:
        return
    disk.sync_directory(DIRECTORY)


def forget_requests(disk: Disk, sink: str, log_id: bytes) -> None:
    """Remove the requests for a sink of a log that is forgotten. Raises OSError."""
    for path, request in read_requests(disk).items():
        if request is not None and (request.sink, request.log_id) == (sink, log_id.hex()):
            remove_request(disk, path)
