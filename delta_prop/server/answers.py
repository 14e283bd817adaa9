"""What the parts of one connection share: its client, its end, its refusals, and the answers that it sends.

Answers are everything besides deliveries and the outcomes of deltas.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from delta_prop.server.permissions import Permissions, Unauthorized
from delta_prop.server.quotas import NO_QUOTA, ConnectionQuota
from delta_prop_wire.delta import Source
from delta_prop_wire.errors import ProtocolError, Refused
from delta_prop_wire.frames import Ack, Frame, Hello, Nack, Request, Response
from delta_prop_wire.message_rules import Phase
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    import anyio

    from delta_prop.server.audit import Audit
    from delta_prop.server.connection_writer import ConnectionWriter
    from delta_prop.server.server_context import Counters
    from delta_prop_wire.connection import Connection


def log_recovered() -> Refused:
    """Return the reason to close a connection after an in-place recovery of the log."""
    return Refused(
        ErrorCode.SHUTTING_DOWN,
        "the log was recovered after a disk failure, and may have lost rows: reconnect, and resend what was "
        "not acknowledged",
        retry_after_ms=50,
    )


def server_closing() -> Refused:
    """Return the reason to close a connection when the server shuts down."""
    return Refused(
        ErrorCode.SHUTTING_DOWN,
        "the server is shutting down: reconnect, and resend what was not acknowledged",
        retry_after_ms=1_000,
    )


def partition_closing() -> Refused:
    """Return the reason to close a connection when its partition closes, because its stream was changed."""
    return Refused(
        ErrorCode.SHUTTING_DOWN,
        "the partition closes, since its stream was altered or deleted: reconnect, and resend what was not "
        "acknowledged",
        retry_after_ms=100,
    )


@dataclass(slots=True, eq=False)
class ConnectedClient:
    """The other end of a connection. `number`: of the connection; `name`: as the client calls itself.

    `permissions`: None before the first hello. `source`: that of its deltas. `codecs`: of compressed frames
    that it can read. `last_hello`: the one that its deltas follow. `is_counted`: as a connection of its
    token. `is_held`: a frame of its deltas waits for a quota.
    """

    number: int
    address: str
    name: str | None = None
    permissions: Permissions | None = None
    source: Source = Source.LOCAL
    codecs: frozenset[int] = frozenset()
    last_hello: Hello = field(default_factory=Hello)
    quota: ConnectionQuota = NO_QUOTA
    is_counted: bool = False
    is_held: bool = False

    @property
    def rights(self) -> Permissions:
        """Its permissions, after the first hello."""
        assert self.permissions is not None, "the connection passes no other frame before a hello"
        return self.permissions


@dataclass(slots=True, eq=False)
class ConnectionEnd:
    """The end that either side has announced.

    `is_draining`: True once the server drains, until `drain_until`; rows below `log_end` are still
    delivered. `is_finishing`: True once the client has ended its side.
    """

    is_draining: bool = False
    drain_until: float = inf
    log_end: float = inf
    is_finishing: bool = False


class RefusalLog:
    """The refusals of one client."""

    def __init__(self, client: ConnectedClient, counters: Counters, audit: Audit) -> None:
        self._client = client
        self._counters = counters
        self._audit = audit

    def narrow(self, refused: Refused) -> Refused:
        """Return a refusal without the names of streams that the client's token may not use."""
        permissions = self._client.permissions
        return refused if permissions is None else permissions.hide_streams(refused)

    def record(self, frame: str, refusal: Refused | ProtocolError) -> None:
        """Count a refusal, and write it to the audit log. `frame`: the type of the refused frame."""
        self._counters.count_nack(refusal.code)
        self._audit.record_refusal(self._client.address, self._client.permissions, frame, refusal)


class Answers:
    """Sends answers and refusals to one client, and ends its connection.

    `scope`: the cancel scope of the connection.
    """

    def __init__(
        self, writer: ConnectionWriter, connection: Connection, refusals: RefusalLog, scope: anyio.CancelScope
    ) -> None:
        self.writer = writer
        self.refusals = refusals
        self.scope = scope
        self._connection = connection

    @property
    def is_open(self) -> bool:
        """True between the first hello and the end of the connection."""
        return self._connection.phase is Phase.OPEN and not self.writer.is_ending

    def send(self, frame: Frame) -> None:
        """Send a frame; end the connection if the client leaves too many unread."""
        self.writer.send(frame)
        if self.writer.is_overfull:
            self.abort()

    def respond(self, request_number: int, response: Response, *, more: bool = False) -> None:
        """Answer the request of this number. `more`: True if another page follows."""
        self.send(Ack(0, correlation_id=request_number, response=response, more=more))

    def refuse(self, refused: Refused, *, correlation_id: int | None = None) -> None:
        """Send a refusal. `correlation_id`: the number of the refused request, if there is one."""
        self.refusals.record("REQUEST", refused)
        self.send(Nack.of(0, refused, correlation_id=correlation_id))
        if self._connection.phase is Phase.ENDED:  # the refused request was the first hello
            self.close()

    def refuse_request(self, request_number: int, request: Request, refused: Refused) -> None:
        """Refuse the request of this number."""
        refused = self.refusals.narrow(refused)
        if refused.code is ErrorCode.UNAUTHORIZED:  # the same text for every cause
            self.refuse_unauthorized(refused, type(request).__name__, correlation_id=request_number)
        else:
            self.refuse(refused, correlation_id=request_number)

    def refuse_unauthorized(
        self, refused: Refused, frame: str, sequence: int = 0, *, correlation_id: int | None = None
    ) -> None:
        """Refuse what the token does not allow, always with the same text, and end the connection.

        `sequence`: the number of the refused frame of deltas. `correlation_id`: that of the refused request.
        """
        if not isinstance(refused, Unauthorized):
            refused = Unauthorized(refused.message)
        self.refusals.record(frame, refused)
        self.close(Nack.of(sequence, refused, correlation_id=correlation_id))

    def refuse_bytes(self, error: ProtocolError) -> None:
        """Refuse invalid bytes, and end the connection."""
        self.refusals.record("FRAME", error)
        self.close(self._connection.nack_of(error))

    def close(self, nack: Nack | None = None) -> None:
        """Send `nack`, if given, as the last frame, and end."""
        if nack is not None and not self.writer.is_ending:
            self.send(nack)
        self.writer.is_ending = True
        self.writer.notify()

    def abort(self) -> None:
        """End the connection at once."""
        if not self.scope.cancel_called:  # a second cancel costs as much as the first
            self.scope.cancel()
